"""`v41 timeline`: the schedule of a decode step, one stream against several: predicted, without weights or a GPU.

--measure runs the step, with random weights, on a GPU if there is one, and shows beside it when each piece ran.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.overlap import lanes_of
from v41.passes.analysis.times import Times
from v41.passes.assign_streams import assign_streams
from v41.plan import Plan
from v41.report import Decision
from v41.tools.bench.program_cases import prepare
from v41.tools.inspect import first_layers
from v41.tools.json_output import print_json
from v41.tools.measured_schedule import Measured, measured_schedule
from v41.tools.pass_runs import console_of
from v41.tools.planned_step import step_of
from v41.tools.progress import progress
from v41.tools.run_folder import write_whole
from v41.tools.sources import inspected, model_named
from v41.tools.tables import say
from v41.tools.timeline import length, schedule, schedule_table, trace


def timeline_command(arguments: Namespace) -> int:
    """Prints the schedule; with --trace it writes one that Perfetto shows."""
    console, rows = console_of(arguments), arguments.rows
    how = {"rows": rows, "file": arguments.trace, "as_json": arguments.json}
    if arguments.measure:
        config = V41Config.preset(arguments.model)
        config = first_layers(config, arguments.layers) if arguments.layers else config
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with progress() as bars:
            bars.begin("compile, run")
            found = measured(config, rows, arguments.context, device)
        return show(console, *found, **how)
    model = model_named(arguments.model, arguments.layers, arguments.ranks)
    plan = inspected(model, arguments.codegen).plan
    with progress() as bars:
        bars.begin("assign streams")
        made, decisions = assign_streams(plan, (rows,))
    return show(console, plan, made, decisions, None, **how)


@torch.no_grad()
def measured(config: V41Config, rows: int, context: int, device: str) -> tuple[Plan, Plan, list[Decision], Measured]:
    """The plan of a decode step, that with side streams which is used (or the same), decisions, and how that ran."""
    model = V41ForCausalLM.random(config, 0, device).eval().requires_grad_(False)
    (case,) = prepare(model, [rows], [], context)
    step, report = step_of(model, case.batch, case.cache, [rows])
    made = step.sides_at(rows) or step.plan
    decisions = [each for run in report.passes if run.name == "assign_streams" for each in run.decisions]
    return step.plan, made, decisions, measured_schedule(step, made, lanes_of(step.device))


def show(
    console: Console,
    plan: Plan,
    made: Plan,
    decisions: list[Decision],
    ran: Measured | None,
    *,
    rows: int,
    file: Path | None,
    as_json: bool,
) -> int:
    """made: the plan with side streams. ran: how it was measured to run, if it was."""
    reckoned = Times(plan.sizes)
    slots, alone = (
        schedule(each, {piece.name: reckoned.piece(piece).us(rows) for piece in each.pieces}) for each in (made, plan)
    )
    facts: dict[str, Any] = {
        "rows": rows, "one_stream_us": round(length(plan, alone), 1), "side_streams_us": round(length(made, slots), 1),
        "events": len(made.events), "sites": len(decisions), "applied": sum(each.applied for each in decisions),
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
    sites = f"{facts['applied']} of {facts['sites']} sites, {facts['events']} events"
    say(console, f"{rows} rows, predicted: {times}; {sites}")
    if ran is not None:
        late = "" if ran.ahead else "; the host was not ahead of the device, so some of it is the host's time"
        say(console, f"measured: {facts['measured_us']} us{late}")
    return 0
