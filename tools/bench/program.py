"""bench program: whole steps of a model on this GPU, v41 against eager and the modes of torch.compile, in one run.

    us          a step, CUDA events around each of many steps in a row, median
    idle_us     the same from an idle device, so with the host's time before the first kernel
    host_us     until the call returns, on an idle device: the driver wakes up, too
    ahead_us    until the call returns, of steps in a row: the host of a loop that need not wait for results
    origin      kernels of one step and their µs: generated, inductor, library; beside it the costliest kernels by name
    floor_us    bytes of the weights that the step reads / the copy rate; above_us is what lies above it
    bytes       the most a step allocates; reserved: what the allocator takes from the device for that, in its blocks
    replay_us   v41: the graph alone; guarded_*: the same step behind Dynamo's guards; read_*, compare_*, copy_in_*,
                copy_out_*: the other parts of a step on the host, each alone

Logits are compared with eager's first, by the criterion of compare.py. A contender that fails is a record with its
error. The JSON is written after every record; what would start after --budget seconds is left out, as it says.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import timing
from v41.tools.bench.capacity import cost
from v41.tools.bench.contenders import INDUCTOR, Contender, contender
from v41.tools.bench.models import config_of, device_of, facts_of, model_of
from v41.tools.bench.program_cases import Case, eager_logits, floor_us, prepare, weight_bytes
from v41.tools.compare import agree
from v41.tools.exact import Exact
from v41.tools.generate_view import agreement_values
from v41.tools.last_bits import Nudged
from v41.tools.tables import add, table

WARM = 4  # further steps before the first that counts: v41 captures the second of its sizes, Inductor the third
SECONDS, FEWEST, MOST = 0.6, 5, 50  # a time is the median of so many steps as fit
Record = dict[str, Any]
Slowest = Callable[[float], float]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench program` does; 1 where v41's logits are not eager's or a contender of ours failed."""
    started = time.perf_counter()
    device, config = device_of(arguments, "v41 bench program"), config_of(arguments)
    timed, model = device != "cpu", model_of(config, device)
    cases = prepare(model, arguments.rows, arguments.prefill, arguments.context)
    result = {
        **facts_of("program", arguments, config),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()), "context": arguments.context,
        "codegen": arguments.codegen, "records": list[Record](), "contenders": dict[str, Any](),
    }  # fmt: skip

    def save() -> Path:
        result["seconds"] = round(time.perf_counter() - started, 1)
        result["ratios"], result["memory"] = ratios(result["records"]), memory(result)
        return timing.save(result, arguments.out)

    truth = references(model, cases, result)
    save()
    for name, group in groupby(in_turn(arguments.contenders, cases), key=lambda job: job[0]):
        one = contender(name, model, arguments.codegen)
        with one.around():
            for _, case in group:
                late = time.perf_counter() - started > arguments.budget
                record = {"contender": name, "case": case.name, **result["steps"][case.name]}
                record |= {"error": "left out: no time"} if late else attempt(one, case, truth[case.name], timed)
                result["records"].append(record)
                result["contenders"][name] = one.facts()
                save()
                print(line(record), flush=True)
        del one
        clean_up()
    Console(width=160).print(overview(result["records"]))
    print(f"written to {save()}")
    return 0 if all(holds(record) for record in result["records"] if record["contender"].startswith("v41")) else 1


def in_turn(names: Sequence[str], cases: Sequence[Case]) -> list[tuple[str, Case]]:
    """What runs, what matters most first: Inductor, minutes a model, has graphs for decode and none for prefill."""

    def turn(job: tuple[str, Case]) -> int:
        name, case = job
        return 0 if name not in INDUCTOR else 1 if (name == "compile") == (case.kind == "prefill") else 2

    return sorted(((name, case) for name in names for case in cases), key=turn)


def holds(record: Record) -> bool:
    return "error" not in record and bool(record["agreement"]["holds"])


@torch.no_grad()
def references(model: V41ForCausalLM, cases: Sequence[Case], result: Record) -> dict[str, tuple[Tensor, Tensor]]:
    """By case, on the CPU: eager's logits, and those of runs with other last bits (last_bits.py), the fp64 run first.
    The bytes of the weights go into result["steps"]."""
    result["steps"], found = {}, {}
    for case in cases:
        touched = weight_bytes(model, case)
        step: Record = {"touched_bytes": touched, "floor_us": round(floor_us(touched), 1)}
        result["steps"][case.name] = step
        eager, others = eager_logits(model, case).cpu(), []
        try:
            for mode in (Exact(), Nudged(0)):
                with mode:
                    others.append(eager_logits(model, case).cpu())
        except torch.OutOfMemoryError:
            others, step["last bits"] = [eager], "none: out of memory"  # excuses nothing
        found[case.name] = (eager, torch.stack(others))
        clean_up()
    return found


def attempt(one: Contender, case: Case, truth: tuple[Tensor, Tensor], timed: bool, slowest: Slowest = float) -> Record:
    """All that is measured of a case, or the error; after either the cache is as good as before. slowest: see times."""
    started = time.perf_counter()
    try:
        with torch.no_grad():
            found = measure(one, case, truth, timed, slowest)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        found = {"error": f"{type(error).__name__}: {' | '.join(lines[:6])[:1000]}"}
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def measure(one: Contender, case: Case, truth: tuple[Tensor, Tensor], timed: bool, slowest: Slowest) -> Record:
    started = time.perf_counter()
    step = one.step(case)
    logits = step()
    found: Record = {"first_s": round(time.perf_counter() - started, 1)}
    for _ in range(WARM):
        logits = step()
    eager, last_bits = truth
    found["agreement"] = agreement_values(agree(eager, logits[: len(eager)].cpu(), last_bits))
    del logits
    if not timed:
        return found
    found |= times(step, slowest)
    found["bytes"] = min(cost(step)[1] for _ in range(3))
    found["reserved"] = reserved(step)
    launched = timing.kernels(step)
    found["origin"] = timing.by_origin(launched, one.kernels())
    found["costliest"] = timing.costliest(launched)
    for name, part in one.alone().items():
        found |= {f"{name}_{unit}": value for unit, value in times(part, slowest).items()}
    return found


def reserved(step: Callable[[], object]) -> int:
    """Bytes that the allocator takes from the device for a step, where it holds no free block."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before


def times(step: Callable[[], object], slowest: Slowest = float) -> dict[str, float]:
    """us, idle_us, host_us and ahead_us of a step, each a median. slowest: of ranks that must run as many steps, the µs
    that all go by, from this one's."""
    count = min(MOST, max(FEWEST, int(SECONDS * 1e6 / slowest(cost(step)[0]))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    idle, host, ahead = [], [], []
    events[0].record()
    for event in events[1:]:
        began = time.perf_counter_ns()
        step()
        ahead.append((time.perf_counter_ns() - began) / 1000)
        event.record()
    torch.cuda.synchronize()
    us = [before.elapsed_time(after) * 1000 for before, after in pairwise(events)]
    for _ in range(count):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter_ns()
        step()
        host.append((time.perf_counter_ns() - began) / 1000)
        end.record()
        end.synchronize()
        idle.append(start.elapsed_time(end) * 1000)
    return {name: round(statistics.median(each), 1) for name, each in zip(NAMED, (us, idle, host, ahead), strict=True)}


NAMED = ("us", "idle_us", "host_us", "ahead_us")


def clean_up() -> None:
    """Gives back what a contender held."""
    torch.compiler.reset()
    free()


def free() -> None:
    """Gives back what nothing holds any more; what is compiled stays."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- what the records say together


def ratios(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By case: v41's time over each other contender's, and above the floor over the best torch.compile mode's."""
    found: dict[str, dict[str, Any]] = {}
    for ours in records:
        if ours["contender"] != "v41" or "us" not in ours:
            continue
        others = {r["contender"]: r for r in records if r["case"] == ours["case"] and "us" in r and r is not ours}
        each: dict[str, Any] = {f"over {name}": round(ours["us"] / other["us"], 3) for name, other in others.items()}
        modes = [other["us"] - other["floor_us"] for name, other in others.items() if name in INDUCTOR]
        if modes:
            each["above the floor, over the best mode"] = round((ours["us"] - ours["floor_us"]) / min(modes), 3)
        found[ours["case"]] = each
    return found


def memory(result: Record) -> dict[str, Any]:
    """Bytes of all graphs of v41 together, of the largest step uncaptured, and the ratio, which should be near 1: what
    the allocator took from the device for either.

    It takes the contenders v41 and v41-uncaptured; no ratio without them.
    """
    compiles = result["contenders"].get("v41", {}).get("compiles", [])
    pools = [found["captures"]["pool_bytes"] for found in compiles if found["captures"]]
    steps = [r["reserved"] for r in result["records"] if r["contender"] == "v41-uncaptured" and "reserved" in r]
    graphs, largest = sum(pools), max(steps, default=0)
    ratio = round(graphs / largest, 3) if graphs and largest else None
    return {"graphs": graphs, "largest step uncaptured": largest, "ratio": ratio}


def line(record: Record) -> str:
    timed = f"{record['us']} us, host {record['host_us']} and {record['ahead_us']}" if "us" in record else "not timed"
    told = record.get("error") or f"{timed}, floor {record['floor_us']}"
    rows = record.get("agreement")
    judged = f", KL {rows['max_kl']:.2g}, {rows['failed']} of {rows['rows']} fail" if rows else ""
    return f"{record['contender']:<16}{record['case']:<14}{told}{judged}  ({record.get('seconds', 0)} s)"


def overview(records: Sequence[Record]) -> Table:
    """A line a case and contender, by case."""
    columns = (
        "us", "above", "replay us", "idle us", "host us", "ahead us", "launches", "MiB", "KL", "failed", "first s",
    )  # fmt: skip
    made = table("case", "contender", *columns, left=2)
    for case in dict.fromkeys(record["case"] for record in records):
        for r in (record for record in records if record["case"] == case and "error" not in record):
            launches = sum(int(split["launches"]) for split in r.get("origin", {}).values()) or None
            above = round(r["us"] - r["floor_us"], 1) if "us" in r else None
            mib = round(r["bytes"] / 2**20) if "bytes" in r else None
            agreement = r["agreement"]
            add(made, case, r["contender"], whole(r.get("us")), whole(above), whole(r.get("replay_us")),
                whole(r.get("idle_us")), whole(r.get("host_us")), whole(r.get("ahead_us")), launches, mib,
                agreement["max_kl"], agreement["failed"], r["first_s"])  # fmt: skip
    return made


def whole(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"
