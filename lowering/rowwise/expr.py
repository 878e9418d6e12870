"""Expressions: what one element of a tensor is, for one row and one column. The generator's only program.

A tensor of the body is an array of expressions over its small axes; the row axis and the wide axis are never spelled
out. An expression says whether it varies with the row and with the column, so each becomes one variable of the
kernel: a number a row ([ROWS, 1]) or a tile ([ROWS, BLOCK]). Three leave that pattern: a `total` folds the wide axis;
a `project` is a row times a weight matrix, a vector of totals; a `pick` is one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

SUMS = ("total", "project")  # fold the wide axis: their readers wait for all of the row


@dataclass(frozen=True, eq=False)
class Expr:
    """`op` over `args`. `data` is what the op needs besides: see Builder. `name` is the body's node, for the reader."""

    op: str
    args: tuple[Expr, ...]
    dtype: torch.dtype
    row: bool
    wide: bool
    name: str
    data: tuple[object, ...] = ()
    lanes: frozenset[Any] = frozenset()  # axes of its tile, where rows are held whole (held/index.py)


class Builder:
    """Makes expressions, each once: asking twice for the same gives the same. `name` labels those made from here on."""

    def __init__(self) -> None:
        self.name = ""
        self.order: list[Expr] = []
        self._seen: dict[tuple[object, ...], Expr] = {}

    def make(
        self,
        op: str,
        args: tuple[Expr, ...],
        dtype: torch.dtype,
        *data: object,
        lanes: frozenset[Any] | None = None,
        **varies: bool,
    ) -> Expr:
        key = (op, *map(id, args), dtype, *map(repr, data))  # by repr, since 0.0 == -0.0
        if key not in self._seen:
            row = varies.get("row", any(arg.row for arg in args))
            wide = varies.get("wide", any(arg.wide for arg in args))
            lanes = frozenset[Any]().union(*(arg.lanes for arg in args)) if lanes is None else lanes
            self._seen[key] = Expr(op, args, dtype, row, wide, self.name, data, lanes)
            self.order.append(self._seen[key])
        return self._seen[key]

    def const(self, value: float, dtype: torch.dtype = torch.float32) -> Expr:
        return self.make("const", (), dtype, value)

    def load(self, source: int, dtype: torch.dtype, row: int, offset: int, column: int) -> Expr:
        """Element at row * `row` + `offset` + column * `column` of input number `source`."""
        return self.make("load", (), dtype, source, row, offset, column, row=row > 0, wide=column > 0)

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        """A rounding point. Only a cast that loses nothing, undone at once, disappears."""
        if x.dtype == dtype:
            return x
        if x.op == "cast" and x.args[0].dtype == dtype and widens(dtype, x.dtype):
            return x.args[0]
        return self.make("cast", (x,), dtype)

    def apply(self, op: str, *args: Expr, dtype: torch.dtype = torch.float32) -> Expr:
        """An elementwise op, computed in fp32 (comparisons and selections aside)."""
        return self.make(op, args, dtype)

    def fold(self, op: str, items: list[Expr]) -> Expr:
        """Items combined in pairs, the pairs in pairs; sums are one expression until `fuse` knows what else reads the
        items."""
        if op == "add" and len(items) > 1:
            return self.make("sum", tuple(items), torch.float32)
        while len(items) > 1:
            items = [self.apply(op, *items[i : i + 2]) for i in range(0, len(items) - 1, 2)] + items[
                len(items) // 2 * 2 :
            ]
        return items[0]

    def total(self, op: str, x: Expr, width: int) -> Expr:
        """`x` folded over the wide axis by add, maximum or minimum."""
        if x.wide:
            return self.make("total", (x,), torch.float32, op, wide=False)
        return self.apply("mul", x, self.const(float(width))) if op == "add" else x

    def project(self, xs: tuple[Expr, ...], weights: Weights) -> list[Expr]:
        """One dot product an output: sum over `xs` and the wide axis of xs[s] * weights[n, s]."""
        vector = self.make("project", xs, torch.float32, weights, wide=False)
        return [self.make("pick", (vector,), torch.float32, n) for n in range(weights.outputs)]


@dataclass(frozen=True)
class Weights:
    """A weight matrix as the body lays it out: element (n, s, column) is at n * stride + offsets[s] + column * its
    number."""

    source: int
    dtype: torch.dtype
    outputs: int
    stride: int
    offsets: tuple[int, ...]
    column: int


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    return (wide == torch.float32 and narrow in (torch.bfloat16, torch.float16)) or narrow == torch.bool


def reachable(roots: Iterable[Expr], order: list[Expr]) -> list[Expr]:
    """What `roots` need, themselves included, in `order`."""
    need: set[Expr] = set()
    stack = list(roots)
    while stack:
        expr = stack.pop()
        if expr not in need:
            need.add(expr)
            stack.extend(expr.args)
    return [expr for expr in order if expr in need]


def uses(order: list[Expr], roots: Iterable[Expr]) -> Counter[Expr]:
    """How often each is read, being an output counted."""
    return Counter(arg for expr in order for arg in expr.args) + Counter(roots)
