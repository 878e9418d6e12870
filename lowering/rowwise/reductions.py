"""reductions: sums, means, extremes and variances over small axes (spelled out), over the wide axis (a total), or both.

Both means: the small axes first, element by element, then one total of the wide axis. Accumulation is fp32, as in
eager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import ops

from v41.lowering.rowwise.axes import ROW, WIDE, Refused, Value, broadcast
from v41.lowering.rowwise.elementwise import divide
from v41.lowering.rowwise.expr import Expr

if TYPE_CHECKING:
    from v41.lowering.rowwise.read import Program

aten = ops.aten


def _fold(program: Program, op: str, x: Value, dims: Any, keep: bool) -> tuple[Value, int]:
    """`x` in fp32, folded by `op` over logical dimensions `dims` (None: all), and how many elements went into each
    result."""
    chosen = {dim % len(x.dims) for dim in (range(len(x.dims)) if dims is None or dims == [] else dims)}
    factors = [(factor, dim in chosen) for dim, group in enumerate(x.dims) for factor in group]
    if any(factor == ROW and folded for factor, folded in factors):
        raise Refused("folds the row axis")
    over = tuple(i for i, (_, folded) in enumerate(factors) if folded)
    wide = any(factor == WIDE and folded for factor, folded in factors)
    kept = [i for i in range(len(factors)) if i not in over]
    items = x.elements.transpose([*kept, *over]).reshape([*(x.elements.shape[i] for i in kept), -1])
    out = np.empty(items.shape[:-1], dtype=object)
    b = program.builder
    for index in np.ndindex(out.shape):
        folded = b.fold(op, [b.cast(item, torch.float32) for item in items[index]])
        out[index] = b.total(op, folded, program.axes.width) if wide else folded
    dims_left = [() if dim in chosen else group for dim, group in enumerate(x.dims) if keep or dim not in chosen]
    return Value(tuple(dims_left), out, torch.float32), items.shape[-1] * (program.axes.width if wide else 1)


def _each(x: Value, function: Any, dtype: torch.dtype) -> Value:
    out = np.empty(x.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        out[index] = function(x.elements[index])
    return Value(x.dims, out, dtype)


def _floating(meta: Any) -> torch.dtype:
    if not meta.dtype.is_floating_point:
        raise Refused(f"folds {meta.dtype}")
    return meta.dtype


def total(program: Program, meta: Any, x: Value, dims: Any = None, keep: bool = False, **_: Any) -> Value:
    value, _count = _fold(program, "add", x, dims, keep)
    return _each(value, lambda item: program.builder.cast(item, _floating(meta)), meta.dtype)


def mean(program: Program, meta: Any, x: Value, dims: Any = None, keep: bool = False, **_: Any) -> Value:
    value, count = _fold(program, "add", x, dims, keep)
    return _each(value, lambda item: program.builder.cast(_share(program, item, count), _floating(meta)), meta.dtype)


def _share(program: Program, item: Expr, count: float) -> Expr:
    return program.builder.apply("div", item, program.builder.const(float(count)))


def extreme(op: str) -> Any:
    def handler(program: Program, meta: Any, x: Value, dims: Any = None, keep: bool = False) -> Value:
        value, _count = _fold(program, op, x, dims, keep)
        return _each(value, lambda item: program.builder.cast(item, _floating(meta)), meta.dtype)

    return handler


def var_mean(
    program: Program, meta: Any, x: Value, dims: Any = None, *, correction: float = 1, keepdim: bool = False
) -> list[Value]:
    """Two passes: the mean, then the mean square of what is left; never E[x^2] - E[x]^2, which cancels."""
    b = program.builder
    sums, count = _fold(program, "add", x, dims, True)
    means = _each(sums, lambda item: _share(program, item, count), torch.float32)
    wide, spread = broadcast(program.axes, [x, means])
    out = np.empty(wide.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        away = b.apply("sub", b.cast(wide.elements[index], torch.float32), spread.elements[index])
        out[index] = b.apply("mul", away, away)
    squares, count = _fold(program, "add", Value(wide.dims, out, torch.float32), dims, keepdim)
    left = max(count - correction, 0)
    variance = _each(squares, lambda item: b.cast(_share(program, item, left), _floating(meta[0])), meta[0].dtype)
    return [variance, _each(means if keepdim else _fold(program, "add", means, dims, False)[0],
                            lambda item: b.cast(item, meta[1].dtype), meta[1].dtype)]  # fmt: skip


def var(program: Program, meta: Any, x: Value, dims: Any = None, **settings: Any) -> Value:
    return var_mean(program, (meta, meta), x, dims, **settings)[0]


def softmax(program: Program, meta: Any, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """exp(x - max) over its sum, as eager does; the shared divisor of a small axis is inverted once."""
    b = program.builder
    high, _count = _fold(program, "maximum", x, [dim], True)
    wide, spread = broadcast(program.axes, [x, high])
    powers: Any = np.empty(wide.elements.shape, dtype=object)
    for index in np.ndindex(powers.shape):
        away = b.apply("sub", b.cast(wide.elements[index], torch.float32), spread.elements[index])
        powers[index] = b.apply("exp", away)
    sums, _count = _fold(program, "add", Value(wide.dims, powers, torch.float32), [dim], True)
    (divisors,) = broadcast(program.axes, [wide, sums])[1:]
    out = np.empty(powers.shape, dtype=object)
    for index in np.ndindex(out.shape):
        quotient = divide(b, torch.float32, powers[index], divisors.elements[index], shared=not powers[index].wide)
        out[index] = b.cast(quotient, _floating(meta))
    return Value(wide.dims, out, meta.dtype)


REDUCTIONS: dict[Any, Any] = {
    aten.sum.dim_IntList: total, aten.sum.default: total, aten.mean.dim: mean, aten.mean.default: mean,
    aten.amax.default: extreme("maximum"), aten.amin.default: extreme("minimum"),
    aten._softmax.default: softmax, aten.var_mean.correction: var_mean, aten.var.correction: var,
}  # fmt: skip
