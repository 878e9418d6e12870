"""bench allreduce: a sum over ranks fused with what reads it, on the GPUs of one host, or on several processes of one.

    v41 bench allreduce check --ranks 2     right, the same bits on all ranks, graphs replayed thousands of times while
                                            ranks drift apart, a rank that stays away is an error
    v41 bench allreduce --ranks 2 4         us of the fused kernel, of NCCL's and torch's symmetric all-reduce with the
                                            generated boundary behind, and of NCCL with eager and torch.compile
    torchrun --nproc-per-node 4 -m v41.tools.cli bench allreduce ...      as one group that torchrun made

Where there are fewer GPUs than ranks, ranks share them: all is checked then, but times say little (processes take
turns), and NCCL refuses. A time is the slowest rank's median.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU, PeerStalled
from v41.tools.bench import seam, timing
from v41.tools.bench.modes import holds
from v41.tools.bench.sum_cases import CASES, Case
from v41.tools.bench.sum_checks import check, check_rows
from v41.tools.bench.sum_contenders import contenders
from v41.tools.bench.sum_ranks import Place, joined, spawned

BYTES = 64 << 20  # that inputs taken in turn fill
MOST_SETS = 1024  # calls of a graph


def bench(place: Place, options: Namespace) -> list[dict[str, Any]]:
    """One record a contender, case and number of rows; that the fused kernel is right is checked first."""
    records: list[dict[str, Any]] = []
    began = time.perf_counter()
    cases = [CASES[name] for name in options.cases]
    made = {case.name: contenders(place, case) for case in cases}
    sets = {(case.name, rows): input_sets(place, case, rows) for case in cases for rows in options.rows}
    place.say(f"inputs made, {time.perf_counter() - began:.1f} s")
    for name in dict.fromkeys(name for names in made.values() for name in names):
        for case in (case for case in cases if name in made[case.name]):
            for rows in options.rows:
                late = any(place.gathered(time.perf_counter() - began > options.budget))
                record: dict[str, Any] = {"case": case.name, "contender": name, "rows": rows, "ranks": place.ranks}
                if name == "fused" and not late:
                    fused = case.kernel(place.ranks)
                    fused.bind(place.workspace)
                    record |= {"right": check_rows(place, case, fused, rows)["holds"], "way": str(fused.way_for(rows))}
                take = made[case.name][name]
                record |= (
                    {"failed": "left out: no time"} if late else measured(place, take, rows, sets[case.name, rows])
                )
                place.say(json.dumps(record))
                records.append(record)
    return records


def input_sets(place: Place, case: Case, rows: int) -> list[tuple[Tensor, ...]]:
    """Arguments of a contender, to be taken in turn: BYTES of those with rows, or as many as fit a graph."""
    device = str(place.device)
    first = (*case.own(rows, device, place.rank), *case.others(rows, device))
    per_row = case.owned - 1 + case.row_inputs
    size = sum(each.numel() * each.element_size() for each in first[:per_row])
    count = max(2, min(-(-BYTES // size), MOST_SETS))
    others = [case.others(rows, device, seed)[: case.row_inputs - 1] for seed in range(1, count)]
    more = ((*case.own(rows, device, place.rank, i), *each) for i, each in enumerate(others, 1))
    return [first, *((*each, *first[per_row:]) for each in more)]


@torch.no_grad()
def measured(
    place: Place, make: Callable[[int], Callable[..., Any]], rows: int, sets: Sequence[tuple[Tensor, ...]]
) -> dict[str, Any]:
    """The slowest rank's median, or why there is none."""
    us, failed = 0.0, None
    for part, *_ in sets:
        part.normal_()  # sums in place have made it large
    try:
        call = make(rows)
        place.meet()
        us = timing.microseconds(call, sets)
        place.workspace.check()
    except PeerStalled:
        raise
    except Exception as error:  # the record of a contender that fails is the result
        failed = f"{type(error).__name__}: {str(error)[:200]}"
    heard = place.gathered((us, failed))
    failures = [reason for _, reason in heard if reason]
    return {"failed": failures[0]} if failures else {"us": round(max(each for each, _ in heard), 2),
                                                     "of ranks": [round(each, 2) for each, _ in heard]}  # fmt: skip


def table(records: Sequence[dict[str, Any]]) -> str:
    """A block a case and number of ranks: rows down, contenders across, µs."""
    blocks = []
    for case, ranks in dict.fromkeys((r["case"], r["ranks"]) for r in records):
        own = [r for r in records if (r["case"], r["ranks"]) == (case, ranks)]
        names = list(dict.fromkeys(r["contender"] for r in own))
        us = {(r["rows"], r["contender"]): r.get("us", "-") for r in own}
        lines = [f"{case}, {ranks} ranks (µs)", "rows" + "".join(f"{name:>21}" for name in names)]
        for rows in dict.fromkeys(r["rows"] for r in own):
            lines.append(f"{rows:>4}" + "".join(f"{us.get((rows, name), '-'):>21}" for name in names))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def answer_of(place: Place, options: Namespace) -> dict[str, Any]:
    """What one rank finds."""
    answer: dict[str, Any] = {"ranks": place.ranks, "gpus": min(torch.cuda.device_count(), place.ranks)}
    if options.mode == "check":
        answer["checks"] = check(place, options)
        answer["holds"] = all(place.gathered(holds(answer["checks"])))
    else:
        answer["records"] = bench(place, options)
    return answer


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench allreduce` does; 1 where a check fails."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench allreduce", found="torch sees no CUDA device")
    started = time.perf_counter()
    work = partial(answer_of, options=arguments)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://") as place:
            answers = [work(place)]
        if place.rank != 0:
            return 0
    else:
        answers = [spawned(ranks, work) for ranks in arguments.ranks]
    result: dict[str, Any] = {
        "case": f"allreduce {arguments.mode}", "shape": [seam.STREAMS, seam.WIDTH], **timing.provenance(),
        "options": {"replays": arguments.replays, "multicast": False}, "groups": answers,
    }  # fmt: skip
    result["seconds"] = round(time.perf_counter() - started, 1)
    fine = all(answer.get("holds", True) for answer in answers)
    if arguments.mode == "check":
        print("all hold" if fine else "SOME DO NOT HOLD")
    else:
        print(table([record for answer in answers for record in answer["records"]]))
    path: Path = timing.save(result, arguments.out)
    print(f"written to {path}")
    return 0 if fine else 1
