"""bench sharded: decode steps of a model that ranks share, sums in the kernels that read them against the library's.

    torchrun --nproc-per-node 2 -m v41.tools.cli bench sharded --cut

    fused      backend="v41", all_reduce="fused"
    library    the same with all_reduce="library": NCCL, and the boundary behind it fused
    compile, reduce-overhead, max-autotune     torch.compile of the plain model, NCCL among its kernels

Each rank runs all that `bench program` runs of a decode step (program.py names the figures), all of them as many steps;
a time is the slowest rank's. floor_us is that of the weights a rank reads, no link among them. alike: all ranks' logits
have the same bits. --stress steps of the fewest rows follow with each of ours while every rank sleeps at times of its
own, on the device and on the host; their logits are compared bit by bit. The JSON is written after every record.
"""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from v41.backend import shared_artifacts
from v41.errors import BenchNeedsRanks
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import Share
from v41.runtime.exchange import exchanged
from v41.tools.bench import timing
from v41.tools.bench.contenders import Contender, Ours, Step, contender
from v41.tools.bench.models import config_of, facts_of
from v41.tools.bench.program import Record, attempt, clean_up, in_turn, line, overview, references
from v41.tools.bench.program_cases import prepare
from v41.tools.ranks import alike, joined, own_device, random_model

OURS = ("fused", "library")
NAPS = 400_000  # cycles that a rank sleeps on the device at most, now and then: 0.2 ms


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench sharded` does on each rank; 1 where one of ours failed, broke the criterion or drifted."""
    device = own_device(arguments.device)
    with joined(device) as share:
        if share.group is None:
            raise BenchNeedsRanks("v41 bench sharded", found="this process alone")
        return measured(arguments, device, share, share.group)


@torch.no_grad()
@shared_artifacts()  # pieces without a sum are the same in both of ours
def measured(arguments: Namespace, device: str, share: Share, group: str) -> int:
    started, timed = time.perf_counter(), device != "cpu"

    def heard(what: str, ours: Any) -> list[Any]:
        return [json.loads(each) for each in exchanged(group, what, json.dumps(ours))]

    config = config_of(arguments)
    model = random_model(config, 0, device, share).eval().requires_grad_(False)
    cases = prepare(model, arguments.rows, [], [arguments.context])
    result: Record = {
        **facts_of("sharded", arguments, config),
        "ranks": share.world, "context": arguments.context, "codegen": arguments.codegen,
        "records": list[Record](), "stress": list[Record](), "contenders": dict[str, Any](),
    }  # fmt: skip

    def save() -> str:
        result["seconds"] = round(time.perf_counter() - started, 1)
        result["ratios"] = ratios(result["records"])
        return str(timing.save(result, arguments.out)) if share.rank == 0 else ""

    truth = references(model, cases, result)
    for name, jobs in groupby(in_turn(arguments.contenders, cases), key=lambda job: job[0]):
        one = contender_of(name, model, arguments.codegen)
        with one.around():
            for _, case in jobs:
                late = max(heard("time", time.perf_counter() - started)) > arguments.budget
                record = {"contender": name, "case": case.name, **result["steps"][case.name]}
                if late:
                    record |= {"error": "left out: no time"}
                else:
                    record |= attempt(one, case, truth[case.name], timed, slowest=lambda us: max(heard("us", us)))
                    record = of_all(record, heard("record", without_lists(record)))
                if "error" not in record and name in OURS:
                    step = one.step(case)
                    record["alike"] = alike(share, step().cpu())
                    if arguments.stress and case is cases[-1]:
                        found = stressed(step, arguments.stress, share.rank, timed)
                        result["stress"].append({"contender": name, "rows": case.rows, "steps": arguments.stress,
                                                 "differ": heard("stress", found)})  # fmt: skip
                result["records"].append(record)
                result["contenders"][name] = one.facts()
                save()
                if share.rank == 0:
                    print(line(record), "" if record.get("alike", True) else "RANKS DIFFER", flush=True)
        del one
        clean_up()
    if share.rank == 0:
        Console(width=160).print(overview(result["records"]))
        for each in result["stress"]:
            print(f"{each['contender']}: {each['steps']} steps of {each['rows']} rows, adrift: {each['differ']} differ")
        print(f"written to {save()}")
    ours = [record for record in result["records"] if record["contender"] in OURS]
    fine = all("error" not in r and r["agreement"]["holds"] and r["alike"] for r in ours)
    return 0 if fine and not any(any(each["differ"]) for each in result["stress"]) else 1


def contender_of(name: str, model: V41ForCausalLM, codegen: str) -> Contender:
    return Ours(model, codegen, "auto", all_reduce=name) if name in OURS else contender(name, model, codegen)


def without_lists(record: Record) -> Record:
    """What ranks compare: times, and the error if there is one."""
    return {name: value for name, value in record.items() if isinstance(value, (int, float, str))}


def of_all(record: Record, ranks: Sequence[Record]) -> Record:
    """`record` of this rank with the slowest rank's times and the first error of any."""
    errors = [f"rank {i}: {each['error']}" for i, each in enumerate(ranks) if "error" in each]
    if errors:
        return record | {"error": errors[0]}
    slowest = {name: max(each[name] for each in ranks) for name in record if name.endswith("us") and name in ranks[0]}
    return record | slowest | ({"us of ranks": [each["us"] for each in ranks]} if "us" in record else {})


def stressed(step: Step, steps: int, rank: int, timed: bool) -> int:
    """How many of `steps` gave other logits than the first, bit by bit, while this rank sleeps at times of its own."""
    turns, first = random.Random(rank), step().clone()
    differ = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(steps):
        if timed and turns.random() < 0.1:
            torch.cuda._sleep(turns.randrange(NAPS))
        if turns.random() < 0.002:
            time.sleep(turns.random() * 0.005)
        differ += (bits(step()) != bits(first)).any()
    return int(differ)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


def ratios(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """By case: the time with fused sums over that of each other."""
    found: dict[str, dict[str, float]] = {}
    for fused in (record for record in records if record["contender"] == "fused" and "us" in record):
        others = [r for r in records if r["case"] == fused["case"] and "us" in r and r is not fused]
        found[fused["case"]] = {f"over {r['contender']}": round(fused["us"] / r["us"], 3) for r in others}
    return found
