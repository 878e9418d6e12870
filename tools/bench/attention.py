"""bench attention: the generated sparse attention at released widths, against eager and torch.compile, on this GPU.

    v41 bench attention                    us of every contender, error, launches by origin; table and JSON
    v41 bench attention check              values against fp64, the same bits in any batch and any way, NaN rows
    v41 bench attention tune --rows 16     us of many ways to spread a row, with what Triton spilled

Records stand as a step hands them over: [T, 128, 528] of the window and [T, 512, 288] of the entries, a tenth hidden.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
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
from v41.tools.bench import modes, timing
from v41.tools.bench.boundary import COPY_BYTES_A_US, table
from v41.tools.bench.pieces import pieces_of
from v41.tools.bench.rivals import INDUCTOR, Call, alike, attempted, compiled, error

CONFIG = V41Config.preset("flash")
SEEN = 0.9
ULP = 2.0**-8  # of bf16
ROLES = ("queries", "cos", "sin", "window", "visible", "picked", "picks", "sink")  # of the arguments of `attention`


def attention(q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, seen: Tensor, picked: Tensor, picks: Tensor,
              sink: Tensor) -> Tensor:  # fmt: skip
    """What a layer with a compressed branch does between its projections."""
    keys = torch.cat((FP8_RECORD.decode(window), FP4_RECORD.decode(picked)), 1)
    o = attend(rotate(q, Turn(cos, sin)), keys, torch.cat((seen, picks >= 0), 1), sink)
    return rotate(o, Turn(cos, sin), inverse=True)


def inputs(rows: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
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


@cache
def piece() -> GraphModule:
    """The region alone, as a piece of a program."""
    given = inputs(7, "cpu")
    sizes = ["rows"] * (len(given) - 1)
    (body,) = pieces_of(attention, given, sizes, (canonicalize, outline_attention), KIND)
    return body


@cache
def kernel_of() -> AttentionKernel:
    made = generate(piece())
    if not isinstance(made, AttentionKernel):
        raise ValueError(f"refused because it {made.reason}, at {made.node}")
    return made


def ordered(arguments: Sequence[Tensor]) -> list[Any]:
    """Arguments of `attention` as the kernel takes them."""
    given = dict(zip(ROLES, arguments, strict=True))
    return [None if what is None else given[what.name] for what in kernel_of().inputs]


def launch(arguments: Sequence[Tensor], schedule: Spread | None = None) -> Tensor:
    return kernel_of().launch(*ordered(arguments), schedule=schedule)[0]


def exactly(arguments: Sequence[Tensor]) -> Tensor:
    """In fp64 throughout."""
    q, cos, sin, window, seen, picked, picks, sink = arguments
    tables = cos.double()[:, None], sin.double()[:, None]
    visible = torch.cat((seen, picks >= 0), 1)
    keys = torch.cat((FP8_RECORD.decode(window), FP4_RECORD.decode(picked)), 1).double()
    keys = keys.masked_fill(~visible[..., None], 0)
    q = turns.turn(q.double(), *tables, "adjacent", "last")
    _, o = attention_core.attend(q, keys, visible, CONFIG.head_dim**-0.5, sink.double()[:, None])
    return turns.turn(o, tables[0], -tables[1], "adjacent", "last")


# ---- bench, check, tune


def contenders() -> dict[str, Callable[[], Call]]:
    found: dict[str, Callable[[], Call]] = {"generated": lambda: lambda *args: launch(args), "eager": lambda: attention}
    return found | {name: partial(compiled, attention, each) for name, each in INDUCTOR.items()}


def sets_of(rows: int) -> list[tuple[Tensor, ...]]:
    first = inputs(rows, "cuda")
    return [first, *(inputs(rows, "cuda", seed) for seed in range(1, timing.sets_needed(bytes_of(first))))]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@torch.no_grad()
def bench(rows_list: Sequence[int], names: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """One record a contender and number of rows."""
    for name in names:
        for rows in rows_list:
            record: dict[str, Any] = {"contender": name, "rows": rows}
            yield attempted(record, deadline, partial(measure, contenders()[name], rows))


def measure(make: Callable[[], Call], rows: int) -> dict[str, Any]:
    call, sets = make(), sets_of(rows)
    return {
        "error": error(call(*sets[0]), exactly(sets[0])),
        "us": round(timing.microseconds(call, sets), 2),
        "floor_us": round((bytes_of(sets[0]) + bytes_of(sets[0][:1])) / COPY_BYTES_A_US, 2),
        "origin": timing.launches(partial(call, *sets[0]), KIND),
    }


@torch.no_grad()
def check() -> dict[str, Any]:
    """Every claim about results, as figures and booleans."""
    many = inputs(300, "cuda", 9)
    whole, truth = launch(many), exactly(many)
    ours, eager = error(whole, truth), error(attention(*many), truth)
    dirty = [arg.clone() for arg in many]
    for arg in (*dirty[:3],):
        arg[1::3] = float("nan")
    for records in (dirty[3], dirty[5]):
        records[1::3] = 255
    kept = torch.arange(300, device="cuda") % 3 != 1
    return {
        "errors": [ours, eager],
        "right": ours <= max(1.5 * eager, ULP),
        "same bits in every batch": {
            str(rows): alike([launch(first(many, rows))], [whole], rows) for rows in (1, 4, 5, 64, 65, 128)
        },
        "same bits any way": all(
            alike([launch(many, spread)], [whole], 300) for spread in kernel_of().candidates(300, many[0].device)
        ),
        "the same every time": all(torch.equal(launch(many), whole) for _ in range(20)),
        "NaN rows harm no other": torch.equal(launch(dirty)[kept], whole[kept]),
    }


def first(arguments: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [*(arg[:rows] for arg in arguments[:-1]), arguments[-1]]


@torch.no_grad()
def tune(rows_list: Sequence[int], deadline: float) -> Iterator[dict[str, Any]]:
    kernel = kernel_of()
    for rows in rows_list:
        sets = sets_of(rows)
        for spread in kernel.candidates(rows, sets[0][0].device):

            def measure(spread: Spread = spread, sets: list[tuple[Tensor, ...]] = sets) -> dict[str, Any]:
                launched = kernel.run(kernel.prepare(ordered(sets[0]), spread))
                us = timing.microseconds(lambda *args: launch(args, spread), sets)
                return {"spills": [each.n_spills for each in launched], "us": round(us, 2)}

            yield attempted({"rows": rows, "spread": str(spread)}, deadline, measure)


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench attention` does; 1 where a check fails."""
    timed = {
        "bench": lambda deadline: bench(arguments.rows, arguments.contenders, deadline),
        "tune": lambda deadline: tune(arguments.rows, deadline),
    }
    return modes.run(arguments, "attention", check, timed, table)
