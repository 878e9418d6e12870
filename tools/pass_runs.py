"""pass_runs: what every pass did, to a preset that is captured now or in a file written before.

    runs_of(arguments)      --preset NAME [--layers N], or --run FILE from `v41 inspect --json` or `v41 generate --json`
    pass_named(runs, NAME)  the run of one pass; UnknownPass lists those that there are

A file is judged as it is read: NoInspection says what is missing or wrong in it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from v41.errors import NoInspection, UnknownPass
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.pipeline import PIPELINE
from v41.regions import Region
from v41.report import Change, Decision, PassRun, collect
from v41.tools.inspect import Inspection, capture, first_layers

WIDTH = 120


def console_of(arguments: Namespace) -> Console:
    """Where tables go; beside JSON, stdout is for that alone. Wide enough that piped lines are whole."""
    console = Console(stderr=arguments.json)
    console.width = max(console.width, WIDTH)
    return console


def runs_of(arguments: Namespace, console: Console, *, changes: bool = False) -> list[PassRun]:
    """The passes of the preset or file that `arguments` name; with what they changed, where `changes`."""
    if arguments.run is not None:
        runs = saved_runs(arguments.run)
        pass_named(runs, getattr(arguments, "name", None))
        return runs
    pass_named([PassRun(each.name, [], 0, 0, 0.0) for each in PIPELINE], getattr(arguments, "name", None))
    with console.status("capture"):
        return captured(arguments, changes=changes).report.passes


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


def saved_runs(path: Path) -> list[PassRun]:
    """The passes in a file that `v41 inspect --json` or `v41 generate --json` wrote."""
    try:
        saved = json.loads(path.read_text())
        graphs = [saved["graph"]] if "graph" in saved else saved["graphs"]
        if len(graphs) != 1:
            raise ValueError(f"{len(graphs)} graphs, where one is needed")
        return [run_from(values) for values in graphs[0]["passes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoInspection(str(path), reason=f"{type(error).__name__}: {error}") from error


def run_from(values: dict[str, Any]) -> PassRun:
    """What report_view.pass_values said. KeyError, TypeError or ValueError where it cannot have."""
    told = {field.name: values[field.name] for field in fields(PassRun) if field.repr}
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
