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
from v41.tools.inspect import capture, first_layers
from v41.tools.json_output import print_json
from v41.tools.measured_schedule import Measured, measured_schedule
from v41.tools.planned_step import step_of
from v41.tools.timeline import length, schedule, schedule_table, trace


def timeline_command(arguments: Namespace) -> int:
    """Prints the schedule; with --trace it writes one that Perfetto shows."""
    config = V41Config.preset(arguments.preset)
    config = first_layers(config, arguments.layers) if arguments.layers else config
    how = {"rows": arguments.rows, "file": arguments.trace, "as_json": arguments.json}
    if arguments.measure:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return show(*measured(config, arguments.rows, arguments.context, device), **how)
    plan = capture(lambda: V41ForCausalLM(config)).plan
    return show(plan, *assign_streams(plan, (arguments.rows,)), None, **how)


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
    times = Times(plan.sizes)
    slots, alone = (
        schedule(each, {piece.name: times.piece(piece).us(rows) for piece in each.pieces}) for each in (made, plan)
    )
    facts: dict[str, Any] = {
        "rows": rows, "one_stream_us": round(length(plan, alone), 1), "side_streams_us": round(length(made, slots), 1),
        "events": len(made.events), "sites": len(decisions), "applied": sum(each.applied for each in decisions),
    }  # fmt: skip
    if ran is not None:
        facts |= {"measured_us": round(max((slot.end for slot in ran.slots), default=0.0), 1), "host_ahead": ran.ahead}
    measured = None if ran is None else ran.slots
    if file is not None:
        file.write_text(json.dumps(trace(made, slots, measured)))
    if as_json:
        told = {} if measured is None else {"measured": [asdict(slot) for slot in measured]}
        print_json("timeline", facts | {"pieces": [asdict(slot) for slot in slots], **told})
        return 0
    console = Console(width=160)
    console.print(schedule_table(slots, measured))
    print(f"{rows} rows, predicted: {facts['one_stream_us']} us on one stream, {facts['side_streams_us']} us with side "
          f"streams; {facts['applied']} of {facts['sites']} sites, {facts['events']} events")  # fmt: skip
    if ran is not None:
        late = "" if ran.ahead else "; the host was not ahead of the device, so some of it is the host's time"
        print(f"measured: {facts['measured_us']} us{late}")
    return 0
