"""bench attention: the generated sparse attention at released widths, against eager and torch.compile, on this GPU.

    v41 bench attention                    us of every contender, error, launches by origin; table and JSON
    v41 bench attention check              values against fp64, the same bits in any batch and any way, NaN rows
    v41 bench attention tune --rows 16     us of many ways to spread a row, with what Triton spilled

"generated" is handed records as eager and torch.compile are, "in place" reads them where they lie in caches of 64K
entries: what they would be gathered for is spared beside that (attention_cases.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v41.lowering.templates.attention import KIND, Spread
from v41.tools.bench import modes, timing
from v41.tools.bench.attention_cases import HANDED, IN_PLACE, Case, attention, exactly, handed, kernel_of
from v41.tools.bench.boundary import COPY_BYTES_A_US, table
from v41.tools.bench.rivals import INDUCTOR, Call, alike, attempted, compiled, error

ULP = 2.0**-8  # of bf16
FAR = 130  # slots that hold more than 2^31 bytes of entries


def contenders() -> dict[str, Callable[[], Call]]:
    ours: dict[str, Callable[[], Call]] = {
        case.name: partial(lambda case: lambda *args: case.launch(args), case) for case in (HANDED, IN_PLACE)
    }
    rivals = {name: partial(compiled, attention, each) for name, each in INDUCTOR.items()}
    return ours | {"eager": lambda: attention} | rivals


def case_of(name: str) -> Case:
    return IN_PLACE if name == IN_PLACE.name else HANDED


def sets_of(case: Case, rows: int) -> list[tuple[Tensor, ...]]:
    first = case.draw(rows, "cuda")
    return [first, *(case.draw(rows, "cuda", seed) for seed in range(1, timing.sets_needed(bytes_read(case, first))))]


def bytes_read(case: Case, arguments: Sequence[Tensor]) -> int:
    """Of what a call reads, each record once."""
    read = handed(arguments) if case is IN_PLACE else arguments
    return sum(t.numel() * t.element_size() for t in read)


@torch.no_grad()
def bench(rows_list: Sequence[int], names: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """One record a contender and number of rows."""
    for name in names:
        for rows in rows_list:
            record: dict[str, Any] = {"contender": name, "rows": rows}
            yield attempted(record, deadline, partial(measure, contenders()[name], case_of(name), rows))


def measure(make: Callable[[], Call], case: Case, rows: int) -> dict[str, Any]:
    call, sets = make(), sets_of(case, rows)
    truth = exactly(handed(sets[0]) if case is IN_PLACE else sets[0])
    moved = bytes_read(case, sets[0]) + sets[0][0].numel() * sets[0][0].element_size()
    return {
        "error": error(call(*sets[0]), truth),
        "us": round(timing.microseconds(call, sets), 2),
        "floor_us": round(moved / COPY_BYTES_A_US, 2),
        "origin": timing.launches(partial(call, *sets[0]), KIND),
    }


@torch.no_grad()
def check() -> dict[str, Any]:
    """Every claim about results, as figures and booleans."""
    many = HANDED.draw(300, "cuda", 9)
    whole, truth = HANDED.launch(many), exactly(many)
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
        "same bits in every batch": in_batches(HANDED, many, whole),
        "same bits any way": any_way(HANDED, many, whole),
        "the same every time": all(torch.equal(HANDED.launch(many), whole) for _ in range(20)),
        "NaN rows harm no other": torch.equal(HANDED.launch(dirty)[kept], whole[kept]),
        "in place": {str(rows): check_in_place(rows) for rows in (64, 300)},
    }


def in_batches(case: Case, many: Sequence[Tensor], whole: Tensor) -> dict[str, bool]:
    sizes = (rows for rows in (1, 4, 5, 64, 65, 128) if rows <= len(whole))
    return {str(rows): alike([case.launch(case.first(many, rows))], [whole], rows) for rows in sizes}


def any_way(case: Case, many: Sequence[Tensor], whole: Tensor) -> bool:
    candidates = kernel_of(case).candidates(len(whole), whole.device)
    return all(alike([case.launch(many, spread)], [whole], len(whole)) for spread in candidates)


def check_in_place(rows: int) -> dict[str, Any]:
    """Of rows that decode, or of a chunk."""
    many = IN_PLACE.draw(rows, "cuda", 9)
    *given, sink, ring, entries = many
    whole = IN_PLACE.launch(many)
    seen, picks, slots, places, _, in_step = given[3:9]
    read = [torch.zeros(cache.shape[:2], dtype=torch.bool, device="cuda") for cache in (ring, entries)]
    lies = slots.unsqueeze(-1)
    read[0][lies.expand_as(places)[seen & ~in_step], places[seen & ~in_step]] = True
    read[1][lies.expand_as(picks)[picks >= 0], picks[picks >= 0]] = True
    poisoned = [torch.where(each.unsqueeze(-1), cache, 255) for each, cache in zip(read, (ring, entries), strict=True)]
    far = torch.zeros(FAR, *entries.shape[1:], dtype=torch.uint8, device="cuda")
    far[-len(entries) :] = entries
    beyond = [ring.new_zeros(FAR, *ring.shape[1:]), far]
    beyond[0][-len(ring) :] = ring
    moved = [*given[:5], slots + FAR - len(entries), *given[6:]]
    return {
        "bits of one that is handed them": alike([whole], [HANDED.launch(handed(many))], rows),
        "same bits in every batch": in_batches(IN_PLACE, many, whole),
        "same bits any way": any_way(IN_PLACE, many, whole),
        "what nobody reads harms nobody": torch.equal(IN_PLACE.launch([*given, sink, *poisoned]), whole),
        "beyond 2^31 bytes": torch.equal(IN_PLACE.launch([*moved, sink, *beyond]), whole),
    }


@torch.no_grad()
def tune(rows_list: Sequence[int], deadline: float) -> Iterator[dict[str, Any]]:
    kernel = kernel_of(HANDED)
    for rows in rows_list:
        sets = sets_of(HANDED, rows)
        for spread in kernel.candidates(rows, sets[0][0].device):

            def measure(spread: Spread = spread, sets: list[tuple[Tensor, ...]] = sets) -> dict[str, Any]:
                launched = kernel.run(kernel.prepare(HANDED.ordered(sets[0]), spread))
                us = timing.microseconds(lambda *args: HANDED.launch(args, spread), sets)
                return {"spills": [each.n_spills for each in launched], "us": round(us, 2)}

            yield attempted({"rows": rows, "spread": str(spread)}, deadline, measure)


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench attention` does; 1 where a check fails."""
    timed = {
        "bench": lambda deadline: bench(arguments.rows, arguments.contenders, deadline),
        "tune": lambda deadline: tune(arguments.rows, deadline),
    }
    return modes.run(arguments, "attention", check, timed, table)
