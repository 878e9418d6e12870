"""`v41 inspect`: every layer of a preset with its role, regions and refusals, then what the passes did and took.

    layer  role            regions                                                           pieces
    0      window          mhc_boundary entry #1, mhc_boundary seam #2                            4
    1      window, Engram  mhc_boundary seam #2, mhc_boundary seam #2, mhc_post #3                6
    #1     mhc_boundary  streams=4 hidden=5120 ...  in layers 0              one line for each set of attributes
    refused  in layer 23: "the carried pre comes from an earlier boundary", broken by one_hot
             model_def/model.py:97  A = one_hot(0, S).expand(T, S)

With --against it prints what differs from an inspection saved before.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from v41.errors import NoInspection
from v41.regions import Region
from v41.tools.expected import regions_expected, regions_found, regions_table, regions_values
from v41.tools.inspect import Inspection, LayerView, layers, role
from v41.tools.inspect_changes import LayerValues, changes
from v41.tools.pass_runs import captured, console_of, told_by
from v41.tools.plan_view import artifacts_table
from v41.tools.report_view import as_json, show
from v41.tools.tables import add, table


def inspect_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    saved = saved_layers(arguments.against) if arguments.against else None
    with console.status("capture"):
        inspection = captured(arguments, changes=arguments.changes)
    told = values(inspection)
    if arguments.json:
        print(json.dumps(told, indent=1))
    elif saved is None:
        show_inspection(console, inspection)
    differs = saved is not None and show_changes(console, saved, told["layers"])
    return int(differs or (arguments.strict and told_by(inspection).troubled))


def show_changes(console: Console, before: list[LayerValues], now: list[LayerValues]) -> bool:
    """Prints what differs, and whether something does."""
    found = changes(before, now)
    for layer, text in found:
        console.print(Text(f"layer {'-' if layer is None else layer:<3} {text}"), soft_wrap=True)
    if not found:
        console.print("nothing differs")
    return bool(found)


def saved_layers(path: Path) -> list[LayerValues]:
    """The layers in a file that `v41 inspect --json` wrote."""
    try:
        saved: list[LayerValues] = json.loads(path.read_text())["layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoInspection(str(path), reason=f"{type(error).__name__}: {error}") from error
    return saved


def show_inspection(console: Console, inspection: Inspection) -> None:
    views, numbers = layers(inspection), numbered(inspection)
    by_layer = table("layer", "role", "regions", "pieces", left=3)
    for view in views:
        found = ", ".join(f"{region.name} #{numbers[text_of(region)]}" for region in view.regions)
        what = role(inspection.config, view.layer) if view.layer is not None else "before the first and after the last"
        add(by_layer, view.layer, what, found or None, len(view.pieces))
    console.print(by_layer)
    console.print()
    for text, number in numbers.items():
        sites = [(view.layer, region) for view in views for region in view.regions if text_of(region) == text]
        where = ", ".join(dict.fromkeys("-" if layer is None else str(layer) for layer, _ in sites))
        console.print(Text(f"#{number:<5} {brief(sites[0][1])}"), soft_wrap=True)
        console.print(Text(f"       {len(sites)} site{'s' * (len(sites) > 1)}, in layers {where}"), soft_wrap=True)
    for line in refusals(views):
        console.print(Text(line, "yellow"), soft_wrap=True)
    console.print()
    console.print(artifacts_table(inspection.plan))
    console.print()
    show(console, [inspection.report])
    console.print()
    console.print(regions_table(regions_found(inspection.report.passes), regions_expected(inspection.config)))
    console.print()
    phases = table(*inspection.seconds, "cpu total", "peak MiB", left=0)
    times = [f"{value:.1f}" for value in (*inspection.seconds.values(), inspection.cpu_seconds)]
    add(phases, *times, round(inspection.peak_mib))
    console.print(phases)


def numbered(inspection: Inspection) -> dict[str, int]:
    """Each set of attributes that a region has, numbered as they appear."""
    found = dict.fromkeys(text_of(region) for view in layers(inspection) for region in view.regions)
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


def values(inspection: Inspection) -> dict[str, Any]:
    """The same facts as values json can write."""
    return {
        "layers": [
            {
                "layer": view.layer,
                "role": role(inspection.config, view.layer) if view.layer is not None else None,
                "pieces": [{"name": piece.name, "key": piece.key, "nodes": piece.nodes} for piece in view.pieces],
                "regions": [
                    {"kind": region.kind, "attrs": {name: str(value) for name, value in region.attrs.items()}}
                    for region in view.regions
                ],
                "refused": [
                    {"node": d.node, "rule": d.rule, "culprit": d.culprit, "source": d.source} for d in view.refused
                ],
            }
            for view in layers(inspection)
        ],
        "regions": regions_values(inspection.report.passes, inspection.config),
        "graph": as_json([inspection.report])[0],
        "plan": json.loads(inspection.plan.to_json()),
        "seconds": inspection.seconds,
        "cpu_seconds": inspection.cpu_seconds,
        "peak_mib": inspection.peak_mib,
    }
