"""`v41 inspect`: every layer of a model with its role, regions and refusals, then what the passes did and took.

    layer  role            regions                                            pieces  beside
    0      window          mhc_boundary entry #1, mhc_boundary seam #2             4       2
    1      window, Engram  mhc_boundary seam #2, mhc_boundary seam #2, mhc_post #3       6       3
    #1     mhc_boundary  streams=4 hidden=5120 ...  in layers 0              one line for each set of attributes
    refused  in layer 23: "the carried pre comes from an earlier boundary", broken by one_hot
             model_def/model.py:97  A = one_hot(0, S).expand(T, S)

Regions stand in the layer whose parameters they read, or else in whose module they are; so the boundary between two
sublayers stands with the one that it leads into. A piece may hold work of several layers: it counts to the one that
most of its nodes come from. Outside of layers is what is made ready for all of them, and what follows the last. Beside:
how many have work that a decode step of one row does on a side stream (streams_view.py), unless they are off. With
--against it prints what differs from a run, or an inspection, saved before.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from v41.errors import NoInspection, UnusedOption
from v41.regions import Region
from v41.tools.expected import regions_found, regions_table
from v41.tools.files import check_file, write_whole
from v41.tools.graph_export import dot, model_explorer
from v41.tools.html_page import page
from v41.tools.inspect import LayerView, role
from v41.tools.inspect_changes import LayerValues, changes
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, told_by
from v41.tools.plan_view import artifacts_table
from v41.tools.report_view import show
from v41.tools.run import Run
from v41.tools.run_folder import MAIN, layer_values, run_values
from v41.tools.sources import run_named
from v41.tools.streams_view import beside_by_layer, streams_table, streams_values, used
from v41.tools.tables import add, counted, say, table

STREAMS = 'as captured on a GPU, unless overlap="off"; times are predicted, of the most of these rows'


def inspect_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    check_options(arguments)
    saved = saved_layers(arguments.against) if arguments.against else None
    run = run_named(arguments, changes=arguments.changes or arguments.html is not None)
    export(arguments, run)
    if arguments.json:
        print_json("inspect", values(run, changes=arguments.changes))
    elif saved is None:
        show_inspection(console, run)
    differs = saved is not None and show_changes(console, saved, layer_values(run))
    return int(differs or (arguments.strict and told_by(run).troubled))


def check_options(arguments: Namespace) -> None:
    """Before anything is captured: UnusedOption for what would change nothing, FileNotWritten for what cannot be."""
    if arguments.of is not None and arguments.dot is None and arguments.model_explorer is None:
        raise UnusedOption("v41 inspect", option="--of", reason="it says what --dot or --model-explorer draw")
    if arguments.changes and not arguments.json:
        raise UnusedOption("v41 inspect", option="--changes", reason="it adds to what --json prints")
    for path in (arguments.html, arguments.dot, arguments.model_explorer):
        check_file(path)


def export(arguments: Namespace, run: Run) -> None:
    """Writes the files that were asked for, each whole or not at all."""
    made: dict[str, Callable[[], str]] = {
        "html": lambda: page(run),
        "dot": lambda: dot(run, arguments.of),
        "model_explorer": lambda: json.dumps(model_explorer(run, arguments.of), indent=1),
    }
    for name, text in made.items():
        path = getattr(arguments, name)
        if path is not None:
            write_whole(path, text())
            Console(stderr=True).print(Text(f"written  {path}"), soft_wrap=True)


def show_changes(console: Console, before: list[LayerValues], now: list[LayerValues]) -> bool:
    """Prints what differs, and whether something does."""
    found = changes(before, now)
    for layer, text in found:
        say(console, f"layer {'-' if layer is None else layer:<3} {text}")
    if not found:
        console.print("nothing differs")
    return bool(found)


def saved_layers(path: Path) -> list[LayerValues]:
    """The layers in a folder of `v41 capture`, or in a file that `v41 inspect --json` wrote."""
    try:
        file = path / MAIN if path.is_dir() else path
        saved: list[LayerValues] = json.loads(file.read_text())["layers"]
        if changes(saved, saved) or not all(isinstance(each["layer"], int | None) for each in saved):
            raise ValueError("a layer is not what `v41 inspect --json` writes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoInspection(str(path), reason=f"{type(error).__name__}: {error}") from error
    return saved


def show_inspection(console: Console, run: Run) -> None:
    views, numbers, plans = run.layers, numbered(run.layers), used(run.predicted)
    beside = beside_by_layer(run, plans)
    by_layer = table("layer", "role", "regions", "pieces", "beside", left=3)
    for view in views:
        found = ", ".join(f"{region.name} #{numbers[text_of(region)]}" for region in view.regions)
        counts = len(view.pieces), beside[view.layer] or None
        add(by_layer, view.layer, role_told(run, view.layer), found or None, *counts)
    console.print(by_layer)
    console.print()
    for text, number in numbers.items():
        sites = [(view.layer, region) for view in views for region in view.regions if text_of(region) == text]
        where = ", ".join(dict.fromkeys("-" if layer is None else str(layer) for layer, _ in sites))
        say(console, f"#{number:<5} {brief(sites[0][1])}")
        say(console, f"       {counted(len(sites), 'site')}, in layers {where}")
    for line in refusals(views):
        say(console, line, "yellow")
    console.print()
    console.print(artifacts_table(run.plan))
    console.print()
    if (made := streams_table(plans)) is not None:
        console.print(made)
        say(console, f"streams   {STREAMS}")
        console.print()
    show(console, [run.report])
    console.print()
    console.print(regions_table(regions_found(run.report.passes), run.by_config))
    console.print()
    more = {name: value for name, value in run.seconds.items() if name not in run.report.seconds}
    phases = table(*(f"{name} s" for name in more), "cpu s", "peak MiB", left=0)
    times = [f"{value:.1f}" for value in (*more.values(), run.cpu_seconds)]
    add(phases, *times, round(run.peak_mib))
    console.print(phases)


def role_told(run: Run, layer: int | None) -> str | None:
    if layer is None:
        return "outside of layers"
    return role(run.config, layer) if run.config is not None else None


def numbered(views: list[LayerView]) -> dict[str, int]:
    """Each set of attributes that a region has, numbered as they appear."""
    found = dict.fromkeys(text_of(region) for view in views for region in view.regions)
    return {text: number for number, text in enumerate(found, 1)}


def brief(region: Region) -> str:
    """Kind and attributes without how the call is laid out: that follows from the outputs."""
    left_out = ("operands", "critical", "coefficients", "form")
    facts = (f"{name}={spelled(value)}" for name, value in region.attrs.items() if name not in left_out)
    return "  ".join((region.name, " ".join(facts)))


def spelled(value: object) -> str:
    """Without the spaces and quotes of Python."""
    if isinstance(value, dict):
        return ",".join(f"{name}:{spelled(each)}" for name, each in value.items())
    return ",".join(map(spelled, value)) if isinstance(value, (tuple, list)) else str(value)


def text_of(region: Region) -> str:
    """Equal for regions of equal kind and attributes."""
    return f"{region.kind} {sorted(region.attrs.items())}"


def refusals(views: list[LayerView]) -> list[str]:
    lines = []
    for view in views:
        where = "outside of layers" if view.layer is None else f"in layer {view.layer}"
        for decision in view.refused:
            lines.append(f'refused  {where}: "{decision.rule}", broken by {decision.culprit}')
            lines.append(f"         {decision.source}")
    return lines


def values(run: Run, *, changes: bool = False) -> dict[str, Any]:
    """The same facts as values json can write; with what each pass changed, where that was kept and is asked for."""
    told = run_values(run) | {"plan": json.loads(run.plan.to_json()), "streams": streams_values(used(run.predicted))}
    if changes and run.changes is not None:
        for each in told["graph"]["passes"]:
            each["changes"] = [asdict(change) for change in run.changes.get(each["name"], [])]
    return {name: value for name, value in told.items() if name != "schema"}
