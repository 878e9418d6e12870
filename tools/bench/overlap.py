"""bench overlap: decode steps with side work on streams of its own against the same model on one stream, in one run.

    one       the plan on the caller's stream
    side      its plan with side streams, on several
    level     the same, all streams of one priority; else, captured, side kernels take the multiprocessors that are left
    in_order  the pieces of side on the caller's stream: the same kernels, so its bits are what side is held to

Each captured (graph replays), one and side uncaptured as well; of their graphs the structure. gain_us: what side takes
less than one where both take turns, step by step; noise_us: the most that other captures of one differ. A boundary is
an mHC boundary whose coefficients left the path. --stress decodes on and on beside one stream, with spin kernels on
either stream (overlap_stress.py): so many steps of each case, or as many as its share of the time allows; --sites
measures each site by itself instead and keeps what it gains, which the compiler then obeys (overlap_sites.py). side is
measured at all rows, on says where it is used. The JSON is written after every record. The last lines say what holds
and what does not; exits with 1 where a bit differs, a step is slower where side streams are on by more than the noise,
or nothing was shown. --device cpu: all but streams, graphs and times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from v41.model_def.model import V41ForCausalLM
from v41.plan import Plan
from v41.regions import region_of, regions
from v41.report import CompileReport
from v41.runtime.capture import CudaGraphs
from v41.runtime.streams import CudaLanes
from v41.tools.bench import overlap_sites, timing
from v41.tools.bench.models import config_of, device_of, facts_of, model_of
from v41.tools.bench.overlap_stress import lanes_for, same, stressed
from v41.tools.bench.program import times
from v41.tools.bench.program_cases import Case, prepare
from v41.tools.graph_shape import GraphShape, shape_of, shape_table
from v41.tools.planned_step import PlannedStep, step_of
from v41.tools.tables import add, table

ROUNDS = 3  # the ways take turns, and a time is the median of its rounds
Record = dict[str, Any]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench overlap` does."""
    started = time.perf_counter()
    device_of(arguments, "v41 bench overlap")
    config = config_of(arguments)
    model = model_of(config, arguments)
    result: Record = {
        **facts_of("overlap sites" if arguments.sites else "overlap", arguments, config),
        "context": arguments.context, "rows": arguments.rows,
        "asked": {"stress": arguments.stress, "budget": arguments.budget}, "records": [], "stress": [], "left_out": [],
    }  # fmt: skip
    if arguments.sites:
        return sites_command(model, arguments, result, started)
    run(model, arguments, result, started)
    console = Console(width=160)
    console.print(sites_table(result.get("sites", ())))
    console.print(overview(result["records"]))
    for record in [each for each in result["records"] if "side_graph" in each][:1]:
        console.print(f"graph of {record['rows']} rows:", shape_table(GraphShape.of(record["side_graph"])), sep="\n")
    print("\n".join(told := verdict(result)))
    print(f"written to {timing.save(result, arguments.out)}")
    return 0 if told[-1].startswith("all holds") else 1


def sites_command(model: V41ForCausalLM, arguments: Namespace, result: Record, started: float) -> int:
    """With --sites."""
    overlap_sites.run(model, arguments, result, started)
    Console(width=160).print(overlap_sites.overview(result["records"]))
    print("\n".join(told := overlap_sites.verdict(result)))
    print(f"written to {timing.save(result, arguments.out)}")
    return 0 if told[-1].startswith("all holds") else 1


def run(model: V41ForCausalLM, arguments: Namespace, result: Record, started: float) -> None:
    """Fills in `result`, which is written after every record."""

    def left() -> float:
        return arguments.budget - (time.perf_counter() - started)

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - started, 1)
        timing.save(result, arguments.out)

    with torch.no_grad():
        cases = prepare(model, arguments.rows, [], [arguments.context], room=arguments.stress or 0)
        step, report = step_of(model, cases[0].batch, cases[0].cache, arguments.rows, arguments.codegen)
        result |= sites(step.plan, report)
        save()
        print(f"{result['overlap']}, planned and compiled after {result['seconds']} s", flush=True)
        if not step.plan.sides:
            return
        for case in reversed(cases):
            if left() < 0:
                result["left_out"].append(f"{case.name}: no time")
                continue
            result["records"].append(measured(step, case))
            save()
            print(line(result["records"][-1]), flush=True)
        for at, case in enumerate(reversed(cases) if arguments.stress else ()):
            share = left() / (len(cases) - at)
            if share <= 0:
                result["left_out"].append(f"stress of {case.name}: no time")
                continue
            found = stressed(step, model.config, case, arguments.stress, share)
            result["stress"].append({"rows": case.rows, **found})
            save()
            print(stress_line(result["stress"][-1]), flush=True)


def sites(plan: Plan, report: CompileReport) -> Record:
    """What the compiler says of side streams: whether they are on, where, and by what times each site was judged."""
    passes = [each for each in report.passes if each.name == "assign_streams"]
    found = [{"site": each.node, "source": each.source, "rule": each.rule, "times": each.times}
             for run in passes for each in run.decisions]  # fmt: skip
    plans = [{"pays_at": list(each.pays_at), "events": len(each.events), "boundaries": boundaries(each),
              "side pieces": sum(piece.stream > 0 for piece in each.pieces)} for each in plan.sides]  # fmt: skip
    return {"overlap": ": ".join(map(str, report.options["overlap"])), "sites": found, "plans": plans}


def measured(step: PlannedStep, case: Case) -> Record:
    """One number of rows: bits, and on a GPU graphs and times."""
    plan, made = step.plan, step.sides_at(case.rows)
    assert made is not None
    inputs = step.fed(case.batch, case.cache)
    record = Record(rows=case.rows, on=case.rows in made.pays_at, boundaries=boundaries(made))
    if step.device.type == "cpu":
        one, in_order = (step.on(each) for each in (plan, made))
        other = [] if same(one(list(inputs)), in_order(list(inputs))) else ["in order"]
        return record | {"same_bits": not other, "other_bits": other}
    for each in (plan, made):
        step.compile_ahead(each, inputs)
    several = lanes_for(CudaLanes, step.device)
    ways = {
        "one": step.on(plan), "side": step.on(made, several), "level": step.on(made, several),
        "in_order": step.on(made),
    }  # fmt: skip
    calls = {name: partial(called, way, inputs) for name, way in ways.items()}
    wanted = copied(calls["in_order"]())
    other = [] if same(wanted, calls["side"]()) else ["side, uncaptured"]
    replays: dict[str, Callable[[], None]] = {}
    for name, call in calls.items():
        graphs = CudaGraphs(step.device, torch.cuda.Stream(step.device) if name == "level" else None)
        graphs.warm_up(call)
        if name in ("one", "side"):
            record[f"{name}_graph"] = structure(call, graphs.stream).values()
        graph, results = graphs.capture(partial(without_borders, call), ())
        replays[name] = graph.replay
        graph.replay()
        if name != "one" and not same(wanted, results):
            other.append(name)
    record |= {"same_bits": not other, "other_bits": other} | timed("captured", replays, ROUNDS)
    record |= timed("uncaptured", {name: calls[name] for name in ("one", "side")}, 1)
    pairs = overlap_sites.in_turn(replays["one"], replays["side"])
    gain = statistics.median(before - after for before, after in pairs)
    record["noise_us"] = overlap_sites.noise_of(step, case, replays["one"])
    record |= {"gain_us": round(gain, 1), "gain_us_a_boundary": round(gain / max(record["boundaries"], 1), 2)}
    return record


def called(way: Callable[[list[Any]], tuple[Any, ...]], inputs: Sequence[Any]) -> tuple[Any, ...]:
    return way(list(inputs))


def without_borders(call: Callable[[], tuple[Any, ...]], _: Sequence[Tensor]) -> tuple[Any, ...]:
    return call()


def timed(where: str, calls: Mapping[str, Callable[[], object]], rounds: int) -> Record:
    found = [{name: times(call) for name, call in calls.items()} for _ in range(rounds)]
    return {f"{where}_{name}_{unit}": statistics.median(each[name][unit] for each in found)
            for name in calls for unit in ("us", "host_us")}  # fmt: skip


def copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def boundaries(plan: Plan) -> int:
    """mHC boundaries whose coefficients are on a side stream."""
    kinds = Counter(region_of(call).kind for piece in plan.pieces if piece.stream for call in regions(piece.body))
    return kinds["mhc_coefficients"]


def structure(call: Callable[[], object], stream: torch.cuda.Stream) -> GraphShape:
    """Nodes, edges and branches of the graph that a capture of `call` makes."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # else torch drops what could be written, also under debug mode
    with torch.cuda.graph(graph, stream=stream):
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        return shape_of(path.read_text())


# ---- what is told


def verdict(result: Record) -> list[str]:
    """A line for each thing that a run is to show: holds, does not hold, or not shown, and by what."""
    records, stress = result["records"], result["stress"]
    wrong = [f"{r['rows']} rows, {', '.join(r['other_bits'])}" for r in records if not r["same_bits"]]
    slow = [r for r in records if r["on"] and -r.get("gain_us", 0) > r.get("noise_us", 0)]
    off = [r for r in stress if r["uncaptured"] or r["captured"] or not r["caches_same"]]
    timed = any("captured_one_us" in r for r in records)
    steps = sum(r["steps"] for r in stress)
    told = [
        _line("the bits of one stream", records, f"at {_rows(records)} rows", "; ".join(wrong)),
        _line("no step is slower where it is on", [r for r in records if r["on"]] if timed else [],
              ", ".join(f"{r['rows']} rows: {r['gain_us']} us less" for r in records if r["on"] and timed),
              ", ".join(f"{r['rows']} rows: {-r['gain_us']} us more" for r in slow)),
        _line("the bits of one stream under delays", stress, f"{steps} steps, {_rows(stress)} rows", "; ".join(
            f"{r['rows']} rows: {r['uncaptured'] + r['captured']} of {r['steps']} steps differ, caches "
            f"{'are alike' if r['caches_same'] else 'differ'}" for r in off)),
        *(f"not shown      {text}" for text in result["left_out"]),
        *(f"cut short      stress of {r['rows']} rows: {r['steps']} of {r['asked']} steps in {r['seconds']} s"
          for r in stress if r["steps"] < r["asked"]),
    ]  # fmt: skip
    broken = sum(text.startswith("does not hold") for text in told)
    if broken or not records:
        return [*told, f"does not all hold: {broken} of 3" if broken else "nothing was shown"]
    return [*told, "all holds that was shown" if any(text.startswith("not shown") for text in told) else "all holds"]


def _line(what: str, shown: Sequence[object], by: str, against: str) -> str:
    if against:
        return f"does not hold  {what}: {against}"
    return f"holds          {what}: {by}" if shown else f"not shown      {what}"


def _rows(records: Sequence[Record]) -> str:
    return " ".join(str(record["rows"]) for record in records)


def line(record: Record) -> str:
    told = f"{record['rows']} rows, {'on' if record['on'] else 'off'}: same bits {record['same_bits']}"
    if "captured_one_us" not in record:
        return told
    one, side, level = (record[f"captured_{way}_us"] for way in ("one", "side", "level"))
    return f"{told}, one stream {one} us, side {side} us, of one priority {level} us"


def stress_line(record: Record) -> str:
    wrong, caches = record["uncaptured"] + record["captured"], "alike" if record["caches_same"] else "not alike"
    told = f"{record['rows']} rows: {record['steps']} delayed steps, {wrong} differ, caches {caches}"
    return f"{told}, {record['seconds']} s"


def sites_table(found: Sequence[Record]) -> Any:
    """A line a site: what it was judged by at the fewest and at the most rows, and the rule it breaks, if one."""
    rungs = sorted({rows for site in found for rows in (site["times"] or {}).get("gain", {})})
    ends = sorted({*rungs[:1], *rungs[-1:]})
    told = [(rows, name) for rows in ends for name in ("own", "slack", "predicted gain", "measured gain")]
    made = table("site", "refused", *(f"{rows} rows: {name} us" for rows, name in told), left=2)
    for site in found:
        times = site["times"] or {}
        add(made, site["site"], site["rule"] or None, *(times.get(name, {}).get(rows) for rows, name in told))
    return made


def overview(records: Sequence[Record]) -> Any:
    captured = ("one us", "side us", "level us", "in order us", "gain us", "us a boundary")
    columns = (*captured, "uncaptured one us", "side us", "nodes", "edges", "branches")
    made = table("rows", "on", *columns, left=0)
    for r in (record for record in records if "side_graph" in record):
        graph = r["side_graph"]
        replays = (r[f"captured_{way}_us"] for way in ("one", "side", "level", "in_order"))
        uncaptured = (r[f"uncaptured_{way}_us"] for way in ("one", "side"))
        add(made, r["rows"], "yes" if r["on"] else "no", *replays, r["gain_us"], r["gain_us_a_boundary"], *uncaptured,
            graph["nodes"], graph["edges"], len(graph["branches"]))  # fmt: skip
    return made
