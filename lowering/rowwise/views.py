"""views: ATen ops that move elements and compute nothing. Shapes come from the node's meta, never from size
arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import ops

from v41.lowering.rowwise import axes as ax
from v41.lowering.rowwise.axes import Refused, Value

if TYPE_CHECKING:
    from v41.lowering.rowwise.read import Program

aten = ops.aten


def reshape(program: Program, meta: Any, x: Value, *_: Any, **__: Any) -> Value:
    """view, unsqueeze, squeeze: the same elements in the same order."""
    return ax.reshape(program.axes, x, tuple(meta.shape))


def same(program: Program, meta: Any, x: Value, *_: Any, **__: Any) -> Value:
    return x


def permute(program: Program, meta: Any, x: Value, order: list[int]) -> Value:
    return ax.permute(program.axes, x, order)


def transpose(program: Program, meta: Any, x: Value, a: int = 0, b: int = 1) -> Value:
    order = list(range(len(x.dims)))
    if order:
        order[a], order[b] = order[b], order[a]
    return ax.permute(program.axes, x, order)


def expand(program: Program, meta: Any, x: Value, *_: Any, **__: Any) -> Value:
    return ax.expand(program.axes, x, tuple(meta.shape))


def cut(
    program: Program, meta: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    size = meta.shape[dim]
    if not isinstance(size, int):
        if x.dims[dim] == (ax.ROW,) and start in (None, 0) and step == 1 and _is_end(end):
            return x
        raise Refused("slices the row axis")
    if step != 1:
        raise Refused("slices with a step")
    full = _size(program, x, dim)
    start = min(start or 0, full) if (start or 0) >= 0 else max(full + start, 0)
    return ax.take(program.axes, x, dim, start, start + size)


def _is_end(end: Any) -> bool:
    return end is None or (isinstance(end, int) and end >= 2**62)


def _size(program: Program, x: Value, dim: int) -> int:
    if ax.ROW in x.dims[dim]:
        raise Refused("picks part of the row axis")
    return int(np.prod([program.axes.width if factor == ax.WIDE else factor for factor in x.dims[dim]], dtype=np.int64))


def select(program: Program, meta: Any, x: Value, dim: int, index: int) -> Value:
    index %= _size(program, x, dim)
    return ax.take(program.axes, x, dim, index, index + 1, keep=False)


def unbind(program: Program, meta: Any, x: Value, dim: int = 0) -> list[Value]:
    return [ax.take(program.axes, x, dim, i, i + 1, keep=False) for i in range(_size(program, x, dim))]


def split(program: Program, meta: Any, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    bounds = np.cumsum([0, *(part.shape[dim] for part in meta)])
    return [ax.take(program.axes, x, dim, int(a), int(b)) for a, b in pairwise(bounds)]


def cat(program: Program, meta: Any, parts: list[Value], dim: int = 0) -> Value:
    return ax.concatenate(program.axes, parts, dim)


def full(program: Program, meta: Any, *args: Any, **kwargs: Any) -> Value:
    """full, zeros_like and the like: one constant for all elements."""
    number = next(arg for arg in reversed(args) if isinstance(arg, (int, float)))
    constant = program.builder.cast(program.builder.const(float(number)), meta.dtype)
    one = Value((), np.array(constant, dtype=object).reshape(()), meta.dtype)
    return ax.expand(program.axes, one, tuple(meta.shape))


VIEWS: dict[Any, Any] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
                     aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), reshape),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default), same),
    aten.permute.default: permute, aten.transpose.int: transpose, aten.t.default: transpose, aten.expand.default:
    expand, aten.slice.Tensor: cut, aten.select.int: select, aten.unbind.int: unbind, aten.cat.default: cat,
    aten.split_with_sizes.default: split, aten.split.Tensor: split, aten.full.default: full,
    aten.scalar_tensor.default: full,
}  # fmt: skip
