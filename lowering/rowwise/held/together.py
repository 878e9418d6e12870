"""together: sums over the same axes that wait for nobody but loads become one reduction of several numbers.

    before   a = tl.sum(x, 2); b = tl.sum(y, 2)              each an exchange among warps, with two barriers
    after    a, b = tl.reduce((x, y), 2, add_2)              one exchange

Each number is added up as it would be alone: the layout of a tile says in which order, not what is reduced beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from v41.lowering.rowwise.expr import Expr, reachable


def beside(fold: Expr, open_: Sequence[Expr]) -> list[Expr]:
    """`fold`, and of the sums in `open_`, in the order of their making, those that can be taken with it."""
    group = [fold]
    if not _is_sum(fold):
        return group
    for other in open_:
        alike = _is_sum(other) and other is not fold and _shape(other) == _shape(fold)
        if alike and not set(reachable(other.args, list(open_))) & set(group):
            group.append(other)
    return group


def _is_sum(expr: Expr) -> bool:
    return expr.op == "fold" and expr.data[0] == "add" and expr.dtype.is_floating_point


def _shape(fold: Expr) -> tuple[object, ...]:
    (x,) = fold.args
    return fold.data, fold.dtype, x.dtype, x.lanes, x.row


def adder(count: int) -> str:
    """`add_{count}`, what such a reduction combines by."""
    a, b = ([f"{side}{i}" for i in range(count)] for side in "ab")
    sums = ", ".join(f"{x} + {y}" for x, y in zip(a, b, strict=True))
    return f"@triton.jit\ndef add_{count}({', '.join(a + b)}):\n    return {sums}\n"
