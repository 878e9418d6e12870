"""`v41 partition`: the pieces of a plan in order, why each begins where it does, and what crosses its border.

    piece    layer  artifact  nodes  sizes           capture  in  out  begins
    piece_0      -  81d16e19     33  rows, requests  yes       3    2  checks of sizes
    piece_4      0  f09f7f0f      7  rows            yes      12    5  region mhc_boundary
    ...
    pieces begin at          pieces        why, counted
    rows   rungs ...                       what rounding sizes up costs

A piece is compiled, captured and called as one; those of one artifact do equal work and share one compilation. `in` and
`out` are values that it reads from before and hands on. On several streams, `stream` and what waits for what are shown.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from v41.plan import Plan
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, told_by
from v41.tools.plan_view import borders, borders_table, rounding_table, rounding_values
from v41.tools.run import Run
from v41.tools.sources import run_named
from v41.tools.tables import add, counted, say, table


def partition_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    run = run_named(arguments)
    if arguments.json:
        facts = {"source": run.source, "layers": run.layer_of, "borders": borders(run.plan)}
        print_json("partition", facts | {"rounding": rounding_values(run.plan), "plan": json.loads(run.plan.to_json())})
    else:
        show(console, run)
    return int(arguments.strict and (told_by(run).troubled or any(piece.uncapturable for piece in run.plan.pieces)))


def show(console: Console, run: Run) -> None:
    console.print(pieces_table(run))
    for line in remarks(run.plan):
        say(console, line)
    for made in (borders_table(run.plan), rounding_table(run.plan)):
        if made is not None:
            console.print()
            console.print(made)


def pieces_table(run: Run) -> Table:
    plan = run.plan
    several = any(piece.stream for piece in plan.pieces)
    heads = ["piece", *["stream"] * several, "layer", "artifact", "sizes", "capture", "begins", "nodes", "in", "out"]
    made = table(*heads, left=len(heads) - 3)
    for piece in plan.pieces:
        sizes = ", ".join(plan.names_of(piece)) or None
        made_before = [name for name in piece.reads if name not in plan.inputs]
        add(made, piece.name, *[piece.stream] * several, run.layer_of.get(piece.name), piece.key[:8], sizes,
            piece.uncapturable or "yes", piece.border, piece.nodes, len(made_before), len(piece.returns))  # fmt: skip
    return made


def remarks(plan: Plan) -> Iterator[str]:
    counts = {"piece": len(plan.pieces), "artifact": len(plan.keys), "node": sum(piece.nodes for piece in plan.pieces)}
    yield ", ".join(counted(count, thing) for thing, count in counts.items())
    yield from (f"{event.before} waits for {event.after}" for event in plan.events)
