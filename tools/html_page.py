"""html_page: a run as one page that needs nothing else: no network, no server, no other file.

    passes, with a slider: sizes and changes before and after each      layers that open and close
    the body of each kind of region, drawn      a timeline of least times      a decode step's streams, side by side
    what lives between pieces

page.html is the template; all text is escaped there, and its policy lets a browser load nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from v41.formulas import evaluate
from v41.report import PassRun
from v41.tools.diff_command import lines
from v41.tools.drawing import MOST, drawing
from v41.tools.gpus import GPUS
from v41.tools.graph_export import edges, unique
from v41.tools.inspect import LayerView, role
from v41.tools.memory_command import curve_lines, memory_of
from v41.tools.nodes import OTHERS, PRODUCTS
from v41.tools.report_view import remarks
from v41.tools.run import Run
from v41.tools.steps import Step, step_of_rows
from v41.tools.tables import short
from v41.tools.timeline import length, schedule

ROWS, LISTED, GPU = 16, 400, GPUS["H200"]


def page(run: Run, rows: int = ROWS) -> str:
    """The whole page, for a step of `rows`."""
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=here, autoescape=True, undefined=StrictUndefined)
    step = step_of_rows(run.plan, run.config, rows)
    made = bars(run, step)
    told = list(curve_lines(run.plan, memory_of(run.plan, step))) or ["nothing lives between pieces"]
    curve, _, peak = told[0].partition("  ")
    return environment.get_template("page.html").render(
        run=run,
        keys=len(run.plan.keys),
        regions=run.report.passes[-1].regions_after if run.report.passes else 0,
        passes=[pass_facts(run, each) for each in run.report.passes],
        layers=[layer_facts(run, view) for view in run.layers],
        drawings=drawings(run),
        step=str(step),
        gpu=GPU,
        bars=made,
        total=sum(bar["weight"] for bar in made),
        streams=lanes(run, rows),
        rows=rows,
        curve=curve,
        peak=peak,
    )


def pass_facts(run: Run, each: PassRun) -> dict[str, Any]:
    changes = (run.changes or {}).get(each.name) or []
    told = [line for _, line in lines(changes, everything=False)]
    more = [f"... and {len(told) - LISTED} more lines: v41 diff {each.name}"] if len(told) > LISTED else []
    sizes = [(name, getattr(each, f"{name}_before"), getattr(each, f"{name}_after"))
             for name in ("nodes", "regions", "launches")]  # fmt: skip
    return {
        "name": each.name,
        "applied": each.applied,
        "refused": each.refused,
        "milliseconds": each.milliseconds,
        "failure": each.failure,
        "sizes": sizes,
        "changes": told[:LISTED] + more,
        "refusals": [line for line in remarks([each]) if line.startswith("refused")],
    }


def layer_facts(run: Run, view: LayerView) -> dict[str, Any]:
    at, config = view.layer, run.config
    return {
        "title": f"layer {at}" if at is not None else "outside of layers",
        "role": role(config, at) if at is not None and config is not None else "",
        "regions": [{"name": region.name, "attrs": region.attrs} for region in view.regions],
        "pieces": [
            {"name": p.name, "border": p.border, "sizes": ", ".join(run.plan.names_of(p)), "nodes": p.nodes,
             "key": p.key[:8]} for p in view.pieces
        ],
    }  # fmt: skip


def drawings(run: Run) -> list[dict[str, str]]:
    """The first body of each kind of region."""
    nodes = unique(run.nodes)
    found, seen = [], set[str]()
    for call in nodes:
        if not call.text.startswith("region ") or call.region is None or call.region in seen:
            continue
        seen.add(call.region)
        body = call.text.removeprefix("region ").partition("(")[0]
        inside = [node for node in nodes if node.body == body]
        more = f", the first {MOST} of {len(inside)} nodes" if len(inside) > MOST else ""
        found.append({"title": f"{call.region}: {body}{more}", "svg": drawing(inside, edges(inside))})
    return found


def lanes(run: Run, rows: int) -> list[list[dict[str, Any]]]:
    """For each stream of a decode step of `rows` its pieces: from where to where of 1000 parts, as predicted."""
    found = run.predicted
    plan = found.at(rows)
    slots = schedule(plan, found.us(plan, rows))
    whole = length(plan, slots) or 1.0
    streams = sorted({slot.stream for slot in slots})
    return [
        [
            {"title": f"{slot.name}: {slot.border}, {short(slot.end - slot.start)} µs from {short(slot.start)}",
             "from": 1000 * slot.start / whole, "for": 1000 * (slot.end - slot.start) / whole}
            for slot in slots if slot.stream == stream
        ]
        for stream in streams
    ]  # fmt: skip


def bars(run: Run, step: Step) -> list[dict[str, Any]]:
    """The work of each layer by kind: the least µs that it takes, and as how many of 1000 parts it is drawn."""
    found: dict[tuple[int | None, str], float] = {}
    for work in run.work:
        moved = evaluate(work.read, step.symbols) + evaluate(work.written, step.symbols)
        flops = evaluate(work.flops, step.symbols) if work.flops is not None else 0
        least = work.count * GPU.seconds(moved, flops) * 1e6
        found[work.layer, work.kind] = found.get((work.layer, work.kind), 0.0) + least
    total = sum(found.values()) or 1.0
    return [
        {"title": f"{f'layer {layer}' if layer is not None else 'ends'}: {kind}, {short(least)} µs", "weight": least,
         "share": 1000 * least / total, "region": kind not in (PRODUCTS, OTHERS)}
        for (layer, kind), least in found.items()
    ]  # fmt: skip
