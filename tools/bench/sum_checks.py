"""sum_checks: what `v41 bench allreduce check` holds sums over ranks to: bits, rows apart, replays, stalls."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from v41.errors import PeerStalled
from v41.lowering.rowwise import pass_over
from v41.lowering.rowwise.schedule import Schedule
from v41.lowering.templates.all_reduce.launch import MOST, UNITS, SummingKernel, Way
from v41.lowering.templates.all_reduce.trial import trial
from v41.runtime import symmetric
from v41.tools.bench import seam
from v41.tools.bench.boundary import POOLED, within_contract
from v41.tools.bench.sum_cases import CASES, Case, added
from v41.tools.bench.sum_ranks import Place, group_of

MIXED = (1, 16, 2, 64, 5, 300, 40, 1)  # rows of the calls of one graph
REPLAYED = ("critical", "combine")
WAYS = {  # where they are not what the number of rows asks for
    1: (Way(Schedule(1, 1, 4, 1024), UNITS[0]), Way(Schedule(4, 1, 4, 1024, shares=5), UNITS[1])),
    16: (Way(Schedule(8, 1, 2, 2048, shares=5)), Way(Schedule(2, 5, 2, 2048)), Way(Schedule(16, 1, 4, 1024), UNITS[0])),
    64: (Way(Schedule(8, 1, 2, 2048, shares=5)),),
}
SMALL = 1 << 22  # words of a workspace that holds one case of few rows


def check(place: Place, options: Namespace) -> dict[str, Any]:
    """Every claim about the kernels, as figures and booleans, alike on all ranks."""
    report: dict[str, Any] = {}
    started = time.perf_counter()
    calls = options.replays or (10_000 if place.nccl else 500)
    wrong = trial(place.workspace, calls)
    report[f"trial of {calls} calls"] = wrong is None or wrong
    report["trial passed"] = all(place.gathered(wrong is None))
    place.say(json.dumps(report), round(time.perf_counter() - started, 1), "s")
    for name in options.cases:
        case = CASES[name]
        kernel = case.kernel(place.ranks)
        kernel.bind(place.workspace)
        for rows in (*options.rows, MOST + 1):
            report[f"{name} {rows}"] = found = check_rows(place, case, kernel, rows)
            place.say(name, rows, json.dumps(found), round(time.perf_counter() - started, 1), "s")
        report[f"{name} NaN rows"] = nan_rows(place, case, kernel)
    for name in REPLAYED:
        report[f"replays of {name}"] = found = replays(place, CASES[name], calls)
        place.say("replays", name, json.dumps(found), round(time.perf_counter() - started, 1), "s")
    for rows in (1, 64):
        report[f"stall at {rows} rows"] = stall(place, rows)
        place.say("stall", rows, json.dumps(report[f"stall at {rows} rows"]))
    return report


def check_rows(place: Place, case: Case, kernel: SummingKernel, rows: int) -> dict[str, Any]:
    owned, others = owned_by(place, case, rows), case.others(rows, str(place.device))
    total, behind = added([case.part(each) for each in owned]), pass_over(case.behind(), case.name)
    unfused = behind.launch(total, *others)
    results = {"its own": kernel.launch(*owned[place.rank], *others)}
    for number, way in enumerate(WAYS.get(rows, ())):
        results[str(number)] = kernel.launch(*owned[place.rank], *others, schedule=way)
    torch.cuda.synchronize(place.device)
    place.workspace.check()
    found: dict[str, Any] = {
        f"way {name}: the bits of the boundary alone": all(map(same_bits, result, unfused))
        for name, result in results.items()
    }
    found["ranks alike"] = len(set(place.gathered(digest(results["its own"])))) == 1
    if rows >= POOLED:  # of fewer, an RMS error is as much chance
        truth = seam.oracle(case.behind().to(place.device), (total, *others))
        eager = seam.errors(case.plain(total, *others), truth)
        ours = seam.errors(results["its own"], truth)
        found |= {"right": within_contract(ours, eager, truth), "errors": ours, "of eager": eager}
    return {"holds": all(value is not False for value in found.values()), **found}


def owned_by(place: Place, case: Case, rows: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """What each rank has of the sum: every rank can make it from their seeds."""
    return [case.own(rows, str(place.device), rank, seed) for rank in range(place.ranks)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(a: Tensor) -> Tensor:
    return a.contiguous().view(torch.int16 if a.element_size() == 2 else torch.int32)


def digest(results: Sequence[Tensor]) -> tuple[int, ...]:
    """Different where bits differ, but for chance."""
    found = []
    for each in results:
        flat = bits(each).flatten().long()
        places = torch.arange(flat.numel(), device=flat.device) * 2654435761 + 12345
        found.append(int((flat * (places % 1_000_003)).sum()))
    return tuple(found)


def nan_rows(place: Place, case: Case, kernel: SummingKernel) -> bool:
    """One rank's NaN in every third row leaves the other rows their bits, and is in its own."""
    fine = True
    for rows in (3, 48, 300):
        others = case.others(rows, str(place.device))
        own = case.own(rows, str(place.device), place.rank)
        clean = kernel.launch(*own, *others)
        bad = torch.arange(rows, device=place.device) % 3 == 1
        if place.rank == place.ranks - 1:
            own[-1][bad] = float("nan")  # the part, or what it is made of by row
        dirty = kernel.launch(*own, *others)
        fine &= all(same_bits(a[~bad], b[~bad]) for a, b in zip(clean, dirty, strict=True))
        fine &= bool(dirty[0][bad].isnan().all())
    place.workspace.check()
    return all(place.gathered(fine))


@torch.no_grad()
def replays(place: Place, case: Case, calls: int) -> dict[str, Any]:
    """Graphs of calls with mixed numbers of rows, replayed while every rank sleeps at times of its own, on the host and
    on the device; every result of every replay compared on the device."""
    kernel, behind = case.kernel(place.ranks), pass_over(case.behind(), case.name)
    kernel.bind(place.workspace)
    wrong = torch.zeros(len(MIXED), dtype=torch.int64, device=place.device)
    work = []
    for number, rows in enumerate(MIXED):
        owned, others = owned_by(place, case, rows, number), case.others(rows, str(place.device), number)
        total = added([case.part(each) for each in owned])
        work.append((number, (*owned[place.rank], *others), behind.launch(total, *others)))
    turns = random.Random(place.rank)
    naps = [turns.randrange(0, 60_000) for _ in MIXED]

    def once() -> None:
        for (number, inputs, expected), nap in zip(work, naps, strict=True):
            torch.cuda._sleep(nap)
            for ours, theirs in zip(kernel.launch(*inputs), expected, strict=True):
                wrong[number] += (bits(ours) != bits(theirs)).sum()

    once()
    place.meet()
    place.workspace.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    began, count = time.perf_counter(), -(-calls // len(MIXED))
    for replay in range(count):
        if turns.random() < 0.02:
            time.sleep(turns.random() * 0.005)
        graph.replay()
        if replay % 16 == 0:
            torch.cuda.synchronize(place.device)
            place.workspace.check()
    torch.cuda.synchronize(place.device)
    place.workspace.check()
    bad = {f"{rows} rows": n for rows, n in zip(MIXED, wrong.tolist(), strict=True) if n}
    seconds = round(time.perf_counter() - began, 1)
    return {"holds": all(place.gathered(not bad)), "calls": count * len(MIXED), "seconds": seconds, "differ": bad}


def stall(place: Place, rows: int) -> dict[str, Any]:
    """The last rank stays away from a call: the others say so, with its name, in time."""
    case, missing = CASES["critical"], place.ranks - 1
    kernel = case.kernel(place.ranks)
    own = symmetric.workspace(group_of(), place.device, SMALL)
    kernel.bind(own)
    inputs = (*case.own(rows, str(place.device), place.rank), *case.others(rows, str(place.device)))
    kernel.launch(*inputs)
    place.meet()
    own.check()
    own.patience = 3.0  # from here on nothing is compiled: nanoseconds in 64 bits, as before
    began, said, seconds = time.perf_counter(), "", 0.0
    if place.rank != missing:
        kernel.launch(*inputs)
        torch.cuda.synchronize(place.device)
        seconds = time.perf_counter() - began
        try:
            own.check()
        except PeerStalled as error:
            said = f"rank {error.facts['rank']} waited for {error.facts['peer']} in call {error.facts['epoch']}"
    expected = f"rank {place.rank} waited for {missing} in call 2"
    fine = place.rank == missing or (said == expected and 2 < seconds < 20)
    heard = place.gathered((fine, said, round(seconds, 2)))
    return {"holds": all(each[0] for each in heard), "said": [each[1] for each in heard],
            "seconds": [each[2] for each in heard]}  # fmt: skip
