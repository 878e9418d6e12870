"""pass_runs: what every pass did, to a preset that is captured now or in a file written before.

    told_of(arguments)      --preset NAME [--layers N], or --run FILE from `v41 inspect --json` or `v41 generate --json`
    pass_named(runs, NAME)  the run of one pass; UnknownPass lists those that there are

A file is judged as it is read: NoInspection says what is missing or wrong in it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from v41.errors import NoInspection, UnknownPass
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.pipeline import PIPELINE
from v41.regions import Region
from v41.report import Change, Decision, PassRun, collect
from v41.tools.expected import differences, regions_expected, regions_found
from v41.tools.inspect import Inspection, capture, first_layers

WIDTH = 120


@dataclass(frozen=True)
class Told:
    """What the passes did to one graph, and the regions that its config asks for, where that is known."""

    runs: list[PassRun]
    by_config: dict[str, int] | None

    @property
    def differences(self) -> list[str]:
        """The regions that there are too few of, or too many."""
        return [] if self.by_config is None else differences(regions_found(self.runs), self.by_config)

    @property
    def troubled(self) -> bool:
        return any(map(troubled, self.runs)) or bool(self.differences)


def troubled(run: PassRun) -> bool:
    """Whether a pass refused a site or failed."""
    return run.refused > 0 or run.failure is not None


def console_of(arguments: Namespace) -> Console:
    """Where tables go; beside JSON, stdout is for that alone. Wide enough that piped lines are whole."""
    console = Console(stderr=arguments.json)
    console.width = max(console.width, WIDTH)
    return console


def told_of(arguments: Namespace, console: Console, *, changes: bool = False) -> Told:
    """The passes of the preset or file that `arguments` name; with what they changed, where `changes`."""
    if arguments.run is not None:
        saved = saved_runs(arguments.run)
        pass_named(saved.runs, getattr(arguments, "name", None))
        return saved
    pass_named([PassRun(each.name, [], 0, 0, 0.0) for each in PIPELINE], getattr(arguments, "name", None))
    with console.status("capture"):
        return told_by(captured(arguments, changes=changes))


def told_by(inspection: Inspection) -> Told:
    return Told(inspection.report.passes, regions_expected(inspection.config))


def captured(arguments: Namespace, *, changes: bool = False) -> Inspection:
    """The preset of `arguments`, cut to its layers. The changes are kept in memory for as long as the result is."""
    config = V41Config.preset(arguments.preset)
    config = first_layers(config, arguments.layers or config.num_hidden_layers)
    with collect(programs=changes):
        return capture(lambda: V41ForCausalLM(config))


def pass_named(runs: Sequence[PassRun], name: str | None) -> PassRun | None:
    """The run of pass `name`; None for no name. UnknownPass where there is none of that name."""
    found = next((run for run in runs if run.name == name), None)
    if found is None and name is not None:
        raise UnknownPass("v41 PASS", name=name, known=", ".join(run.name for run in runs))
    return found


def saved_runs(path: Path) -> Told:
    """What is in a file that `v41 inspect --json` or `v41 generate --json` wrote."""
    try:
        saved = json.loads(path.read_text())
        graphs = [saved["graph"]] if "graph" in saved else saved["graphs"]
        if len(graphs) != 1:
            raise ValueError(f"{len(graphs)} graphs, where one is needed")
        runs = [run_from(values) for values in graphs[0]["passes"]]
        return Told(runs, {str(name): int(count) for name, count in saved["regions"]["by_config"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoInspection(str(path), reason=f"{type(error).__name__}: {error}") from error


def run_from(values: dict[str, Any]) -> PassRun:
    """What report_view.pass_values said. KeyError, TypeError or ValueError where it cannot have."""
    told = {field.name: values[field.name] for field in fields(PassRun) if field.repr}
    told["made"] = {_text(name): int(count) for name, count in told["made"].items()}
    told["decisions"] = [decision_from(each) for each in told["decisions"]]
    if "changes" in values:
        told["changes"] = [_made(Change, each) for each in values["changes"]]
    for name in ("nodes", "regions", "launches"):
        for end in ("before", "after"):
            told[f"{name}_{end}"] = int(told[f"{name}_{end}"])
    return PassRun(**told | {"name": _text(told["name"]), "milliseconds": float(told["milliseconds"])})


def decision_from(values: dict[str, Any]) -> Decision:
    region = values["region"] and Region(_text(values["region"]["kind"]), dict(values["region"]["attrs"]))
    made: Decision = _made(Decision, values | {"region": region})
    if not isinstance(made.applied, bool):
        raise TypeError(f"applied is {made.applied!r}")
    _text(made.source)
    return made


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """A frozen dataclass from all its fields, its node a text."""
    made = kind(**{field.name: values[field.name] for field in fields(kind)})
    _text(made.node)
    return made


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {value!r}")
    return value
