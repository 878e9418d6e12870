"""products: matrix products of a row. With a small second operand they are spelled out; along the wide axis they
become totals.

    [T, k] @ [k, n], bmm [T, a, k] @ [T, k, b]     k small: sums of products, in order of k
    [T, S*D] @ [S*D, n]                            D the wide axis, n few outputs: one project over all of the row

A product whose result has more outputs than a row can hold as numbers is a GEMM, and Refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import ops

from v41.lowering.rowwise import axes as ax
from v41.lowering.rowwise.axes import WIDE, Refused, Value
from v41.lowering.rowwise.expr import Expr, Weights, widens

if TYPE_CHECKING:
    from v41.lowering.rowwise.read import Program

aten = ops.aten
OUTPUTS = 64  # of one project


def mm(program: Program, meta: Any, x: Value, w: Value) -> Value:
    """[T, k] @ [k, n]."""
    if any(item.row for item in w.items()) or x.dims[0] != (ax.ROW,):
        raise Refused("multiplies rows with each other")
    if x.dims[1] != w.dims[0]:
        raise Refused("multiplies along an axis that its operands cut differently")
    if WIDE in x.dims[1]:
        return _project(program, meta, x, w)
    return _spelled(program, meta, x, w)


def addmm(program: Program, meta: Any, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise Refused("scales an addmm")
    b = program.builder
    product = mm(program, Unrounded(meta), x, w)
    product, spread = ax.broadcast(program.axes, [product, bias])
    out = np.empty(product.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        total = b.apply("add", product.elements[index], b.cast(spread.elements[index], torch.float32))
        out[index] = b.cast(total, meta.dtype)
    return Value(product.dims, out, meta.dtype)


class Unrounded:
    """The meta of a product that is not yet rounded."""

    dtype = torch.float32

    def __init__(self, meta: Any) -> None:
        self.shape = meta.shape


def bmm(program: Program, meta: Any, x: Value, w: Value) -> Value:
    """[T, a, k] @ [T, k, b]: a product a row."""
    if x.dims[0] != (ax.ROW,) or w.dims[0] not in ((ax.ROW,), ()):
        raise Refused("multiplies along an axis other than the row's")
    return _spelled(program, meta, x, w)


def _spelled(program: Program, meta: Any, x: Value, w: Value) -> Value:
    """sum over k of x[..., a, k] * w[..., k, b], as broadcasts: whatever is wide stays wide."""
    from v41.lowering.rowwise.reductions import total

    left, right = ax.broadcast(program.axes, [_insert(x, len(x.dims)), _insert(w, len(w.dims) - 2)])
    b = program.builder
    out = np.empty(left.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        out[index] = b.apply("mul", *(b.cast(v.elements[index], torch.float32) for v in (left, right)))
    return total(program, meta, Value(left.dims, out, torch.float32), [-2])


def _insert(x: Value, dim: int) -> Value:
    """A dimension of size 1 before `dim`."""
    return Value((*x.dims[:dim], (), *x.dims[dim:]), x.elements, x.dtype)


def _project(program: Program, meta: Any, x: Value, w: Value) -> Value:
    """One project for all outputs, where the weights lie regularly in memory; else one total an output."""
    b = program.builder
    xs = x.items()
    columns = w.elements.reshape(len(xs), -1)  # [S, n]
    outputs = columns.shape[1]
    if outputs > OUTPUTS or WIDE in w.dims[1]:
        raise Refused("has more outputs than a row can hold: a GEMM")
    weights = _weights(columns)
    if weights is None:
        products = [[b.apply("mul", b.cast(v, torch.float32), b.cast(u, torch.float32)) for v, u in
                     zip(xs, column, strict=True)] for column in columns.T]  # fmt: skip
        results = [b.total("add", b.fold("add", column), program.axes.width) for column in products]
    else:
        results = b.project(tuple(_narrow(item) for item in xs), weights)
    elements = np.empty(outputs, dtype=object)
    elements[:] = [b.cast(result, meta.dtype) for result in results]
    return program.axes.value((x.dims[0], w.dims[1]), elements, meta.dtype)


def _narrow(x: Expr) -> Expr:
    """`x` before a cast that only widened it: tensor cores want the narrow one."""
    return x.args[0] if x.op == "cast" and widens(x.args[0].dtype, x.dtype) else x


def _weights(columns: np.ndarray) -> Weights | None:
    """Where the weights of all outputs lie, if they are read from memory and one stride apart."""
    loads = np.vectorize(_narrow, otypes=[object])(columns)
    if any(item.op != "load" for item in loads.flat):
        return None
    first = loads[0, 0]
    offsets = np.array([[item.data[2] for item in row] for row in loads])  # [S, n]
    stride = int(offsets[0, 1] - offsets[0, 0]) if offsets.shape[1] > 1 else 0
    regular = all(item.data[0] == first.data[0] and item.wide for item in loads.flat)
    if not regular or (offsets != offsets[:, :1] + stride * np.arange(offsets.shape[1])).any():
        return None
    return Weights(first.data[0], first.dtype, offsets.shape[1], stride, tuple(offsets[:, 0].tolist()), first.data[3])


PRODUCTS: dict[Any, Any] = {aten.mm.default: mm, aten.addmm.default: addmm, aten.bmm.default: bmm}
