"""sections: in front of which pass a number is computed: as late as its first reader allows.

    phase 0 loads a, b, c; its pass reads a; phase 1 reads b; c is only stored      a 0, b 1, c 1

So a program that does not finish a row neither loads nor computes what only the finish needs.
"""

from __future__ import annotations

from v41.lowering.rowwise.expr import Expr
from v41.lowering.rowwise.phases import Phases


def sections(phases: Phases) -> dict[Expr, int]:
    """Number -> the phase in front of whose pass it is computed."""
    last = max(len(phases.each) - 1, 1) if phases.program.axes.width else 0
    found: dict[Expr, int] = {}

    def needed(expr: Expr, at: int) -> None:
        found[expr] = min(found.get(expr, at), at)

    for index, phase in enumerate(phases.each):
        for tile in (*phase.tiles, *phase.sums, *(tile for tile, _ in phase.stores)):
            for arg in (tile, *tile.args):
                if not arg.wide:
                    needed(arg, index)
        for expr, _ in phase.number_stores:
            needed(expr, max(index, min(last, 1)))
    for expr in reversed([expr for phase in phases.each for expr in phase.numbers]):
        for arg in expr.args:
            if not arg.wide:
                needed(arg, found.get(expr, last))
    return phases.depth | found
