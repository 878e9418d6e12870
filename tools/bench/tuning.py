"""tuning: many schedules of one kernel, compiled by many processes, timed by one.

A worker compiles its share by launching it once: Triton's cache on disk then holds every schedule when the timing
process asks.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from typing import Any

import torch

from v41.lowering.rowwise import GeneratedKernel, Schedule, pass_over
from v41.lowering.rowwise.schedule import tried
from v41.tools.bench import seam, timing

Candidate = tuple[int, Schedule]  # rows, schedule

def tune(rows_list: Sequence[int], workers: int, budget: float) -> list[dict[str, Any]]:
    """µs of every candidate, best first for each number of rows; prints the ten best."""
    deadline = time.perf_counter() + budget
    todo = [(rows, schedule) for rows in rows_list for schedule in tried(rows)]
    print(f"{len(todo)} schedules", flush=True)
    facts = _compile(todo, workers, deadline - 0.35 * budget)
    kernel = _kernel()
    records = []
    for rows in rows_list:
        sets = [seam.inputs(rows, "cuda", seed) for seed in range(timing.sets_needed(2_000_000 + 103_000 * rows))]
        mine = [_time(candidate, kernel, sets, facts, deadline) for candidate in todo if candidate[0] == rows]
        mine.sort(key=lambda record: record.get("us", float("inf")))
        records += mine
        print(f"\nrows {rows}: {sum('us' in record for record in mine)} of {len(mine)} ran")
        for record in mine[:10]:
            print("  ", json.dumps({key: value for key, value in record.items() if key != "rows"}), flush=True)
        del sets
    return records


@cache
def _kernel() -> GeneratedKernel:
    return pass_over(seam.capture(), "boundary")


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


def _compile_one(candidate: Candidate) -> dict[str, Any]:
    kernel, schedule = _kernel(), candidate[1]
    started = time.perf_counter()
    try:
        compiled = kernel.run(kernel.prepare(seam.inputs(max(schedule.rows, 2), "cuda"), schedule))
        spills = [each.n_spills for each in compiled]
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
    seconds = round(time.perf_counter() - started, 1)
    return {
        "registers": [each.n_regs for each in compiled],
        "spills": spills,
        "shared": max(each.metadata.shared for each in compiled),
        "compile_s": seconds,
    }


def _time(
    candidate: Candidate,
    kernel: GeneratedKernel,
    sets: Sequence[tuple[Any, ...]],
    facts: dict[Candidate, Any],
    deadline: float,
) -> dict[str, Any]:
    rows, schedule = candidate
    record = {
        "rows": rows,
        "schedule": str(schedule).removeprefix("Schedule"),
        **facts.get(candidate, {"failed": "not compiled"}),
    }
    if "failed" in record or time.perf_counter() > deadline:
        return record
    try:
        record["us"] = round(
            timing.microseconds(lambda *args: kernel.launch(*args, schedule=schedule), sets), 2
        )
        torch.cuda.synchronize()
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
    return {"us": record.get("us"), **record} if "us" in record else record
