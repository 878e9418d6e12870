"""show and as_json: reports of compiled graphs as aligned tables, or as plain values with the same fields.

    pass           sites  applied  refused      nodes        ms
    canonicalize       -        -        -  2231 -> 1764     41        sites: places the pass judged; `-` it judges none
    outline_mhc       13       12        1  1764 ->  441    118
    refused  outline_mhc, 1 site: "the carried pre comes from an earlier boundary"; first at view_212, broken by one_hot
             model_def/model.py:97  A = one_hot(0, S).expand(T, S)

Nothing is looked up elsewhere: what a CompileReport does not hold is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from v41.passes.plan_passes import PLAN_PASSES
from v41.report import CompileReport, Decision, PassRun
from v41.tools.captures_view import capture_remarks, capture_values, captures_table
from v41.tools.plan_view import borders, borders_table, rounding_table, rounding_values
from v41.tools.tables import add, counted, say, table

BETWEEN = "between passes"
WIDE = 4  # digits of a number that three columns of pairs have room for beside the longest name of a pass


def show(console: Console, reports: Sequence[CompileReport]) -> None:
    """Prints every report, in order of compilation."""
    if not reports:
        console.print("nothing was compiled")
    for number, report in enumerate(reports, 1):
        if number > 1:
            console.print()
        if len(reports) > 1:
            say(console, f"graph {number} of {len(reports)}", "bold")
        if report.given_up is not None:
            say(console, f"given up {report.given_up}", "yellow")
            continue
        console.print(passes_table(report.passes, seconds=report.seconds.get("passes")))
        for line in remarks(report.passes):
            say(console, line)
        console.print()
        console.print(program_table(report))
        if report.seconds:
            console.print()
            console.print(seconds_table(report.seconds))
        say(console, f"{'cache':9}{report.cache}")
        for label, lines in (("fallback", report.fallbacks), ("break", [report.graph_break])):
            for line in filter(None, lines):
                say(console, f"{label:9}{line}", "yellow")
        of_plan = [borders_table(report.plan), rounding_table(report.plan)] if report.plan else []
        for made in (kernels_table(report), *of_plan, options_table(report)):
            if made is not None:
                console.print()
                console.print(made)
        if report.captures is not None:
            console.print()
            console.print(captures_table(report.captures))
            for line in capture_remarks(report.captures):
                say(console, line)


def passes_table(passes: Sequence[PassRun], *, sizes: bool = False, seconds: float | None = None) -> Table:
    """One line a pass; `sizes`: with the regions and kernels of a step before and after it as well.

    seconds: what all took together, of which the last line tells what no pass took itself.
    """
    changes = {"nodes": [(run.nodes_before, run.nodes_after) for run in passes]}
    if sizes:
        changes["regions"] = [(run.regions_before, run.regions_after) for run in passes]
        launches = [(run.launches_before, run.launches_after) for run in passes]
        changes["launches a step" if _digits(launches) <= WIDE else "launches"] = launches
    made = table("pass", "sites", "applied", "refused", *changes, "ms")
    columns = [_arrows(pairs, tight=sizes) for pairs in changes.values()]
    for run, *arrows in zip(passes, *columns, strict=True):
        judged = (len(run.decisions), run.applied, run.refused) if run.decisions else (None, None, None)
        name = f"{run.name} (off)" if run.failure else run.name
        add(made, name, *judged, *arrows, round(run.milliseconds))
    if seconds is not None:
        add(made, BETWEEN, *[None] * (3 + len(changes)), round(between(passes, seconds)))
    return made


def between(passes: Sequence[PassRun], seconds: float) -> float:
    """Of all `seconds`, the ms that no pass took: for counting, checking and keeping what changed. Passes over plans
    run later, in the time of the partition."""
    return max(0.0, seconds * 1e3 - sum(run.milliseconds for run in passes if run.name not in PLAN_PASSES))


def _arrows(pairs: Sequence[tuple[int, int]], *, tight: bool = False) -> list[str]:
    """Each pair as `2243 -> 2162`, in columns; `tight`: without the spaces where numbers are long."""
    width = _digits(pairs)
    arrow = "->" if tight and width > WIDE else " -> "
    return [f"{before:{width}}{arrow}{after:{width}}" for before, after in pairs]


def _digits(pairs: Sequence[tuple[int, int]]) -> int:
    return max((len(str(n)) for pair in pairs for n in pair), default=1)


def remarks(passes: Sequence[PassRun]) -> list[str]:
    """What a table cannot hold: refusals, one line a pass and rule, then warnings and failures."""
    lines = []
    for run in passes:
        groups: dict[str, list[Decision]] = {}
        for decision in run.decisions:
            if not decision.applied:
                groups.setdefault(str(decision.rule), []).append(decision)
        for rule, sites in groups.items():
            first, count = sites[0], counted(len(sites), "site")
            lines += [
                f'refused  {run.name}, {count}: "{rule}"; first at {first.name}, broken by {first.culprit}',
                f"         {first.source}",
            ]
        lines += [f"warning  {run.name}: {run.warning}"] * bool(run.warning)
        lines += [f"failed   {run.name}: {run.failure}"] * bool(run.failure)
    return lines


def program_table(report: CompileReport) -> Table:
    counts = {
        "pieces": report.pieces,
        "artifacts": report.artifacts,
        "shared": report.pieces - report.artifacts,
        "kernels": len(report.kernels) or None,
        "fallbacks": len(report.fallbacks) or None,
        "breaks": int(report.graph_break is not None) or None,
        "recompiles": report.recompiles or None,
    }
    made = table(*counts, left=0)
    add(made, *counts.values())
    return made


def seconds_table(seconds: Mapping[str, float]) -> Table:
    made = table(*(f"{phase} s" for phase in seconds), left=0)
    add(made, *(f"{value:.1f}" for value in seconds.values()))
    return made


def kernels_table(report: CompileReport) -> Table | None:
    """Generated kernels, and how many pieces run each."""
    made = table("kernel", "pieces")
    for name, pieces in report.kernels.items():
        add(made, name, len(pieces))
    return made if report.kernels else None


def options_table(report: CompileReport) -> Table:
    made = table("option", "value", "set by", left=3)
    for name, (value, who) in report.options.items():
        add(made, name, str(value), who.splitlines()[0])
    return made


def as_json(reports: Sequence[CompileReport]) -> list[dict[str, Any]]:
    """The same, as values json can write."""
    return [
        {
            "passes": [pass_values(run) for run in report.passes],
            "pieces": report.pieces,
            "artifacts": report.artifacts,
            "kernels": {name: list(pieces) for name, pieces in report.kernels.items()},
            "fallbacks": list(report.fallbacks),
            "graph_break": report.graph_break,
            "given_up": report.given_up,
            "recompiles": report.recompiles,
            "cache": report.cache,
            "borders": borders(report.plan) if report.plan else {},
            "rounding": rounding_values(report.plan) if report.plan else [],
            "captures": capture_values(report.captures) if report.captures else None,
            "seconds": dict(report.seconds),
            "options": {name: {"value": value, "set_by": who} for name, (value, who) in report.options.items()},
        }
        for report in reports
    ]


def pass_values(run: PassRun) -> dict[str, Any]:
    """One pass, as values json can write; what it changed where that was kept."""
    kept = {} if run.changes is None else {"changes": [asdict(change) for change in run.changes]}
    return kept | {
        "name": run.name,
        "applied": run.applied,
        "refused": run.refused,
        "nodes_before": run.nodes_before,
        "nodes_after": run.nodes_after,
        "made": dict(run.made),
        "regions_before": run.regions_before,
        "regions_after": run.regions_after,
        "launches_before": run.launches_before,
        "launches_after": run.launches_after,
        "milliseconds": run.milliseconds,
        "failure": run.failure,
        "warning": run.warning,
        "decisions": [decision_values(decision) for decision in run.decisions],
    }


def decision_values(decision: Decision) -> dict[str, Any]:
    region = decision.region
    return {
        "applied": decision.applied,
        "node": decision.node,
        "body": decision.body,
        "source": decision.source,
        "rule": decision.rule,
        "culprit": decision.culprit,
        "culprit_source": decision.culprit_source,
        "region": region and {"kind": region.kind, "attrs": {name: str(value) for name, value in region.attrs.items()}},
        "times": decision.times and {name: dict(each) for name, each in decision.times.items()},
    }
