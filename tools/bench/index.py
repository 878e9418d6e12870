"""bench index: generated indexers and selections at released sizes, against eager and torch.compile, on this GPU.

    v41 bench index                    us of every contender by role, context and rows; table and JSON
    v41 bench index check              picks against the model's, scores against fp64, the same bits in any batch, NaN
    v41 bench index tune --rows 16     us of many ways to spread scores and to cut rows into tiles

Decode: every row is a request with a context of its own in a slot of one cache of packed keys. The re-indexer scores
16,384 candidates however long the context is; the plain one scores all and hides the others.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat_trace import functional_aten, mark_rows
from v41.lowering.templates.index_scores import KIND, IndexKernel, Spread, generate, kernel_of
from v41.lowering.templates.index_scores.launch import SCORES
from v41.lowering.templates.topk import TopK
from v41.lowering.templates.topk.launch import run_steps
from v41.model_def.config import V41Config
from v41.model_def.indexer import ascending_picks, candidate_mask, entries_of, index_scores
from v41.model_def.quantization import MXFP4_RECORD, fake_quant_mxfp4
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_index_scores import outline_index_scores
from v41.passes.partition import partition
from v41.passes.restrict_index_scores import restrict_index_scores
from v41.regions import region_of, regions
from v41.tools.bench import modes, timing
from v41.tools.bench.boundary import COPY_BYTES_A_US

CONFIG = V41Config.preset("flash")
HEADS, WIDTH, K = CONFIG.index_n_heads, CONFIG.index_head_dim, CONFIG.index_topk
BLOCK, KEEP = CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
SIZES = ("rows",) * 7 + ("requests", "longest", "requests", "blocks")  # of the arguments of `three`, but for the cache
ROLES = ("source", "candidate_source", "re_indexer")
MOST_PLAIN = 1 << 22  # scores above which the plain model's decoded keys do not fit
TRIED = ((64, 1, 4), (64, 2, 4), (64, 8, 4), (128, 1, 4), (128, 4, 4), (128, 8, 8))  # entries, tiles, warps
Call = Callable[..., Any]


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
    found: list[GraphModule] = []

    def keep(gm: GraphModule, fake: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(given: list[Any]) -> Any:
            return gm(*given)

        found.append(gm)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    step = decode(3, 4096 * BLOCK, "cpu")
    step = replace(
        step, cache=step.cache[:, :64].contiguous(), positions=step.positions % 60, blocks=step.blocks[: 2 * KEEP]
    )
    q, w, positions, requests, columns, rows, *rest = step.plain
    longest = torch.arange(rows.shape[1])
    given = [q, q + 1, q - 1, w, positions, requests, columns, rows[:, 0].contiguous(), longest, *rest]
    for tensor, size in zip(given, SIZES, strict=False):
        mark_rows(tensor, size)
    with torch.no_grad():
        torch.compile(three, backend=lambda gm, fake: functional_aten(gm, fake, keep, keep))(*given)
    (gm,) = found
    for run in (canonicalize, outline_index_scores, restrict_index_scores):
        run(gm)
    bodies = [each.body for each in partition(gm, cut_at=(KIND,)).pieces if list(regions(each.body, KIND))]
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


# ---- check


@torch.no_grad()
def check() -> dict[str, Any]:
    """Every claim about results, as figures and booleans."""
    return {"selection": check_selection(), "decode": check_scores(decode(20, 8192, "cuda", 1)),
            "prompt": check_scores(prompt(90, 8192, 4, "cuda", 2)), "a million": check_long()}  # fmt: skip


def check_selection() -> dict[str, bool]:
    draw = torch.Generator("cuda").manual_seed(0)

    def rows_of(columns: int) -> Tensor:
        """A row each of: any, few values, close ones, zeros of both signs, NaN, -inf and both among others, few."""
        found = torch.randn(8, columns, generator=draw, device="cuda")
        some = torch.rand(8, columns, generator=draw, device="cuda")
        found[1] = found[1].round()
        found[2] = 1 + (some[2] * 3000).floor() * 2.0**-23
        found[3] = torch.where(some[3] < 0.5, 0.0, -0.0)
        found[4] = torch.nan
        found[5] = -torch.inf
        found[6] = torch.where(some[6] < 0.4, torch.nan, torch.where(some[6] < 0.8, -torch.inf, found[6]))
        found[7] = torch.where(some[7] < 100 / columns, found[7], -torch.inf)
        return found

    found = {}
    for k, columns in ((K, 1000), (K, 16_384), (K, 131_072), (K, 1 << 20), (KEEP, 65_536), (7, 5000)):
        scores = rows_of(columns)
        wanted, (ours,) = ascending_picks(scores, k), TopK.of(k).launch(scores)
        again = all(torch.equal(TopK.of(k).launch(scores)[0], ours) for _ in range(5))
        found[f"{k} of {columns}"] = torch.equal(ours, wanted) and again
    return found


def check_scores(step: Step) -> dict[str, Any]:
    """Scores against fp64, what is chosen against the model's choice from the same scores, and bits."""
    rows, seen = len(step.positions), step.positions + 1
    whole = {role: launch(role, step) for role in ROLES}
    mine = {role: each["scores"] for role, each in whole.items()}
    truth, (plain, _) = exactly(step), scores_of(*step.plain)
    shown = truth > -torch.inf
    ours, eager = (rms((each - truth)[shown]) / rms(truth[shown]) for each in (mine["source"], plain))
    kept = candidate_mask(mine["candidate_source"], seen, KEEP, BLOCK)[:, ::BLOCK]
    among = mine["source"].masked_fill(~step.mask, -torch.inf)
    agree = (whole["source"]["picks"] == ascending_picks(plain, K)).double().mean().item()
    dirty = replace(step, queries=step.queries.clone())
    bad = torch.arange(rows, device="cuda") % 3 == 1
    dirty.queries[bad] = torch.nan
    return {
        "errors": [ours, eager],
        "right": ours <= max(1.5 * eager, 2.0**-23) and torch.equal(mine["source"] > -torch.inf, shown),
        "picks as eager's": agree,
        "picks": all(
            torch.equal(whole[role]["picks"], ascending_picks(mine[role], K)) for role in ("source", "candidate_source")
        ),
        "blocks": torch.equal(whole["candidate_source"]["kept_blocks"], listed(kept)),
        "candidates alone": torch.equal(whole["re_indexer"]["picks"], ascending_picks(among, K)),
        "same bits in every batch": {
            str(n): all(same(launch(role, step.first(n)), whole[role], n) for role in ROLES) for n in (1, 3, 4, 17)
        },
        "same bits any way": all(same(launch(role, step, each), whole[role], rows)
                                 for role in ROLES for each in (Spread(1, 2, 64), Spread(1, 1, 128))),
        "the same every time": all(same(launch(role, step), whole[role], rows) for role in ROLES for _ in range(5)),
        "NaN rows harm no other": all(
            torch.equal(launch(role, dirty)["picks"][~bad], whole[role]["picks"][~bad]) for role in ROLES
        ),
        "NaN rows pick nothing": bool((launch("source", dirty)["picks"][bad] == -1).all()),
    }  # fmt: skip


def check_long() -> dict[str, bool]:
    step = decode(2, 1 << 20, "cuda", 3)
    step.positions[0] = 700
    whole = launch("candidate_source", step)
    kept = candidate_mask(whole["scores"], step.positions + 1, KEEP, BLOCK)[:, ::BLOCK]
    short = launch("source", replace(step.first(1), blocks=step.blocks[:100], lists=None))
    return {
        "picks": torch.equal(whole["picks"], ascending_picks(whole["scores"], K)),
        "blocks": torch.equal(whole["kept_blocks"], listed(kept)),
        "a short context in a long bucket": torch.equal(whole["picks"][:1], short["picks"]),
    }


def listed(kept: Tensor) -> Tensor:
    """Blocks kept, bool [T, B] -> their numbers [T, min(KEEP, B)], ascending, then -1."""
    beyond = kept.shape[1]
    number = torch.where(kept, torch.arange(beyond, device=kept.device), beyond).sort(1).values[:, :KEEP]
    return torch.where(number < beyond, number, -1)


def exactly(step: Step) -> Tensor:
    """Scores in fp64."""
    q, w, positions, requests, columns, rows, slots, blocks, cache = step.plain
    entries = entries_of(blocks, BLOCK)
    k = MXFP4_RECORD.decode(cache[slots[:, None], entries.clamp(max=cache.shape[1] - 1)]).double()
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    w = (w.float() * (WIDTH * HEADS) ** -0.5).double()[rows]
    for head in range(HEADS):
        x = torch.einsum("rqd,red->rqe", q[rows][:, :, head].double(), k).relu()
        total = total + x * w[:, :, head].unsqueeze(-1)
    return total[requests, columns].masked_fill(entries >= (positions + 1)[:, None], -torch.inf)


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def same(part: dict[str, Tensor], whole: dict[str, Tensor], rows: int) -> bool:
    return all(torch.equal(part[name].view(torch.uint8), whole[name][:rows].view(torch.uint8)) for name in whole)


# ---- bench, tune


def sets_of(rows: int, context: int, listed: bool) -> list[tuple[Step]]:
    """Steps that together read more than the L2 cache holds, in one cache."""
    read = rows * (min(context, KEEP * BLOCK) if listed else context) * (WIDTH // 32 * 17)
    count = min(timing.sets_needed(read), 240)
    stored = keys(rows * count, context, "cuda")
    steps = [decode(rows, context, "cuda", i, stored, i * rows) for i in range(count)]
    if listed and rows * context <= MOST_PLAIN:
        assert all(step.mask is not None for step in steps)  # made here and not where it is timed
    return [(step,) for step in steps]


def contenders(role: str) -> dict[str, Callable[[], Callable[[Step], Any]]]:
    forms: dict[str, Call] = {"source": source, "candidate_source": candidate_source, "re_indexer": re_indexer}
    plain = forms[role]

    def of(call: Call) -> Callable[[Step], Any]:
        return lambda step: call(*([step.mask] if role == "re_indexer" else []), *step.plain)

    def compiled() -> Callable[[Step], Any]:
        torch.compiler.reset()
        return of(torch.compile(plain, options={"reorder_for_locality": False}, dynamic=False))

    return {"generated": lambda: partial(launch, role), "scores": lambda: partial(scores_alone, role),
            "eager": lambda: of(plain), "compile": compiled}  # fmt: skip


def scores_alone(role: str, step: Step, spread: Spread | None = None) -> None:
    made = kernel(role, step.cache.shape[1])
    steps, _ = made.steps(ordered(role, step), spread)
    run_steps(made.module, steps[:1])


def cases(contexts: Sequence[int], rows_list: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    for role in ROLES:
        for context in contexts:
            if role == "candidate_source" and context != max(contexts):
                continue
            for rows in rows_list:
                yield role, context, rows


@torch.no_grad()
def bench(contexts: Sequence[int], rows_list: Sequence[int], names: Sequence[str], deadline: float) -> Iterator[Any]:
    """One record a contender and case, the selections first."""
    for columns in (16_384, 131_072):
        for rows in rows_list:
            draw = scores_drawn(rows, columns)
            record: dict[str, Any] = {"role": f"{K} of {columns}", "context": columns, "rows": rows}
            floor = round(4 * rows * columns / COPY_BYTES_A_US, 2)
            rivals: dict[str, Call] = {"generated": TopK.of(K).launch, "torch.topk": partial(torch.topk, k=K)}
            for name, call in rivals.items():
                yield measured(
                    record | {"contender": name, "floor_us": floor}, lambda c=call: c, lambda d=draw: d, deadline
                )
    for name in names:
        for role, context, rows in cases(contexts, rows_list):
            if name in ("eager", "compile") and (rows * context > MOST_PLAIN or role == "candidate_source"):
                continue
            record = {"role": role, "context": context, "rows": rows, "contender": name}
            entries = min(context, KEEP * BLOCK) if role == "re_indexer" else context
            record["floor_us"] = round(rows * entries * (WIDTH // 32 * 17) / COPY_BYTES_A_US, 2)
            yield measured(
                record, contenders(role)[name], partial(sets_of, rows, context, role == "re_indexer"), deadline
            )


def measured(record: dict[str, Any], make: Call, sets: Call, deadline: float) -> dict[str, Any]:
    """`record` with the time of what `make` makes on what `sets` makes, and its launches."""
    try:
        if time.perf_counter() > deadline:
            raise TimeoutError("left out: no time")
        call, given = make(), sets()
        record["us"] = round(timing.microseconds(call, given), 2)
        record["origin"] = timing.launches(lambda: call(*given[0]), ("scores_", "select"))
    except Exception as failure:  # the record of a contender that fails is the result
        record["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
    torch.cuda.empty_cache()
    return record


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line a case: the floor, then every contender."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    lines = [f"{'role':<18}{'context':>9}{'rows':>6}{'floor':>9}" + "".join(f"{name:>13}" for name in names) + "  (µs)"]
    known = {(r["role"], r["context"], r["rows"]): r["floor_us"] for r in records}
    us = {(r["role"], r["context"], r["rows"], r["contender"]): r.get("us") for r in records}
    for (role, context, rows), floor in known.items():
        cells = "".join(f"{us.get((role, context, rows, name)) or '-':>13}" for name in names)
        lines.append(f"{role:<18}{context:>9}{rows:>6}{floor:>9}{cells}")
    return "\n".join(lines)


@torch.no_grad()
def tune(contexts: Sequence[int], rows_list: Sequence[int], deadline: float) -> Iterator[dict[str, Any]]:
    """Spreads of the scores alone, then tiles of the selection alone."""
    for role, context, rows in cases(contexts, rows_list):
        sets = sets_of(rows, context, role == "re_indexer") if role != "candidate_source" else []
        for block, turns, warps in TRIED if sets else ():
            spread = Spread(1, turns, block, warps)
            record: dict[str, Any] = {"role": role, "context": context, "rows": rows, "spread": str(spread)}
            alone = partial(scores_alone, role, spread=spread)
            yield measured(record, lambda alone=alone: alone, lambda sets=sets: sets, deadline)
    for columns in (16_384, 131_072):
        for rows in rows_list:
            drawn = scores_drawn(rows, columns)
            for tile in (2048, 4096, 8192, 16_384):
                record = {"role": f"{K} of {columns}", "context": columns, "rows": rows, "tile": tile}
                call = partial(TopK.of(K).launch, schedule=tile)
                yield measured(record, lambda call=call: call, lambda drawn=drawn: drawn, deadline)


def scores_drawn(rows: int, columns: int) -> list[tuple[Tensor]]:
    return [(torch.randn(rows, columns, device="cuda"),) for _ in range(timing.sets_needed(4 * rows * columns))]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench index` does; 1 where a check fails."""
    timed = {
        "bench": lambda deadline: bench(arguments.contexts, arguments.rows, arguments.contenders, deadline),
        "tune": lambda deadline: tune(arguments.contexts, arguments.rows, deadline),
    }
    return modes.run(arguments, "index", check, timed, table)
