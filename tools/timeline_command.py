"""`v41 timeline`: the schedule of a decode step, one stream against several: predicted, without weights or a GPU.

--measure runs the step, a preset with random weights, on a GPU if there is one, and shows when each piece ran.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from v41.errors import PresetsAlone, UnusedOption
from v41.model_def.buckets import Buckets
from v41.model_def.config import PRESETS, V41Config
from v41.overlap import ROWS, lanes_of
from v41.plan import Plan
from v41.tools.bench.program_cases import prepare
from v41.tools.drawn_model import drawn_model
from v41.tools.files import check_file, write_whole
from v41.tools.inspect import first_layers
from v41.tools.json_output import print_json
from v41.tools.measured_schedule import Measured, measured_schedule
from v41.tools.pass_runs import console_of, told_by
from v41.tools.planned_step import step_of
from v41.tools.predicted import Predicted, with_times
from v41.tools.progress import progress
from v41.tools.run_folder import load
from v41.tools.sources import is_run, model_named, needs_model, refuse_unused, run_named
from v41.tools.steps import check_decode
from v41.tools.tables import counted, say
from v41.tools.timeline import length, schedule, schedule_table, trace

ROWS_SHOWN, CONTEXT = 16, 512  # of a step; tokens of each request of one that is measured


def timeline_command(arguments: Namespace) -> int:
    """Prints the schedule; with --trace it writes one that Perfetto shows."""
    console, rows = console_of(arguments), arguments.rows or ROWS_SHOWN
    check_file(arguments.trace)
    how = {"rows": rows, "file": arguments.trace, "as_json": arguments.json}
    if arguments.measure:
        refuse_unused(arguments, ("codegen", "ranks", "all_reduce"), "--measure runs the step as this machine does")
        if arguments.strict:
            raise UnusedOption("v41 timeline", option="--strict", reason="it judges a capture, and --measure runs")
        check_decode("v41 timeline --rows", rows, Buckets().whole)
        config = config_to_measure(arguments)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with progress() as bars:
            bars.begin("compile, run")
            found, made, ran = measured(config, rows, arguments.context or CONTEXT, device)
        return show(console, model_named(arguments.model, arguments.layers).name, found, made, ran, **how)
    if arguments.context is not None:
        raise UnusedOption("v41 timeline", option="--context", reason="it is of the step that --measure runs")
    run = run_named(arguments)
    if ROWS not in run.plan.sizes.values():
        refuse_unused(arguments, ("rows",), f"the program has no size called {ROWS}")
    check_decode("v41 timeline --rows", rows, run.plan.whole)
    with progress() as bars:
        bars.begin("assign streams")
        found = run.predicted
    code = show(console, run.source, found, found.at(rows), None, **how)
    return code or int(arguments.strict and told_by(run).troubled)


def config_to_measure(arguments: Namespace) -> V41Config:
    """Of the preset that is to run. NeedsModel for a saved run of one, PresetsAlone for other models."""
    saved = is_run(arguments.model)
    source = load(Path(arguments.model)).source if saved else arguments.model
    folder = source not in PRESETS and os.path.isdir(source)
    if (saved and not source.startswith("preset ")) or " ranks" in source or ":" in source or folder:
        raise PresetsAlone("v41 timeline", source=source)
    if saved:
        raise needs_model(arguments.model, "--measure runs it", "v41 timeline {} --measure")
    config = V41Config.preset(arguments.model)
    return first_layers(config, arguments.layers) if arguments.layers else config


@torch.no_grad()
def measured(config: V41Config, rows: int, context: int, device: str) -> tuple[Predicted, Plan, Measured]:
    """What is predicted of a decode step, the plan of it that is used, and how that ran."""
    model = drawn_model(config, device, "v41 timeline --measure")
    (case,) = prepare(model, [rows], [], [context])
    step, report = step_of(model, case.batch, case.cache, [rows])
    made = step.sides_at(rows) or step.plan
    judged = [each for run in report.passes if run.name == "assign_streams" for each in run.decisions]
    return with_times(step.plan, judged), made, measured_schedule(step, made, lanes_of(step.device))


def show(
    console: Console,
    source: str,
    found: Predicted,
    made: Plan,
    ran: Measured | None,
    *,
    rows: int,
    file: Path | None,
    as_json: bool,
) -> int:
    """made: the plan that is used. ran: how it was measured to run, if it was."""
    plan = found.plan
    slots, alone = (schedule(each, found.us(each, rows)) for each in (made, plan))
    facts: dict[str, Any] = {
        "source": source, "rows": rows, "one_stream_us": round(length(plan, alone), 1),
        "side_streams_us": round(length(made, slots), 1), "events": len(made.events), "sites": len(found.judged),
        "applied": sum(piece.stream != 0 for piece in made.pieces),
    }  # fmt: skip
    if ran is not None:
        facts |= {"measured_us": round(max((slot.end for slot in ran.slots), default=0.0), 1), "host_ahead": ran.ahead}
    measured = None if ran is None else ran.slots
    if file is not None:
        write_whole(file, json.dumps(trace(made, slots, measured)))
    if as_json:
        told = {} if measured is None else {"measured": [asdict(slot) for slot in measured]}
        print_json("timeline", facts | {"pieces": [asdict(slot) for slot in slots], **told})
        return 0
    console.print(schedule_table(slots, measured))
    times = f"{facts['one_stream_us']} us on one stream, {facts['side_streams_us']} us with side streams"
    sites = f"{facts['applied']} of {counted(facts['sites'], 'site')}, {counted(facts['events'], 'event')}"
    step = counted(rows, "row") if ROWS in plan.sizes.values() else "every step"
    say(console, f"{step}, predicted: {times}; {sites}")
    if ran is not None:
        late = "" if ran.ahead else "; the host was not ahead of the device, so some of it is the host's time"
        say(console, f"measured: {facts['measured_us']} us{late}")
    return 0
