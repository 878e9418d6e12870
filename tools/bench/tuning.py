"""tuning: many schedules of kernels, compiled by many processes, timed by one.

    tune([("router", 1), ("boundary", 4096)], workers, deadline)     a record a case, number of rows and schedule

A worker compiles its share by launching it once: Triton's cache on disk then holds every schedule when the timing
process asks. Pairs take turns, so that none is left without rivals where time is short; those that differ in rows
alone share what is compiled. The schedule by reckoning is the first of each pair. Of it and of the fastest each launch
is timed alone, too, and both one after the other where the second comes up early.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from v41.lowering.rowwise import Kernel, Unsupported, generate
from v41.lowering.rowwise.held.launch import Spread
from v41.lowering.rowwise.launch import Call
from v41.tools.bench import timing
from v41.tools.bench.rowwise_cases import CASES, Case

SETS = 64  # of inputs, at most
WHOLE_ROWS = [Spread(rows, warps) for rows in (1, 2, 4) for warps in (1, 2, 4, 8, 16)]  # each in an order of its own
COMPILING = 0.45  # of the time: what has not compiled then is left out
MOST_ROWS, WORST = 4096, 1.5  # of a drawn pair; how much slower reckoning may be than tuning
Record = dict[str, Any]
Pair = tuple[str, int]  # name of a case, rows


@dataclass(frozen=True)
class Candidate:
    case: str
    rows: int
    schedule: Any
    reckoned: bool


@cache
def kernel_of(name: str) -> Kernel:
    """The kernel of a case, which is to be none that is refused."""
    kernel = generate(CASES[name].body(), name)
    if isinstance(kernel, Unsupported):
        raise ValueError(f"refused because it {kernel.reason}, at {kernel.node}")
    return kernel


def input_sets(case: Case, rows: int) -> list[tuple[Tensor, ...]]:
    """Inputs that together exceed the L2 cache twice, or SETS of them."""
    first = case.inputs(rows, "cuda", 0)
    count = min(timing.sets_needed(sum(t.numel() * t.element_size() for t in first)), SETS)
    return [first, *(case.inputs(rows, "cuda", seed) for seed in range(1, count))]


def candidates(name: str, rows: int, device: torch.device) -> list[Candidate]:
    """The schedule by reckoning, then all others that are tried."""
    kernel = kernel_of(name)
    reckoned = kernel.schedule_for(rows, device)
    ways = dict.fromkeys([reckoned, *(kernel.candidates(rows, device) or WHOLE_ROWS)])
    return [Candidate(name, rows, way, way == reckoned) for way in ways]


def drawn_pairs(seed: int, count: int = 10) -> list[Pair]:
    """`count` cases with more than one schedule to choose from, each with a number of rows: any up to MOST_ROWS, small
    ones as likely as large ones."""
    draw = random.Random(seed)
    names = [name for name in CASES if kernel_of(name).candidates(1, torch.device("cpu"))]
    return [(draw.choice(names), round(MOST_ROWS ** draw.random())) for _ in range(count)]


def tune(pairs: Sequence[Pair], workers: int, deadline: float) -> Iterator[Record]:
    """One record a candidate of each pair, as they are timed; those that had no time say so."""
    todo = [each for pair in pairs for each in candidates(*pair, torch.device("cuda"))]
    started = time.perf_counter()
    facts = _compile(in_turns(todo), workers, started + COMPILING * (deadline - started))
    for name, rows in dict.fromkeys(pairs):
        mine = [each for each in todo if (each.case, each.rows) == (name, rows)]
        sets = input_sets(CASES[name], rows)
        records: list[Record] = []
        for each in mine:
            record = {"case": name, "rows": rows, "schedule": str(each.schedule), "reckoned": each.reckoned}
            found = facts.get((each.case, each.schedule), {"failed": "not compiled in time"})
            records.append(record | _timed(each, mine[0], sets, found, deadline))
        fastest = min((record["us"] for record in records if "us" in record), default=None)
        for record, each in zip(records, mine, strict=True):
            if "us" in record and (each.reckoned or record["us"] == fastest):
                record |= _by_launch(each, sets)
        yield from records


def in_turns(todo: Sequence[Candidate]) -> list[Candidate]:
    """One candidate of each pair, the next of each, and so on; each schedule of a case once."""
    place = Counter[Pair]()
    turns: list[tuple[int, Candidate]] = []
    for each in todo:
        turns.append((place[each.case, each.rows], each))
        place[each.case, each.rows] += 1
    once: dict[tuple[str, Any], Candidate] = {}
    for _, each in sorted(turns, key=lambda turn: turn[0]):
        once.setdefault((each.case, each.schedule), each)
    return list(once.values())


def _compile(todo: Sequence[Candidate], workers: int, deadline: float) -> dict[tuple[str, Any], Record]:
    """Registers, spills and shared memory of every schedule of a case that compiled in time, or its error."""
    facts: dict[tuple[str, Any], Record] = {}
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    pending = {pool.submit(_compile_one, candidate): candidate for candidate in todo}
    try:
        for future in as_completed(pending, timeout=max(deadline - time.perf_counter(), 1)):
            facts[pending[future].case, pending[future].schedule] = future.result()
    except TimeoutError:
        print(f"{len(facts)} of {len(pending)} compiled in time", flush=True)
    for process in list((pool._processes or {}).values()) if len(facts) < len(pending) else ():
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    return facts


def _compile_one(candidate: Candidate) -> Record:
    kernel, started = kernel_of(candidate.case), time.perf_counter()
    inputs = CASES[candidate.case].inputs(max(getattr(candidate.schedule, "tile", candidate.schedule.rows), 2), "cuda")
    try:
        compiled = kernel.run(kernel.prepare(inputs, candidate.schedule))
        torch.cuda.synchronize()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
    return {
        "registers": [each.n_regs for each in compiled],
        "spills": [each.n_spills for each in compiled],
        "shared": max(each.metadata.shared for each in compiled),
        "compile_seconds": round(time.perf_counter() - started, 1),
    }


@torch.no_grad()
def _timed(each: Candidate, reckoned: Candidate, sets: Sequence[Any], facts: Record, deadline: float) -> Record:
    """What is measured of a candidate that compiled."""
    if "failed" in facts or time.perf_counter() > deadline:
        return {"failed": "left out: no time"} | facts
    kernel, schedule = kernel_of(each.case), each.schedule
    try:
        found = kernel.launch(*sets[0], schedule=schedule)
        expected = kernel.launch(*sets[0], schedule=reckoned.schedule)
        us = timing.microseconds(lambda *given: kernel.launch(*given, schedule=schedule), sets)
        return {"us": round(us, 2), "same_bits": all(map(torch.equal, found, expected))} | facts
    except Exception as error:
        return facts | {"failed": f"{type(error).__name__}: {str(error)[:120]}"}


@torch.no_grad()
def _by_launch(each: Candidate, sets: Sequence[Any]) -> Record:
    """µs of each launch of a candidate alone, and of all in turn where the second comes up early."""
    kernel, schedule = kernel_of(each.case), each.schedule
    launched = timing.kernels(lambda: kernel.launch(*sets[0], schedule=schedule))
    record: Record = {"each_us": [round(each_us, 2) for _, each_us in launched]}
    if kernel.prepare(sets[0], schedule).late.get("launch_pdl"):
        behind: Callable[..., Any] = lambda *given: kernel.run(in_turn(kernel.prepare(given, schedule)))
        record["in_turn_us"] = round(timing.microseconds(behind, sets), 2)
    return record


def in_turn(call: Call) -> Call:
    """`call`, its second launch an ordinary one."""
    launches = [(grid, constants | {"PDL": 0}) for grid, constants in call.launches]
    return replace(call, launches=launches, late={key: on for key, on in call.late.items() if key != "launch_pdl"})


def verdicts(records: Sequence[Record]) -> list[Record]:
    """Of each pair: µs by reckoning, of the fastest, their ratio, and whether it is at most WORST; None where either
    was not measured."""
    pairs = dict.fromkeys((record["case"], record["rows"]) for record in records)
    found = []
    for case, rows in pairs:
        mine = [each for each in records if (each["case"], each["rows"]) == (case, rows) and "us" in each]
        ours = next((each["us"] for each in mine if each["reckoned"]), None)
        best = min(mine, key=lambda each: each["us"], default=None)
        told: Record = {"case": case, "rows": rows, "reckoned_us": ours, "tried": len(mine),
                        "best_us": best and best["us"], "best": best and best["schedule"]}  # fmt: skip
        ratio = round(ours / best["us"], 3) if ours and best else None
        found.append(told | {"ratio": ratio, "within": ratio is not None and ratio <= WORST})
    return found


def table(records: Sequence[Record]) -> str:
    """A line a pair."""
    lines = [f"{'case':>16}{'rows':>6}{'reckoned':>10}{'best':>8}{'ratio':>7}  of   best schedule (µs)"]
    for each in verdicts(records):
        cells = (each["reckoned_us"] or "-", each["best_us"] or "-", each["ratio"] or "-", each["tried"])
        line = "{:>16}{:>6}{:>10}{:>8}{:>7}{:>4}   {}"
        lines.append(line.format(each["case"], each["rows"], *cells, each["best"]))
    return "\n".join(lines)
