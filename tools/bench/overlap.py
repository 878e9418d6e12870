"""bench overlap: decode steps with side work on streams of its own against the same model on one stream, in one run.

    one       the plan on the caller's stream
    side      plan.overlapped on several
    in_order  plan.overlapped on the caller's stream: the same kernels as side, so its bits are what side is held to

Each captured (graph replays) and uncaptured. Of each graph its nodes, edges, forks and joins. gain_us: what side takes
less than one; a boundary is an mHC boundary whose coefficients left the path. --stress runs so many steps in which
spin kernels delay either stream at random, uncaptured and as graphs with delays baked in, and compares every bit of
results and caches. side is measured at all rows, on says where the plan is used. Exits with 1 where a bit differs, or a
step is slower where side streams are on.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import v41
from v41.errors import BenchNeedsGPU
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.plan import Plan
from v41.regions import region_of, regions
from v41.report import Decision
from v41.runtime.capture import CudaGraphs
from v41.runtime.executor import Run, events_of, executor
from v41.runtime.replay import WATCHER, Replayer, Seen
from v41.runtime.streams import CudaFlight, CudaLanes
from v41.tools.bench import timing
from v41.tools.bench.program import times
from v41.tools.bench.program_cases import Case, cut, prepare
from v41.tools.tables import add, table

ROUNDS = 3  # the ways take turns, and a time is the median of its rounds
SPIN = 40_000  # cycles that a delay takes at most: about 20 µs
GRAPHS = 8  # with delays of their own
SLOWER = 1.01  # how much of a step may be noise
Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of the compiled model: its plan, what runs its pieces, and what it was given."""

    plan: Plan
    artifacts: Any
    inputs: list[Any]
    device: torch.device

    def on(self, plan: Plan, lanes: Any = None) -> Callable[[], tuple[Any, ...]]:
        """What runs `plan`, one of the two."""
        run: Run = executor(replace(plan, overlapped=None), self.artifacts, lanes)
        return lambda: run(list(self.inputs))


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench overlap` does."""
    started = time.perf_counter()
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench overlap", found="torch sees none")
    config = V41Config.preset(arguments.preset)
    config = cut(config) if arguments.cut else config
    model = V41ForCausalLM.random(config, 0, "cuda").eval().requires_grad_(False)
    cases = prepare(model, arguments.rows, [], arguments.context)
    options = {"codegen": arguments.codegen, "overlap": "on", "cache": False}
    compiled = torch.compile(model, backend="v41", fullgraph=True, options=options)
    result: Record = {
        "case": "overlap", **timing.provenance(), "layers": config.num_hidden_layers, "context": arguments.context,
        "model": f"preset {arguments.preset}{', cut' if arguments.cut else ''}", "records": [], "stress": [],
    }  # fmt: skip
    with torch.no_grad(), v41.collect() as reports:
        for case in reversed(cases):
            if time.perf_counter() - started > arguments.budget:
                print(f"{case.name} left out: no time")
                continue
            step = step_of(compiled, case)
            if not result["records"]:
                result |= told(reports[-1].plan, reports[-1].options, reports[-1].passes[-1].decisions)
                print(result["overlap"])
            if step.plan.overlapped is None:
                break
            record = measured(step, case.rows)
            result["records"].append(record)
            if arguments.stress:
                result["stress"].append({"rows": case.rows, **stressed(step, arguments.stress)})
            timing.save(result, arguments.out)
            print(line(record, result["stress"]), flush=True)
    Console(width=160).print(overview(result["records"]))
    print(f"written to {timing.save(result, arguments.out)}")
    return 0 if holds(result) else 1


def told(plan: Plan | None, options: dict[str, Any], decisions: Sequence[Decision]) -> Record:
    """What the compiler says of side streams: whether they are on, where, and by what times each site was judged."""
    assert plan is not None
    sites = [{"site": each.node, "source": each.source, "rule": each.rule, "times": each.times} for each in decisions]
    made = plan.overlapped
    pays = {"pays_at": list(made.pays_at), "events": len(made.events)} if made else {}
    return {"overlap": ": ".join(map(str, options["overlap"])), "sites": sites, **pays}


def step_of(compiled: Any, case: Case) -> Step:
    """`case` as its graph runs it: warmed up, captured, replayed once."""
    with watched() as seen:
        for _ in range(3):
            compiled(case.batch, case.cache)
    last = seen[-1]
    assert last.whole is not None, "the step was not captured"
    owner: Replayer = last.whole.owner
    return Step(owner.plan, owner.artifacts, last.inputs, torch.device("cuda", torch.cuda.current_device()))


@contextmanager
def watched() -> Iterator[list[Seen]]:
    seen: list[Seen] = []
    token = WATCHER.set(seen)
    try:
        yield seen
    finally:
        WATCHER.reset(token)


def measured(step: Step, rows: int) -> Record:
    """One number of rows: times, graphs and bits."""
    plan, made = step.plan, step.plan.overlapped
    assert made is not None
    ways = {
        "one": step.on(plan),
        "side": step.on(made, lanes_for(CudaLanes, step.device)),
        "in_order": step.on(made),
    }
    graphs = CudaGraphs(step.device)
    wanted, record = copied(ways["in_order"]()), Record(rows=rows, on=rows in made.pays_at, boundaries=boundaries(made))
    record["same_bits"] = same(wanted, ways["side"]())
    replays: dict[str, Callable[[], None]] = {}
    for name, run in ways.items():
        graphs.warm_up(run)
        record[f"{name}_graph"] = structure(run, graphs.stream)
        graph, results = graphs.capture(partial(without_borders, run), ())
        replays[name] = graph.replay
        graph.replay()
        record["same_bits"] &= name == "one" or same(wanted, results)
    for where, calls in (("captured", replays), ("uncaptured", ways)):
        rounds = [{name: times(call) for name, call in calls.items()} for _ in range(ROUNDS)]
        for name in ways:
            for unit in ("us", "host_us"):
                record[f"{where}_{name}_{unit}"] = statistics.median(each[name][unit] for each in rounds)
    gain = record["captured_one_us"] - record["captured_side_us"]
    record |= {"gain_us": round(gain, 1), "gain_us_a_boundary": round(gain / max(record["boundaries"], 1), 2)}
    return record


def without_borders(run: Callable[[], tuple[Any, ...]], _: Sequence[Tensor]) -> tuple[Any, ...]:
    return run()


def lanes_for(kind: type[CudaLanes], device: torch.device, *more: Any) -> Callable[[Plan], CudaLanes]:
    return lambda plan: kind(device, max(piece.stream for piece in plan.pieces), events_of(plan), *more)


def boundaries(plan: Plan) -> int:
    """mHC boundaries whose coefficients are on a side stream."""
    kinds = Counter(region_of(call).kind for piece in plan.pieces if piece.stream for call in regions(piece.body))
    return kinds["mhc_coefficients"]


# ---- graphs


def structure(run: Callable[[], object], stream: torch.cuda.Stream) -> dict[str, int]:
    """Nodes, edges, forks and joins of the graph that a capture of `run` makes."""
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph, stream=stream):
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        return shape_of(path.read_text())


def shape_of(dot: str) -> dict[str, int]:
    """The same of a graph as text in DOT's language."""
    edges = {(a, b) for a, b in re.findall(r'"(\w+)"\s*->\s*"(\w+)"', dot)}
    nodes = {*re.findall(r'"(graph_\d+_node_\d+)"', dot), *(node for edge in edges for node in edge)}
    after, before = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    forks, joins = (sum(count > 1 for count in counts.values()) for counts in (after, before))
    return {"nodes": len(nodes), "edges": len(edges), "forks": forks, "joins": joins}


# ---- delays


class DelayedLanes(CudaLanes):
    """Lanes whose flights wait at random: before an event is recorded, after a wait, at a switch."""

    def __init__(self, device: torch.device, streams: int, events: int, draw: random.Random) -> None:
        super().__init__(device, streams, events)
        self.draw = draw

    def __call__(self) -> DelayedFlight:
        flight = super().__call__()
        return DelayedFlight(self, flight.streams, flight.events)


class DelayedFlight(CudaFlight):
    lanes: DelayedLanes

    def delay(self) -> None:
        if self.lanes.draw.random() < 0.5:
            torch.cuda._sleep(self.lanes.draw.randrange(1, SPIN))

    def mark(self, event: int) -> None:
        self.delay()
        super().mark(event)

    def wait(self, event: int) -> None:
        super().wait(event)
        self.delay()

    def switch(self, stream: int) -> None:
        super().switch(stream)
        self.delay()


def stressed(step: Step, count: int) -> dict[str, Any]:
    """So many steps with delays, an eighth of them uncaptured: how many gave other bits than these kernels in order."""
    made = step.plan.overlapped
    assert made is not None
    wanted = copied(step.on(made)())
    held = [step.inputs[made.inputs.index(name)] for name in {name for piece in made.pieces for name in piece.writes}]
    caches, wrong = copied(held), {"uncaptured": 0, "captured": 0}
    draw = random.Random(0)
    run = step.on(made, lanes_for(DelayedLanes, step.device, draw))
    for _ in range(count // 8):
        wrong["uncaptured"] += not same(wanted, run())
    graphs = CudaGraphs(step.device)
    graphs.warm_up(run)
    captured = [graphs.capture(partial(without_borders, run), ()) for _ in range(GRAPHS)]
    for turn in range(count - count // 8):
        graph, results = captured[turn % GRAPHS]
        graph.replay()
        wrong["captured"] += not same(wanted, results)
    return {"steps": count, **wrong, "caches_same": same(caches, held)}


def copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def same(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether all tensors have the same bits."""
    pairs = [(a, b) for a, b in zip(wanted, found, strict=True) if isinstance(a, Tensor)]
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


# ---- what is told


def holds(result: Record) -> bool:
    """Whether every bit is right, and no step is slower where side streams are on."""
    slow = [r for r in result["records"] if r["on"] and r["captured_side_us"] > SLOWER * r["captured_one_us"]]
    wrong = [r for r in result["stress"] if r["uncaptured"] or r["captured"] or not r["caches_same"]]
    return bool(result["records"]) and not slow and not wrong and all(r["same_bits"] for r in result["records"])


def line(record: Record, stress: Sequence[Record]) -> str:
    last = stress[-1] if stress else None
    told = f", {last['steps']} delayed steps: {last['uncaptured'] + last['captured']} differ" if last else ""
    one, side = record["captured_one_us"], record["captured_side_us"]
    return f"{record['rows']} rows: one stream {one} us, side {side} us, same bits {record['same_bits']}{told}"


def overview(records: Sequence[Record]) -> Any:
    columns = (
        "one us",
        "side us",
        "gain us",
        "us a boundary",
        "uncaptured one us",
        "side us",
        "nodes",
        "forks",
        "joins",
    )
    made = table("rows", "on", *columns, left=0)
    for r in records:
        graph = r["side_graph"]
        add(made, r["rows"], "yes" if r["on"] else "no", r["captured_one_us"], r["captured_side_us"], r["gain_us"],
            r["gain_us_a_boundary"], r["uncaptured_one_us"], r["uncaptured_side_us"], graph["nodes"], graph["forks"],
            graph["joins"])  # fmt: skip
    return made
