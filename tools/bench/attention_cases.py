"""attention_cases: attention at the widths of `flash`, as a region that is handed records and as one that reads caches.

    HANDED      records of the window [T, 128, 528], of the entries [T, 512, 288]
    IN_PLACE    ring [S, 128, 528], records of this step [T, 528], entries [S, 65537, 288], and where records lie there

A tenth of the keys is hidden. Few rows decode: each has a slot, and of its window its own key alone is of this step.
Many are a chunk of one request, whose windows are of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41.lowering.templates.attention import KIND, AttentionKernel, Spread, generate
from v41.model_def.attention import attend
from v41.model_def.config import V41Config
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD
from v41.model_def.rope import Turn, rotate
from v41.passes import attention_core, turns
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_attention import outline_attention
from v41.passes.take_in_gathers import take_in_gathers
from v41.tools.bench.pieces import pieces_of

CONFIG = V41Config.preset("flash")
SEEN = 0.9
ENTRIES, SLOTS, DECODING = 65_536, 16, 64  # entries a slot, slots at most, rows that still decode


def attention(q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, seen: Tensor, picked: Tensor, picks: Tensor,
              sink: Tensor) -> Tensor:  # fmt: skip
    """What a layer with a compressed branch does between its projections."""
    keys = torch.cat((FP8_RECORD.decode(window), FP4_RECORD.decode(picked)), 1)
    o = attend(rotate(q, Turn(cos, sin)), keys, torch.cat((seen, picks >= 0), 1), sink)
    return rotate(o, Turn(cos, sin), inverse=True)


def attention_in_place(q: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, picks: Tensor, slots: Tensor, places: Tensor,
                       rows: Tensor, in_step: Tensor, records: Tensor, sink: Tensor, ring: Tensor,
                       entries: Tensor) -> Tensor:  # fmt: skip
    """The same where its records lie in caches."""
    window, picked = gathered(picks, slots, places, rows, in_step, records, ring, entries)
    return attention(q, cos, sin, window, seen, picked, picks, sink)


def gathered(picks: Tensor, slots: Tensor, places: Tensor, rows: Tensor, in_step: Tensor, records: Tensor, ring: Tensor,
             entries: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Records of the window and of the picks, as the model gathers them."""
    window = torch.where(in_step.unsqueeze(-1), records[rows], ring[slots.unsqueeze(-1), places])
    return window, entries[slots.unsqueeze(-1), picks.clamp(min=0)]


def inputs(rows: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Of `attention`."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, width, window, k = CONFIG.num_attention_heads, CONFIG.head_dim, CONFIG.sliding_window, CONFIG.index_topk

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    def shown(count: int) -> Tensor:
        return torch.rand(rows, count, generator=generator, device=device) < SEEN

    angle = normal(rows, CONFIG.qk_rope_head_dim // 2) * 100
    picks = torch.where(shown(k), torch.arange(k, device=device), -1)
    keys, entries = normal(rows, window, width).bfloat16(), normal(rows, k, width).bfloat16()
    q, seen, sink = normal(rows, heads, width).bfloat16(), shown(window), normal(heads)
    return q, angle.cos(), angle.sin(), FP8_RECORD.encode(keys), seen, FP4_RECORD.encode(entries), picks, sink


def inputs_in_place(rows: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Of `attention_in_place`. Caches are the same for all seeds."""
    q, cos, sin, _, seen, _, picks, sink = inputs(rows, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    decodes, count = rows <= DECODING, CONFIG.sliding_window
    ring, entries = caches(device)
    number = torch.arange(rows, device=device)
    back = torch.arange(count - 1, -1, -1, device=device)
    chosen = torch.randint(0, ENTRIES, picks.shape, generator=generator, device=device).sort(-1).values
    slots = number % SLOTS if decodes else torch.zeros_like(number)
    in_step = (back == 0).expand(rows, -1).contiguous() if decodes else torch.ones_like(seen)
    places = torch.randint(0, count, (rows, 1), generator=generator, device=device) - back
    now = (number.unsqueeze(-1) - back * (not decodes)).clamp(min=0)
    records = torch.randn(rows, CONFIG.head_dim, generator=generator, device=device).bfloat16()
    return (q, cos, sin, seen, torch.where(picks >= 0, chosen, -1), slots, places % count, now, in_step,
            FP8_RECORD.encode(records), sink, ring, entries)  # fmt: skip


@cache
def caches(device: str) -> tuple[Tensor, Tensor]:
    """A ring and entries. Slots hold the same records, each in an order of its own."""
    generator = torch.Generator(device).manual_seed(0)

    def slots(stored: Tensor) -> Tensor:
        return torch.stack([stored.roll(slot, 0) for slot in range(SLOTS)])

    ring, entries = (torch.randn(count, CONFIG.head_dim, generator=generator, device=device).bfloat16()
                     for count in (CONFIG.sliding_window, ENTRIES + 1))  # fmt: skip
    return slots(FP8_RECORD.encode(ring)), slots(FP4_RECORD.encode(entries))


@dataclass(frozen=True)
class Case:
    """roles: what the arguments of `fn` are to its region, those with rows first; of the last ones `held` have none."""

    name: str
    fn: Callable[..., Tensor]
    roles: tuple[str, ...]
    held: int
    draw: Callable[..., tuple[Tensor, ...]]  # rows, device, seed -> arguments

    def piece(self) -> GraphModule:
        """The region alone, as a piece of a program."""
        given = self.draw(7, "cpu")
        passes = (canonicalize, outline_attention, take_in_gathers)
        (body,) = pieces_of(self.fn, given, ["rows"] * (len(given) - self.held), passes, KIND)
        return body

    def launch(self, arguments: Sequence[Tensor], schedule: Spread | None = None) -> Tensor:
        return kernel_of(self).launch(*self.ordered(arguments), schedule=schedule)[0]

    def ordered(self, arguments: Sequence[Tensor]) -> list[Any]:
        """Arguments of `fn` as the kernel takes them."""
        given = dict(zip(self.roles, arguments, strict=True))
        return [None if what is None else given[what.name] for what in kernel_of(self).inputs]

    def first(self, arguments: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Those of the first rows."""
        some = len(arguments) - self.held
        return [*(arg[:rows] for arg in arguments[:some]), *arguments[some:]]


HANDED = Case(
    "generated", attention, ("queries", "cos", "sin", "window", "visible", "picked", "picks", "sink"), 1, inputs
)
IN_PLACE = Case(
    "in place",
    attention_in_place,
    ("queries", "cos", "sin", "visible", "picks", "slots", "window_places", "window_rows", "window_in_step",
     "window_records", "sink", "window", "picked"),
    3,
    inputs_in_place,
)  # fmt: skip


@cache
def kernel_of(case: Case) -> AttentionKernel:
    made = generate(case.piece())
    if not isinstance(made, AttentionKernel):
        raise ValueError(f"refused because it {made.reason}, at {made.node}")
    return made


def handed(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Arguments of `attention_in_place` as those of `attention`."""
    q, cos, sin, seen, picks, slots, places, rows, in_step, records, sink, ring, entries = arguments
    window, picked = gathered(picks, slots, places, rows, in_step, records, ring, entries)
    return q, cos, sin, window, seen, picked, picks, sink


def exactly(arguments: Sequence[Tensor]) -> Tensor:
    """`attention` in fp64 throughout."""
    q, cos, sin, window, seen, picked, picks, sink = arguments
    tables = cos.double()[:, None], sin.double()[:, None]
    visible = torch.cat((seen, picks >= 0), 1)
    keys = torch.cat((FP8_RECORD.decode(window), FP4_RECORD.decode(picked)), 1).double()
    keys = keys.masked_fill(~visible[..., None], 0)
    q = turns.turn(q.double(), *tables, "adjacent", "last")
    _, o = attention_core.attend(q, keys, visible, CONFIG.head_dim**-0.5, sink.double()[:, None])
    return turns.turn(o, tables[0], -tables[1], "adjacent", "last")
