"""sums: the totals of one phase, packed into as few vectors as their kinds allow, [width, ROWS] each.

A projection fills the first slots of its vector, single totals of the same kind the spare ones behind, so that a
chunk's totals travel as one store and one load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from v41.lowering.rowwise.expr import Expr, Weights

START = {"add": 0.0, "maximum": float("-inf"), "minimum": float("inf")}
COMBINE = {
    "add": "{a} + {b}",
    "maximum": "maximum_or_nan({a}, {b})",
    "minimum": "minimum_or_nan({a}, {b})",
}


@dataclass(eq=False)
class Sums:
    """One vector of totals of kind `op`, called `name`."""

    name: str
    op: str
    project: Expr | None = None
    slots: dict[int, Expr] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        if self.project is None:
            return 0
        weights = self.project.data[0]
        assert isinstance(weights, Weights)
        return weights.outputs

    @property
    def width(self) -> int:
        least = 8 if self.project is not None else 1
        return max(least, 1 << (self.outputs + len(self.slots) - 1).bit_length())

    @property
    def start(self) -> float:
        return START[self.op]

    def add(self, a: str, b: str) -> str:
        return COMBINE[self.op].format(a=a, b=b)


def group_sums(sums: list[Expr], phase: int) -> list[Sums]:
    """The vectors that hold `sums`."""
    groups: list[Sums] = []
    for expr in (expr for expr in sums if expr.op == "project"):
        groups.append(Sums(f"sums_{phase}_{len(groups)}", "add", expr))
    for expr in (expr for expr in sums if expr.op == "total"):
        op = str(expr.data[0])
        group = next((group for group in groups if group.op == op), None)
        if group is None:
            groups.append(group := Sums(f"sums_{phase}_{len(groups)}", op))
        group.slots[group.outputs + len(group.slots)] = expr
    return groups
