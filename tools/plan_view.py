"""plan_view: a Plan as tables: its artifacts with the pieces that share them, why pieces begin, what rounding up costs.

    artifact  pieces  nodes  sizes           capture  begins                       first
    6a01a2d0      77      7  rows            yes      region mhc_boundary          piece_4  model_def/mhc.py:67
    af8d9712       2    147  requests, rows  yes      use of requests, longest     piece_40
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

from rich.table import Table

from v41.passes.analysis.rounding import rounding_up
from v41.plan import Plan
from v41.tools.tables import add, table


def artifacts_table(plan: Plan) -> Table:
    """One line an artifact, in order of its first piece."""
    pieces = {piece.name: piece for piece in plan.pieces}
    made = table("artifact", "begins", "sizes", "capture", "first piece", "pieces", "nodes", left=5)
    for key, names in plan.keys.items():
        first = pieces[names[0]]
        sizes = ", ".join(plan.names_of(first)) or None
        add(made, key[:8], first.border, sizes, first.uncapturable or "yes", first.name, len(names), first.nodes)
    return made


def borders_table(plan: Plan) -> Table:
    """Why pieces begin, and how many for each reason."""
    made = table("pieces begin at", "pieces")
    for border, count in borders(plan).items():
        add(made, border, count)
    return made


def borders(plan: Plan) -> dict[str, int]:
    return dict(Counter(piece.border for piece in plan.pieces))


def rounding_table(plan: Plan) -> Table | None:
    """One line a ladder: its worst rung, and the mean over all. None where sizes have no ladders."""
    made = table("size", "rungs", "from", "to", "at most", "of", "on average", "MiB at most", left=1)
    for size, steps in groupby(rounding_up(plan), key=attrgetter("size")):
        rungs = list(steps)
        worst = max(rungs, key=attrgetter("worst_share"))
        mean = sum(rung.mean_share for rung in rungs) / len(rungs)
        most = max((rung.worst_bytes for rung in rungs if rung.worst_bytes is not None), default=None)
        add(made, size, len(rungs), rungs[0].rung, rungs[-1].rung, _percent(worst.worst_share), worst.fewest,
            _percent(mean), None if most is None else most / 2**20)  # fmt: skip
    return made if plan.buckets else None


def rounding_values(plan: Plan) -> list[dict[str, Any]]:
    """Every rung, as values json can write."""
    return [asdict(rounding) for rounding in rounding_up(plan)]


def _percent(share: float) -> str:
    return f"+{share:.0%}"
