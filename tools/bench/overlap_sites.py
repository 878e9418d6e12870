"""overlap_sites: what side work gains in whole decode steps, site by site, kept for later compiles (v41/gains.py).

    one     the plan on the caller's stream
    with    the same plan, with the sites of one key alone on their side stream

Both are captured and replayed in turn; what a site gains is the median difference over their number. Sites of one key
do equal work beside the same regions. Measured are all that the compiler makes pieces for where nothing is kept, so
what lost once has another chance. Where its memory lies makes a graph slower or faster, too: by how much is seen by
more captures of `one`, and a difference within that noise says nothing of a site, which stays as the compiler judged
it. Side work also gets into the way of side work: all sites that gain are measured together, and while that does not
exceed the noise, the one that gained least is held to its share and left out. What is measured is kept after each
number of rows; the compiler turns a site off at rows where it lost. --device cpu compares bits instead, and keeps
nothing.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from v41.gains import ignored, keep
from v41.lowering.tuned import bucket
from v41.model_def.model import V41ForCausalLM
from v41.passes.assign_streams import Site, sites_of, with_sides
from v41.passes.check_plan import check_plan
from v41.plan import Plan
from v41.report import CompileReport, Decision
from v41.runtime.capture import CudaGraphs
from v41.runtime.executor import LanesOf
from v41.runtime.streams import CudaLanes
from v41.tools.bench import timing
from v41.tools.bench.overlap_stress import lanes_for, same
from v41.tools.bench.program_cases import Case, prepare
from v41.tools.planned_step import PlannedStep, step_of
from v41.tools.tables import add, table

PAIRS = 40
WARM = 3
MORE = 3  # captures of the plan without, for the noise
Record = dict[str, Any]
Replay = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """The sites of one key, and what the compiler said of the first."""

    key: str
    sites: Sequence[Site]
    decision: Decision

    def facts(self, rows: int) -> Record:
        named = {"site": self.decision.node, "source": self.decision.source, "key": self.key}
        return {"rows": rows, **named, "sites": len(self.sites), "predicted_us": self.us("predicted gain", rows)}

    def us(self, name: str, rows: int) -> float | None:
        """One of the times that it was judged by."""
        return (self.decision.times or {})[name].get(bucket(rows))

    def hides(self, rows: int) -> bool:
        """Whether the compiler may put it on a side stream, if it gains."""
        own, slack = self.us("own", rows), self.us("slack", rows)
        return own is not None and slack is not None and own <= slack


@torch.no_grad()
def run(model: V41ForCausalLM, arguments: Namespace, result: Record, started: float) -> None:
    """Fills in `result`, which is written after every record."""

    def late() -> bool:
        result["seconds"] = round(time.perf_counter() - started, 1)
        timing.save(result, arguments.out)
        return bool(result["seconds"] > arguments.budget)

    cases = prepare(model, arguments.rows, [], [arguments.context])
    with ignored():
        step, report = step_of(model, cases[0].batch, cases[0].cache, arguments.rows, arguments.codegen)
    kinds, codegen = kinds_of(step, report), str(report.options["codegen"][0])
    result |= {"codegen": codegen, "noise_us": {}, "together": []}
    for case in cases:
        if step.device.type == "cpu":
            result["records"] += [kind.facts(case.rows) | compared(step, kind, case) for kind in kinds]
            continue
        one, found = captured(step, step.plan, case), list[Record]()
        noise = noise_of(step, case, one)
        result["noise_us"][case.rows] = noise
        for kind in kinds:
            if late():
                result["left_out"].append(f"{kind.decision.node}, {case.name}: no time")
                continue
            found.append(kind.facts(case.rows) | measured(step, kind, case, one))
            result["records"].append(found[-1])
        gains = {record["key"]: record["gain_us"] for record in found}
        known = [kind for kind in kinds if kind.key in gains]
        kept, together = settled(step, known, gains, noise, case, one)
        result["together"] += together
        for record in found:
            record["kept_us"] = kept[record["key"]]
        if kept:
            keep(step.device, codegen, case.rows, kept)
    late()


def kinds_of(step: PlannedStep, report: CompileReport) -> list[Kind]:
    """The sites that have artifacts, by key, in the plan's order."""
    (decisions,) = (each.decisions for each in report.passes if each.name == "assign_streams")
    by_key: dict[str, list[tuple[Site, Decision]]] = {}
    for site, decision in zip(sites_of(step.alone(step.plan)), decisions, strict=True):
        pieces = [site.side, *([site.rest] if site.rest else [])]
        if site.cone.piece.uncapturable is None and all(piece.key in step.artifacts for piece in pieces):
            by_key.setdefault(site.key, []).append((site, decision))
    return [Kind(key, [site for site, _ in of], of[0][1]) for key, of in by_key.items()]


def with_kind(step: PlannedStep, kind: Kind) -> Plan:
    """The step's plan with these sites alone on their streams."""
    made = with_sides(step.alone(step.plan), kind.sites)
    check_plan(made)
    return made


def compared(step: PlannedStep, kind: Kind, case: Case) -> Record:
    inputs = step.fed(case.batch, case.cache)
    plans = (step.plan, with_kind(step, kind))
    one, other = (step.on(plan)(list(inputs)) for plan in plans)
    return {"same_bits": same(one, other)}


def measured(step: PlannedStep, kind: Kind, case: Case, one: Replay) -> Record:
    found = beside_one(step, with_kind(step, kind), case, one)
    return found | {"gain_us": round(found["gain_us"] / len(kind.sites), 3)}


def noise_of(step: PlannedStep, case: Case, one: Replay) -> float:
    """The most that another capture of the plan without differs from `one`, µs."""
    again = (in_turn(one, captured(step, step.plan, case)) for _ in range(MORE))
    return round(max(abs(statistics.median(before - after for before, after in pairs)) for pairs in again), 3)


def settled(
    step: PlannedStep, kinds: Sequence[Kind], gains: Mapping[str, float], noise: float, case: Case, one: Replay
) -> tuple[dict[str, float | None], list[Record]]:
    """What to keep of `gains`, which sites of `kinds` have by themselves; how those fared that were measured together.

    Kept is None where the noise hides what a site does, and it is in nothing that was found to gain."""
    kept = {kind.key: gains[kind.key] if abs(gains[kind.key]) * len(kind.sites) > noise else None for kind in kinds}
    judged = {kind.key: kind.us("gain", case.rows) if (us := kept[kind.key]) is None else us for kind in kinds}
    left = [kind for kind in kinds if kind.hides(case.rows) and (judged[kind.key] or 0) > 0]
    found = list[Record]()
    while left:
        sites = best_of_each_piece(left, judged)
        made = with_sides(step.alone(step.plan), sites)
        check_plan(made)
        found.append({"rows": case.rows, "sites": len(sites), **beside_one(step, made, case, one)})
        gain = found[-1]["gain_us"]
        if gain > noise:
            share = {kind.key: round(gain / len(sites), 3) for kind in left if set(kind.sites) & set(sites)}
            return {key: share.get(key) if us is None else us for key, us in kept.items()}, found
        worst = min(left, key=lambda kind: gains[kind.key])
        kept[worst.key] = round((gain - noise) / len(sites), 3)
        left.remove(worst)
    return kept, found


def best_of_each_piece(kinds: Sequence[Kind], gains: Mapping[str, float | None]) -> list[Site]:
    """As the compiler chooses them."""
    best: dict[int, Site] = {}
    for kind in sorted(kinds, key=lambda kind: gains[kind.key] or 0):
        best |= {site.cone.at: site for site in kind.sites}
    return [best[at] for at in sorted(best)]


def beside_one(step: PlannedStep, plan: Plan, case: Case, one: Replay) -> Record:
    pairs = in_turn(one, captured(step, plan, case, lanes_for(CudaLanes, step.device)))
    gain = statistics.median(before - after for before, after in pairs)
    before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"one_us": round(before, 1), "with_us": round(after, 1), "gain_us": round(gain, 3)}


def captured(step: PlannedStep, plan: Plan, case: Case, lanes: LanesOf | None = None) -> Replay:
    """Replays a step of `plan` as one graph."""
    run, inputs = step.on(plan, lanes), step.fed(case.batch, case.cache)
    step.compile_ahead(plan, inputs)
    graphs = CudaGraphs(step.device)
    graphs.warm_up(lambda: run(list(inputs)))
    graph, results = graphs.capture(lambda _: run(list(inputs)), ())
    return partial(_replay, graph.replay, results)


def _replay(replay: Replay, results: Sequence[Any]) -> None:
    """`results` are held with the graph: nothing else may take their memory."""
    replay()


def in_turn(one: Replay, other: Replay) -> list[tuple[float, float]]:
    """µs of both, again and again."""
    for _ in range(WARM):
        one()
        other()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * PAIRS + 1)]
    marks[0].record()
    for at in range(PAIRS):
        one()
        marks[2 * at + 1].record()
        other()
        marks[2 * at + 2].record()
    torch.cuda.synchronize()
    us = [1000 * before.elapsed_time(after) for before, after in pairwise(marks)]
    return list(zip(us[::2], us[1::2], strict=True))


# ---- what is told


def overview(records: Sequence[Record]) -> Any:
    gains = ("predicted gain us", "measured gain us", "kept gain us")
    made = table("site", "source", "rows", "sites", *gains, "one us", "with us", left=2)
    for r in records:
        told = (r.get(name) for name in ("predicted_us", "gain_us", "kept_us", "one_us", "with_us"))
        add(made, r["site"], r["source"], r["rows"], r["sites"], *told)
    return made


def verdict(result: Record) -> list[str]:
    """What was found; the last line is the outcome."""
    records = result["records"]
    lost = [r for r in records if (us := r.get("kept_us")) is not None and us <= 0]
    wrong = [f"{r['site']} at {r['rows']} rows" for r in records if not r.get("same_bits", True)]
    told = [f"loses          {r['site']} at {r['rows']} rows: {-r['kept_us']} us more" for r in lost]
    told += [f"other bits     {each}" for each in wrong]
    told += [f"not shown      {each}" for each in result["left_out"]]
    if wrong or not records:
        return [*told, "does not hold: other bits" if wrong else "nothing was shown"]
    told += [f"together       {r['sites']} sites at {r['rows']} rows: {r['gain_us']} us less"
             for r in result.get("together", ())]  # fmt: skip
    told += [
        f"noise          {us} us at {rows} rows: less says nothing of a site"
        for rows, us in result.get("noise_us", {}).items()
    ]
    timed, kept = (sum(r.get(name) is not None for r in records) for name in ("gain_us", "kept_us"))
    return [*told, f"all holds: {kept} of {timed} gains are kept" if timed else "all holds: bits alone were compared"]
