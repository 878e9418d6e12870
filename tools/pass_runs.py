"""pass_runs: what every pass did, to a model captured now, in a saved run, or in a file of `v41 inspect --json`.

    told_of(arguments)      the passes of the model or run that arguments name
    pass_named(runs, NAME)  the run of one pass; UnknownPass lists those that there are, the nearest first

A file is judged as it is read: NoInspection says what is missing or wrong in it.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from v41.errors import NoInspection, UnknownPass
from v41.passes.pipeline import PIPELINE
from v41.passes.plan_passes import PLAN_PASSES
from v41.report import PassRun
from v41.tools.expected import differences, regions_found
from v41.tools.hints import is_to_mend
from v41.tools.nearest import choices
from v41.tools.run import Run
from v41.tools.saved_passes import run_from
from v41.tools.sources import OF_CAPTURES, is_run, refuse_unused, run_named
from v41.tools.tables import WIDTH


@dataclass(frozen=True)
class Told:
    """What the passes did to one graph, and the regions that its config asks for, where that is known."""

    runs: list[PassRun]
    by_config: dict[str, int] | None
    run: Run | None = None  # where a whole run is there, and not its passes alone
    seconds: float | None = None  # that all passes took together, what lies between them included

    @property
    def differences(self) -> list[str]:
        """The regions that there are too few of, or too many."""
        return [] if self.by_config is None else differences(regions_found(self.runs), self.by_config)

    @property
    def troubled(self) -> bool:
        return any(map(troubled, self.runs)) or bool(self.differences)


def troubled(run: PassRun) -> bool:
    """Whether a pass failed, or refused a site that another spelling of the model would have spared."""
    return run.failure is not None or any(map(is_to_mend, run.decisions))


class Pipe(Console):
    """A console that leaves it to the command what to do where nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_of(arguments: Namespace) -> Console:
    """Where tables go; beside JSON, stdout is for that alone. A narrower terminal wraps lines: no figure is cut."""
    console = Pipe(stderr=arguments.json, highlight=False)
    console.width = max(console.width, WIDTH)
    return console


def told_of(arguments: Namespace, console: Console, *, changes: bool = False) -> Told:
    """The passes of what `arguments` name; with what they changed, where `changes`. A wrong name of a pass is refused
    before anything is captured."""
    name = getattr(arguments, "name", None)
    if os.path.isfile(arguments.model) or arguments.model.endswith(".json"):
        refuse_unused(arguments, OF_CAPTURES, "the run was captured with its own")
        saved = saved_runs(Path(arguments.model))
        pass_named(saved.runs, name)
        return saved
    if not is_run(arguments.model):
        pass_named([*(idle(each.name) for each in PIPELINE), *map(idle, PLAN_PASSES)], name)
    found = told_by(run_named(arguments, changes=changes), changes=changes)
    if name in PLAN_PASSES and all(run.name != name for run in found.runs):
        found = replace(found, runs=[*found.runs, of_plan(name, found.run)])
    pass_named(found.runs, name)
    return found


def of_plan(name: str, run: Run | None) -> PassRun:
    """What a pass over plans did that the report is silent of: it found nothing of its kind, or it was asked alone."""
    if name != "assign_streams" or run is None:
        return idle(name)
    start = time.perf_counter()
    found = run.predicted
    before, after = (sum(piece.nodes for piece in plan.pieces) for plan in (found.plan, found.at(1)))
    return PassRun(name, list(found.judged), before, after, (time.perf_counter() - start) * 1e3)


def idle(name: str) -> PassRun:
    """The run of a pass that found nothing to judge."""
    return PassRun(name, [], 0, 0, 0.0)


def told_by(run: Run, *, changes: bool = False) -> Told:
    runs = run.report.passes
    if changes and run.changes is not None:
        runs = [replace(each, changes=run.changes.get(each.name)) for each in runs]
    return Told(runs, run.by_config, run, run.report.seconds.get("passes"))


def pass_named(runs: Sequence[PassRun], name: str | None) -> PassRun | None:
    """The run of pass `name`; None for no name. UnknownPass where there is none of that name."""
    found = next((run for run in runs if run.name == name), None)
    if found is None and name is not None:
        raise UnknownPass("v41 PASS", name=name, known=choices(name, [run.name for run in runs]))
    return found


def saved_runs(path: Path) -> Told:
    """What is in a file that `v41 inspect --json` or `v41 generate --json` wrote."""
    try:
        saved = json.loads(path.read_text())
        graphs = [saved["graph"]] if "graph" in saved else saved["graphs"]
        if len(graphs) != 1:
            raise ValueError(f"{len(graphs)} graphs, where one is needed")
        runs = [run_from(values) for values in graphs[0]["passes"]]
        by_config, seconds = saved["regions"]["by_config"], graphs[0]["seconds"].get("passes")
        wanted = by_config and {str(name): int(count) for name, count in by_config.items()}
        return Told(runs, wanted, seconds=None if seconds is None else float(seconds))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoInspection(str(path), reason=f"{type(error).__name__}: {error}") from error
