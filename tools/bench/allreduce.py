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
import random
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from v41._compat_symmetric import symmetric_tensors
from v41.channels import Workspace
from v41.errors import BenchNeedsGPU, PeerStalled
from v41.lowering.rowwise import pass_over
from v41.lowering.rowwise.schedule import Schedule
from v41.lowering.templates.all_reduce.launch import MOST, UNITS, SummingKernel, Way
from v41.lowering.templates.all_reduce.trial import trial
from v41.runtime import symmetric
from v41.tools.bench import seam, timing
from v41.tools.bench.boundary import within_contract
from v41.tools.bench.modes import holds
from v41.tools.bench.sum_cases import CASES, Case, added, functional

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
JUDGED = 16  # rows from which an RMS error is judged against fp64
MIXED = (1, 16, 2, 64, 5, 300, 40, 1)  # rows of the calls of one graph
WAYS = {  # where they are not what the number of rows asks for
    1: (Way(Schedule(1, 1, 4, 1024), UNITS[0]), Way(Schedule(4, 1, 4, 1024, shares=5), UNITS[1])),
    16: (Way(Schedule(8, 1, 2, 2048, shares=5)), Way(Schedule(2, 5, 2, 2048)), Way(Schedule(16, 1, 4, 1024), UNITS[0])),
    64: (Way(Schedule(8, 1, 2, 2048, shares=5)),),
}
SMALL = 1 << 22  # words of a workspace that holds one case of few rows
BYTES = 64 << 20  # that inputs taken in turn fill
MOST_SETS = 1024  # calls of a graph


@dataclass(frozen=True)
class Place:
    """This process: rank `rank` of `ranks`, on `device`. nccl: whether the group has it, each rank a GPU of its own."""

    rank: int
    ranks: int
    device: torch.device
    nccl: bool
    workspace: Workspace

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def gathered(self, fact: Any) -> list[Any]:
        heard: list[Any] = [None] * self.ranks
        dist.all_gather_object(heard, fact)
        return heard

    def meet(self) -> None:
        torch.cuda.synchronize(self.device)
        self.gathered(None)


# ---- check


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
    report["replays"] = replays(place, calls)
    place.say("replays", json.dumps(report["replays"]), round(time.perf_counter() - started, 1), "s")
    for rows in (1, 64):
        report[f"stall at {rows} rows"] = stall(place, rows)
        place.say("stall", rows, json.dumps(report[f"stall at {rows} rows"]))
    return report


def check_rows(place: Place, case: Case, kernel: SummingKernel, rows: int) -> dict[str, Any]:
    parts, others = parts_of(place, case, rows), case.others(rows, str(place.device))
    total, behind = added(parts), pass_over(case.behind(), case.name)
    unfused = behind.launch(total, *others)
    results = {"its own": kernel.launch(parts[place.rank], *others)}
    for number, way in enumerate(WAYS.get(rows, ())):
        results[str(number)] = kernel.launch(parts[place.rank], *others, schedule=way)
    torch.cuda.synchronize(place.device)
    place.workspace.check()
    found: dict[str, Any] = {
        f"way {name}: the bits of the boundary alone": all(map(same_bits, result, unfused))
        for name, result in results.items()
    }
    found["ranks alike"] = len(set(place.gathered(digest(results["its own"])))) == 1
    if rows >= JUDGED:
        truth = seam.oracle(case.behind().to(place.device), (total, *others))
        eager = seam.errors(case.plain(total, *others), truth)
        ours = seam.errors(results["its own"], truth)
        found["right"] = within_contract(ours, eager, truth)
    return {"holds": all(value is not False for value in found.values()), **found}


def parts_of(place: Place, case: Case, rows: int, seed: int = 0) -> list[Tensor]:
    """All ranks' parts: each rank can make them from their seeds."""
    return [case.part(rows, str(place.device), rank, seed) for rank in range(place.ranks)]


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
        part = case.part(rows, str(place.device), place.rank)
        clean = kernel.launch(part, *others)
        bad = torch.arange(rows, device=place.device) % 3 == 1
        if place.rank == place.ranks - 1:
            part[bad] = float("nan")
        dirty = kernel.launch(part, *others)
        fine &= all(same_bits(a[~bad], b[~bad]) for a, b in zip(clean, dirty, strict=True))
        fine &= bool(dirty[0][bad].isnan().all())
    place.workspace.check()
    return all(place.gathered(fine))


@torch.no_grad()
def replays(place: Place, calls: int) -> dict[str, Any]:
    """Graphs of calls with mixed numbers of rows, replayed while every rank sleeps at times of its own, on the host and
    on the device; every result of every replay compared on the device."""
    case = CASES["critical"]
    kernel, behind = case.kernel(place.ranks), pass_over(case.behind(), case.name)
    kernel.bind(place.workspace)
    wrong = torch.zeros(len(MIXED), dtype=torch.int64, device=place.device)
    work = []
    for number, rows in enumerate(MIXED):
        parts, others = parts_of(place, case, rows, number), case.others(rows, str(place.device), number)
        work.append((number, (parts[place.rank], *others), behind.launch(added(parts), *others)))
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
    inputs = (case.part(rows, str(place.device), place.rank), *case.others(rows, str(place.device)))
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


# ---- bench


def contenders(place: Place, case: Case) -> dict[str, Callable[[int], Callable[..., Any]]]:
    """By name: what makes a callable for a number of rows. All take this rank's part, then the others."""
    kernel, behind = case.kernel(place.ranks), pass_over(case.behind(), case.name)
    kernel.bind(place.workspace)
    group = group_of().group_name

    def nccl(then: Callable[..., Any]) -> Callable[[int], Callable[..., Any]]:
        return lambda rows: (
            lambda part, *others: then(functional.wait_tensor(functional.all_reduce(part, "sum", group)), *others)
        )

    def in_place(then: Callable[..., Any]) -> Callable[[int], Callable[..., Any]]:
        def call(part: Tensor, *others: Tensor) -> Any:
            dist.all_reduce(part)
            return then(part, *others)

        return lambda rows: call

    def torchs(name: str, then: Callable[..., Any]) -> Callable[[int], Callable[..., Any]]:
        def make(rows: int) -> Callable[..., Any]:
            memory, kept = symmetric_tensors(rows * case.width // 2, place.device, group_of())
            mine = memory[place.rank].view(torch.bfloat16).view(rows, case.width)
            mine.normal_()
            operator = getattr(torch.ops.symm_mem, name)

            def call(part: Tensor, *others: Tensor) -> Any:
                assert kept is not None
                return then(operator(mine, "sum", group), *others)

            return call

        return make

    def compiled(rows: int) -> Callable[..., Any]:
        torch.compiler.reset()
        made = torch.compile(case.plain, options={"reorder_for_locality": False}, dynamic=False)
        return in_place(made)(rows)

    def nothing(total: Tensor, *others: Tensor) -> Tensor:
        return total

    found: dict[str, Callable[[int], Callable[..., Any]]] = {
        "fused": lambda rows: kernel.launch,
        "one-shot + boundary": torchs("one_shot_all_reduce", behind.launch),
        "two-shot + boundary": torchs("two_shot_all_reduce_", behind.launch),
        "boundary alone": lambda rows: behind.launch,
        "one-shot alone": torchs("one_shot_all_reduce", nothing),
        "two-shot alone": torchs("two_shot_all_reduce_", nothing),
    }
    if place.nccl:
        found |= {
            "nccl + boundary": in_place(behind.launch),
            "nccl alone": in_place(nothing),
            "nccl + eager": in_place(case.plain),
            "nccl + compile": compiled,
        }
    return found


def bench(place: Place, options: Namespace) -> list[dict[str, Any]]:
    """One record a contender, case and number of rows; that the fused kernel is right is checked first."""
    records: list[dict[str, Any]] = []
    began = time.perf_counter()
    cases = [CASES[name] for name in options.cases]
    made = {case.name: contenders(place, case) for case in cases}
    sets = {(case.name, rows): input_sets(place, case, rows) for case in cases for rows in options.rows}
    place.say(f"inputs made, {time.perf_counter() - began:.1f} s")
    for name in made[cases[0].name]:
        for case in cases:
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
    first = (case.part(rows, device, place.rank), *case.others(rows, device))
    weights = first[case.row_inputs :]
    size = sum(each.numel() * each.element_size() for each in first[: case.row_inputs])
    count = max(2, min(-(-BYTES // size), MOST_SETS))
    others = [case.others(rows, device, seed)[: case.row_inputs - 1] for seed in range(1, count)]
    return [first, *((case.part(rows, device, place.rank, i), *each, *weights) for i, each in enumerate(others, 1))]


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


# ---- processes


def group_of() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_rank(rank: int, ranks: int, address: str, options: Namespace, file: Path | None = None) -> dict[str, Any]:
    """What one process does, from its group's making to its end; rank 0's answer goes to `file`."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    own_gpu = gpus >= ranks
    backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    try:
        place = Place(rank, ranks, device, own_gpu, symmetric.workspace(group_of(), device))
        answer: dict[str, Any] = {"ranks": ranks, "gpus": min(gpus, ranks)}
        if options.mode == "check":
            answer["checks"] = check(place, options)
            answer["holds"] = all(place.gathered(holds(answer["checks"])))
        else:
            answer["records"] = bench(place, options)
        place.meet()
    finally:
        dist.destroy_process_group()
    if file is not None and rank == 0:
        file.write_text(json.dumps(answer))
    return answer


def spawned(ranks: int, options: Namespace) -> dict[str, Any]:
    """`ranks` processes of this host, as one group; what its rank 0 found."""
    if torch.cuda.device_count() < ranks:
        os.environ[OVERLAP] = "1"
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        torch.multiprocessing.spawn(run_rank, (ranks, address, options, file), nprocs=ranks)
        answer: dict[str, Any] = json.loads(file.read_text())
    return answer


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench allreduce` does; 1 where a check fails."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench allreduce", found="torch sees no CUDA device")
    started = time.perf_counter()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        answers = [run_rank(rank, ranks, "env://", arguments)]
        if rank != 0:
            return 0
    else:
        answers = [spawned(ranks, arguments) for ranks in arguments.ranks]
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
