"""index_cases: indexers of each role at released sizes, as functions of the plain model and as generated kernels, and
the steps that they are given.

    step = decode(16, 65_536, "cuda")        source(*step.plain)        launch("source", step)["picks"]

Decode: every row is a request with a context of its own in a slot of one cache of packed keys. The re-indexer scores
16,384 candidates however long the context is; the plain one scores all and hides the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41.lowering.templates.index_scores import KIND, IndexKernel, Spread, generate, kernel_of
from v41.lowering.templates.index_scores.launch import SCORES
from v41.lowering.templates.topk.launch import run_steps
from v41.model_def.config import V41Config
from v41.model_def.indexer import ascending_picks, candidate_mask, entries_of, index_scores
from v41.model_def.quantization import MXFP4_RECORD, fake_quant_mxfp4
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_index_scores import outline_index_scores
from v41.passes.restrict_index_scores import restrict_index_scores
from v41.regions import region_of, regions
from v41.tools.bench import timing
from v41.tools.bench.pieces import pieces_of

CONFIG = V41Config.preset("flash")
HEADS, WIDTH, K = CONFIG.index_n_heads, CONFIG.index_head_dim, CONFIG.index_topk
BLOCK, KEEP = CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
SIZES = ("rows",) * 7 + ("requests", "longest", "requests", "blocks")  # of the arguments of `three`, but for the cache
ROLES = ("source", "candidate_source", "re_indexer")
MOST_PLAIN = 1 << 22  # scores above which the plain model's decoded keys do not fit


@dataclass(frozen=True)
class Step:
    """What an indexer reads. lists: [T, K] candidate blocks, ascending."""

    queries: Tensor
    weights: Tensor
    positions: Tensor
    requests: Tensor
    columns: Tensor
    rows: Tensor
    slots: Tensor
    blocks: Tensor
    cache: Tensor
    lists: Tensor | None = None

    @property
    def plain(self) -> list[Tensor]:
        """As the functions below take it."""
        return [self.queries, self.weights, self.positions, self.requests, self.columns, self.rows, self.slots,
                self.blocks, self.cache]  # fmt: skip

    def first(self, rows: int) -> Step:
        few = {name: getattr(self, name)[:rows] for name in ("queries", "weights", "positions", "requests", "columns")}
        return replace(
            self, **few, rows=self.rows.clamp(max=rows - 1), lists=None if self.lists is None else self.lists[:rows]
        )

    @cached_property
    def mask(self) -> Tensor:
        """[T, E] bool, the candidates of the lists."""
        assert self.lists is not None
        blocks = len(self.blocks)
        marks = torch.zeros(len(self.lists), blocks + 1, dtype=torch.bool, device=self.lists.device)
        marks.scatter_(1, torch.where(self.lists < 0, blocks, self.lists), True)
        return marks[:, :blocks].repeat_interleave(BLOCK, 1)


def scores_of(q: Tensor, w: Tensor, positions: Tensor, requests: Tensor, columns: Tensor, rows: Tensor, slots: Tensor,
              blocks: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the plain model's indexer computes them, hidden ones -inf; and how many entries a row sees."""
    entries, seen = entries_of(blocks, BLOCK), positions + 1
    k = MXFP4_RECORD.decode(cache[slots.unsqueeze(-1), entries.clamp(max=cache.shape[1] - 1)])
    w = w.float() * (WIDTH * HEADS) ** -0.5
    scores = index_scores(q[rows], k, w[rows])[requests, columns]
    return scores.masked_fill(entries >= seen.unsqueeze(-1), -torch.inf), seen


def source(*step: Tensor) -> tuple[Tensor, ...]:
    return (ascending_picks(scores_of(*step)[0], K),)


def candidate_source(*step: Tensor) -> tuple[Tensor, ...]:
    scores, seen = scores_of(*step)
    return ascending_picks(scores, K), candidate_mask(scores, seen, KEEP, BLOCK)


def re_indexer(mask: Tensor, *step: Tensor) -> tuple[Tensor, ...]:
    return (ascending_picks(scores_of(*step)[0].masked_fill(~mask, -torch.inf), K),)


def three(q0: Tensor, q1: Tensor, q2: Tensor, w: Tensor, positions: Tensor, requests: Tensor, columns: Tensor,
          first: Tensor, longest: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """One indexer of each role."""
    places = positions, requests, columns, (first.unsqueeze(-1) + longest).clamp(max=q0.shape[0] - 1), *rest
    picks, mask = candidate_source(q1, w, *places)
    return *source(q0, w, *places), picks, *re_indexer(mask, q2, w, *places)


@cache
def traced() -> dict[str, GraphModule]:
    """The pieces of a program that are its indexers, by role."""
    step = decode(3, 4096 * BLOCK, "cpu")
    step = replace(
        step, cache=step.cache[:, :64].contiguous(), positions=step.positions % 60, blocks=step.blocks[: 2 * KEEP]
    )
    q, w, positions, requests, columns, rows, *rest = step.plain
    longest = torch.arange(rows.shape[1])
    given = [q, q + 1, q - 1, w, positions, requests, columns, rows[:, 0].contiguous(), longest, *rest]
    bodies = pieces_of(three, given, SIZES, (canonicalize, outline_index_scores, restrict_index_scores), KIND)
    return {region_of(next(regions(body, KIND))).attrs["role"]: body for body in bodies}


@cache
def kernel(role: str, capacity: int) -> IndexKernel:
    """The kernel of a role for a cache of so many entries a slot."""
    made = generate(traced()[role])
    if not isinstance(made, IndexKernel):
        raise ValueError(f"refused because it {made.reason}, at {made.node}")
    return kernel_of(replace(made.form, reach=capacity - 1), made.roles)


def ordered(role: str, step: Step) -> list[Any]:
    of = {name: getattr(step, name) for name in Step.__dataclass_fields__} | {"candidate_blocks": step.lists}
    return [None if name is None else of[name] for name in kernel(role, step.cache.shape[1]).roles]


def launch(role: str, step: Step, spread: Spread | None = None) -> dict[str, Tensor]:
    """The outputs by name, and the scores that they were chosen from."""
    made = kernel(role, step.cache.shape[1])
    steps, outputs = made.steps(ordered(role, step), spread)
    run_steps(made.module, steps)
    return dict(zip(made.form.outputs, outputs, strict=True)) | {"scores": steps[0].arguments[SCORES]}


def scores_alone(role: str, step: Step, spread: Spread | None = None) -> None:
    made = kernel(role, step.cache.shape[1])
    steps, _ = made.steps(ordered(role, step), spread)
    run_steps(made.module, steps[:1])


# ---- inputs


def keys(slots: int, capacity: int, device: str, seed: int = 0) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    bytes_ = torch.randint(
        0, 256, (slots, capacity, WIDTH // 32 * 17), dtype=torch.uint8, device=device, generator=draw
    )
    bytes_[..., WIDTH // 2 :] = bytes_[..., WIDTH // 2 :] % 8 + 122  # powers of two from 2^-5 to 4
    return bytes_


def decode(rows: int, context: int, device: str, seed: int = 0, stored: Tensor | None = None, at: int = 0) -> Step:
    """A row a request, each in a slot of its own from slot `at` on."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw, device=device).bfloat16()

    each = torch.arange(rows, device=device)
    blocks = torch.arange(-(-context // BLOCK), device=device)
    chosen = torch.rand(rows, len(blocks), generator=draw, device=device).argsort(1)[:, :KEEP].sort(1).values
    return Step(
        fake_quant_mxfp4(normal(rows, HEADS, WIDTH)),
        normal(rows, HEADS),
        torch.full((rows,), context - 1, device=device),
        each,
        torch.zeros_like(each),
        each[:, None],
        each + at,
        blocks,
        keys(rows, context, device, seed) if stored is None else stored,
        chosen.contiguous(),
    )


def prompt(rows: int, context: int, requests: int, device: str, seed: int = 0) -> Step:
    """Rows of a few requests that end at `context`, and every seventh a pad."""
    step = decode(rows, context, device, seed, keys(requests, context, device, seed))
    each = torch.arange(rows, device=device)
    longest = -(-rows // requests)
    positions = torch.where(each % 7 == 6, -1, context - rows + each)
    places = torch.arange(requests, device=device)[:, None] * longest + torch.arange(longest, device=device)
    slots = torch.arange(requests, device=device).flip(0)
    return replace(step, positions=positions, requests=each // longest, columns=each % longest,
                   rows=places.clamp(max=rows - 1), slots=slots)  # fmt: skip


def sets_of(rows: int, context: int, listed: bool) -> list[tuple[Step]]:
    """Steps that together read more than the L2 cache holds, in one cache."""
    read = rows * (min(context, KEEP * BLOCK) if listed else context) * (WIDTH // 32 * 17)
    count = min(timing.sets_needed(read), 240)
    stored = keys(rows * count, context, "cuda")
    steps = [decode(rows, context, "cuda", i, stored, i * rows) for i in range(count)]
    if listed and rows * context <= MOST_PLAIN:
        assert all(step.mask is not None for step in steps)  # made here and not where it is timed
    return [(step,) for step in steps]


def scores_drawn(rows: int, columns: int) -> list[tuple[Tensor]]:
    return [(torch.randn(rows, columns, device="cuda"),) for _ in range(timing.sets_needed(4 * rows * columns))]
