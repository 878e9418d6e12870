"""tuning: many schedules of one kernel, compiled by many processes, timed by one.

A worker compiles its share by launching it once: Triton's cache on disk then holds every schedule when the timing
process asks.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from typing import Any

import torch

from v41.lowering.rowwise import GeneratedKernel, Schedule, generate
from v41.tools.bench import seam, timing

Candidate = tuple[int, int, Schedule]  # rows, block, schedule

SPACE: dict[int, dict[str, tuple[Any, ...]]] = {  # rows -> what is tried; group counts chunks of 64 columns
    1: {"rows": (1,), "group": (1, 2), "warps": (2, 4, 8), "tail": (8192, 2048), "stages": (1,), "registers": (0,)},
    16: {"rows": (1, 2, 4), "group": (2, 5, 10), "warps": (4,), "tail": (4096,), "stages": (1,), "registers": (0,)},
    64: {"rows": (4, 8, 16), "group": (5, 10, 20), "warps": (4,), "tail": (1024,), "stages": (1, 2), "registers": (0,)},
    256: {
        "rows": (8, 16, 32),
        "group": (5, 10, 20),
        "warps": (4,),
        "tail": (512,),
        "stages": (1, 2),
        "registers": (0,),
    },
    1024: {
        "rows": (16, 32, 64),
        "group": (10, 20, 40),
        "warps": (4, 8),
        "tail": (256,),
        "stages": (1,),
        "registers": (0,),
    },
    4096: {
        "rows": (16, 32, 64),
        "group": (20, 40, 80),
        "warps": (4, 8),
        "tail": (256,),
        "stages": (1, 2),
        "registers": (0,),
    },
}


def candidates(rows: int, blocks: Sequence[int] = (64, 128)) -> Iterator[Candidate]:
    """What is tried at `rows`; a chunk of 128 columns halves the group."""
    space, seen = SPACE[min(SPACE, key=lambda known: abs(known - rows))], set[Candidate]()
    for block, tile, group, warps, tail, stages, registers in product(blocks, *space.values()):
        schedule = Schedule(tile, max(group * 64 // block, 1), warps, tail, stages, registers)
        if tile * block <= 1024 * warps and (rows, block, schedule) not in seen:
            seen.add((rows, block, schedule))
            yield rows, block, schedule


def tune(rows_list: Sequence[int], workers: int, budget: float) -> list[dict[str, Any]]:
    """µs of every candidate, best first for each number of rows; prints the ten best."""
    deadline = time.perf_counter() + budget
    todo = [candidate for rows in rows_list for candidate in candidates(rows)]
    print(f"{len(todo)} schedules", flush=True)
    facts = _compile(todo, workers, deadline - 0.35 * budget)
    kernels = {block: _kernel(block) for block in (64, 128)}
    records = []
    for rows in rows_list:
        sets = [seam.inputs(rows, "cuda", seed) for seed in range(timing.sets_needed(2_000_000 + 103_000 * rows))]
        mine = [_time(candidate, kernels, sets, facts, deadline) for candidate in todo if candidate[0] == rows]
        mine.sort(key=lambda record: record.get("us", float("inf")))
        records += mine
        print(f"\nrows {rows}: {sum('us' in record for record in mine)} of {len(mine)} ran")
        for record in mine[:10]:
            print("  ", json.dumps({key: value for key, value in record.items() if key != "rows"}), flush=True)
        del sets
    return records


def _kernel(block: int) -> GeneratedKernel:
    kernel = generate(seam.capture(), "boundary", block)
    assert isinstance(kernel, GeneratedKernel)
    return kernel


def _compile(todo: Sequence[Candidate], workers: int, deadline: float) -> dict[Candidate, dict[str, Any]]:
    """Registers, spills and shared memory of every candidate that compiled in time; the error of the others."""
    facts: dict[Candidate, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    pending = {pool.submit(_compile_one, candidate): candidate for candidate in todo}
    try:
        for future in as_completed(pending, timeout=max(deadline - time.perf_counter(), 1)):
            facts[pending[future]] = future.result()
    except TimeoutError:
        print(f"{len(facts)} of {len(todo)} compiled in time", flush=True)
    for process in list((pool._processes or {}).values()) if len(facts) < len(todo) else ():
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    return facts


_KERNELS: dict[int, GeneratedKernel] = {}


def _compile_one(candidate: Candidate) -> dict[str, Any]:
    _, block, schedule = candidate
    if block not in _KERNELS:
        _KERNELS[block] = _kernel(block)
    kernel = _KERNELS[block]
    started = time.perf_counter()
    try:
        compiled = kernel.run(kernel.prepare(seam.inputs(max(schedule.rows, 2), "cuda"), schedule))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
    seconds = round(time.perf_counter() - started, 1)
    return {
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "shared": compiled.metadata.shared,
        "compile_s": seconds,
    }


def _time(
    candidate: Candidate,
    kernels: dict[int, GeneratedKernel],
    sets: Sequence[tuple[Any, ...]],
    facts: dict[Candidate, Any],
    deadline: float,
) -> dict[str, Any]:
    rows, block, schedule = candidate
    record = {
        "rows": rows,
        "block": block,
        "schedule": str(schedule).removeprefix("Schedule"),
        **facts.get(candidate, {"failed": "not compiled"}),
    }
    if "failed" in record or time.perf_counter() > deadline:
        return record
    try:
        record["us"] = round(
            timing.microseconds(lambda *args: kernels[block].launch(*args, schedule=schedule), sets), 2
        )
        torch.cuda.synchronize()
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
    return {"us": record.get("us"), **record} if "us" in record else record
