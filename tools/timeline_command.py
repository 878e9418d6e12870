"""`v41 timeline`: the predicted schedule of a decode step, one stream against several, without weights or a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.analysis.times import Times
from v41.passes.assign_streams import assign_streams
from v41.plan import Plan
from v41.tools.inspect import capture, first_layers
from v41.tools.json_output import print_json
from v41.tools.timeline import length, schedule, schedule_table, trace


def timeline_command(arguments: Namespace) -> int:
    """Prints the schedule; with --trace it writes one that Perfetto shows."""
    config = V41Config.preset(arguments.preset)
    config = first_layers(config, arguments.layers) if arguments.layers else config
    plan = capture(lambda: V41ForCausalLM(config)).plan
    return show(plan, arguments.rows, arguments.trace, as_json=arguments.json)


def show(plan: Plan, rows: int, file: Path | None, *, as_json: bool) -> int:
    made, decisions = assign_streams(plan, (rows,))
    times = Times(plan.sizes)
    slots, alone = (
        schedule(each, {piece.name: times.piece(piece).us(rows) for piece in each.pieces}) for each in (made, plan)
    )
    facts: dict[str, Any] = {
        "rows": rows, "one_stream_us": round(length(plan, alone), 1), "side_streams_us": round(length(made, slots), 1),
        "events": len(made.events), "sites": len(decisions), "applied": sum(each.applied for each in decisions),
    }  # fmt: skip
    if file is not None:
        file.write_text(json.dumps(trace(made, slots)))
    if as_json:
        print_json("timeline", facts | {"pieces": [asdict(slot) for slot in slots]})
        return 0
    console = Console(width=160)
    console.print(schedule_table(slots))
    print(f"{rows} rows, predicted: {facts['one_stream_us']} us on one stream, {facts['side_streams_us']} us with side "
          f"streams; {facts['applied']} of {facts['sites']} sites, {facts['events']} events")  # fmt: skip
    return 0
