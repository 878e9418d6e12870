"""views: ATen ops that move elements: each turns the index of its result into that of what it reads.

A concatenation asks which part its index lies in. Where lanes lie on both sides, the store that asked is cut there
(NeedsCut); where that cannot be, both parts are computed and one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import ops

from v41._compat import known_equal
from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.held.index import Index, Part, at, divide
from v41.lowering.rowwise.held.values import Held, Indices, Lazy, Shape, flat

aten = ops.aten
SHORTEST = 8  # elements of a part for whose sake a store is cut


class NeedsCut(Exception):
    """The store that is read should be two along its axis `axis`, the second beginning at `place`."""

    def __init__(self, axis: int, place: int) -> None:
        super().__init__(axis, place)
        self.axis, self.place = axis, place


def shape_of(held: Held, meta: Any) -> Shape:
    """The shape of a fake tensor; every symbolic size must be the number of rows."""
    found: list[int | None] = []
    for size in meta.shape:
        if not isinstance(size, int) and not known_equal(size, held.rows):
            raise Refused(f"has an axis of {size} elements beside {held.rows} rows")
        found.append(size if isinstance(size, int) else None)
    if found.count(None) > 1:
        raise Refused("has the row axis twice")
    return tuple(found)


def moved(held: Held, meta: Any, x: Lazy, index_of: Callable[[Indices], Indices]) -> Lazy:
    """x with the index of the result turned by `index_of`."""
    return Lazy(held, shape_of(held, meta), x.dtype, lambda index: x.at(index_of(index)))


def reshape(held: Held, meta: Any, x: Lazy, *_: Any, **__: Any) -> Lazy:
    """view, unsqueeze, squeeze: the same elements in the same order."""
    shape = shape_of(held, meta)
    if shape == x.shape:
        return x
    if shape[:1] != x.shape[:1] and None in (*shape, *x.shape):
        if [size for size in shape if size != 1] != [size for size in x.shape if size != 1]:
            raise Refused("reshapes across the row axis")
    elif None in (*shape[1:], *x.shape[1:]):
        raise Refused("reshapes across the row axis")

    def index_of(index: Indices) -> Indices:
        rest, found = flat(index, shape), list[Index]()
        sizes = [size or 1 for size in x.shape]
        for i in range(len(sizes)):
            step = int(np.prod(sizes[i + 1 :], dtype=np.int64))
            found.append(at(0) if sizes[i] == 1 else divide(rest, step))
            rest = rest + found[-1] * -step
        return tuple(found)

    return moved(held, meta, x, index_of)


def same(held: Held, meta: Any, x: Lazy, *_: Any, **__: Any) -> Lazy:
    return x


def permute(held: Held, meta: Any, x: Lazy, order: list[int]) -> Lazy:
    order = [dim % len(x.shape) for dim in order]
    return moved(held, meta, x, lambda index: tuple(index[order.index(dim)] for dim in range(len(order))))


def transpose(held: Held, meta: Any, x: Lazy, a: int = 0, b: int = 1) -> Lazy:
    order = list(range(len(x.shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(held, meta, x, order)


def expand(held: Held, meta: Any, x: Lazy, *_: Any, **__: Any) -> Lazy:
    front = len(meta.shape) - len(x.shape)
    return moved(held, meta, x, lambda index: tuple(
        at(0) if size == 1 else each for each, size in zip(index[front:], x.shape, strict=True)))  # fmt: skip


def cut(held: Held, meta: Any, x: Lazy, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Lazy:
    dim %= len(x.shape)
    if x.shape[dim] is None:
        if start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62)):
            return x
        raise Refused("slices the row axis")
    if not isinstance(start, int | None):
        raise Refused("slices from a place that is not fixed")
    size = x.size(dim)
    first = min(start or 0, size) if (start or 0) >= 0 else max(size + (start or 0), 0)
    return moved(held, meta, x, lambda index: (*index[:dim], index[dim] * step + first, *index[dim + 1 :]))


def select(held: Held, meta: Any, x: Lazy, dim: int, number: int) -> Lazy:
    dim %= len(x.shape)
    place = at(number % x.size(dim))
    return moved(held, meta, x, lambda index: (*index[:dim], place, *index[dim:]))


def unbind(held: Held, meta: Any, x: Lazy, dim: int = 0) -> list[Lazy]:
    return [select(held, part, x, dim, i) for i, part in enumerate(meta)]


def split(held: Held, meta: Any, x: Lazy, sizes: Any, dim: int = 0) -> list[Lazy]:
    bounds = np.cumsum([0, *(part.shape[dim] for part in meta)]).tolist()
    return [cut(held, part, x, dim, start) for part, start in zip(meta, bounds, strict=False)]


def flip(held: Held, meta: Any, x: Lazy, dims: list[int]) -> Lazy:
    turned = {dim % len(x.shape): x.size(dim) for dim in dims}

    def index_of(index: Indices) -> Indices:
        return tuple(each * -1 + (turned[dim] - 1) if dim in turned else each for dim, each in enumerate(index))

    return moved(held, meta, x, index_of)


def cat(held: Held, meta: Any, given: list[Lazy], dim: int = 0) -> Lazy:
    """Values one behind the other."""
    values = [x for x in given if len(x.shape) == len(meta.shape)]  # an old habit of torch's: empty ones of one axis
    dim %= len(meta.shape)
    starts: list[int] = np.cumsum([0, *(x.size(dim) for x in values)]).tolist()

    def part(index: Indices, i: int) -> Any:
        place = at(0) if values[i].shape[dim] == 1 else index[dim] + -starts[i]
        return held.builder.cast(values[i].at((*index[:dim], place, *index[dim + 1 :])), meta.dtype)

    def compute(index: Indices) -> Any:
        where = index[dim]
        touched = [i for i, (low, high) in enumerate(pairwise(starts)) if where.lowest < high and where.highest >= low]
        if not touched:  # in a lane that nobody reads
            touched = [0]
        for i in touched[1:]:
            ask_for_cut(held, where, starts[i], values[i - 1].size(dim), values[i].size(dim))
        found = part(index, touched[0])
        for i in touched[1:]:
            found = held.builder.apply("where", held.below(where, starts[i]), found, part(index, i), dtype=meta.dtype)
        return found

    parts = tuple((dim, start, x) for start, x in zip(starts, values, strict=False) if x.dtype == meta.dtype)
    return Lazy(held, shape_of(held, meta), meta.dtype, compute, parts if len(parts) == len(values) else ())


def ask_for_cut(held: Held, where: Index, place: int, before: int, after: int) -> None:
    """NeedsCut where `where` counts on along an axis of the store that is read, in steps of one or of groups."""
    for axis, along in enumerate(held.store):
        if held.splits_at is None or not along.terms or min(before, after) < SHORTEST:
            continue
        first = next((factor, atom) for factor, atom in along.terms)
        if isinstance(first[1], Part):
            continue  # of which a program has one element
        step = next((f // first[0] for f, a in where.terms if a == first[1] and f % first[0] == 0), 0)
        rest = where + (along * -step)
        if step > 0 and rest.terms == tuple(t for t in rest.terms if t[0] > 0) and rest.highest - rest.const < step:
            middle = place - rest.const
            if middle % step == 0 and 0 < middle // step <= along.highest:
                raise NeedsCut(axis, middle // step)


def full(held: Held, meta: Any, *args: Any, **kwargs: Any) -> Lazy:
    """full, zeros_like and the like: one constant for all elements."""
    value = next(arg for arg in reversed(args) if isinstance(arg, (int, float)))
    return Lazy(held, shape_of(held, meta), meta.dtype, lambda index: constant(held, value, meta.dtype))


def constant(held: Held, value: Any, dtype: torch.dtype) -> Any:
    b = held.builder
    if dtype.is_floating_point:
        return b.cast(b.const(float(value)), dtype)
    return b.const(int(value), dtype)


def iota(held: Held, meta: Any, size: int, *, start: int = 0, step: int = 1, **_: Any) -> Lazy:
    return Lazy(held, shape_of(held, meta), meta.dtype, lambda index: held.number(index[0] * step + start, meta.dtype))


def arange(held: Held, meta: Any, start: int, end: int, step: int = 1, **_: Any) -> Lazy:
    if not all(isinstance(each, int) for each in (start, end, step)):
        raise Refused("counts to a number that is not fixed")
    return iota(held, meta, end - start, start=start, step=step)


def bits(held: Held, meta: Any, x: Lazy, dtype: torch.dtype) -> Lazy:
    """view.dtype: the same bits, read as another type of as many."""
    if dtype.itemsize != x.dtype.itemsize or torch.bool in (dtype, x.dtype):
        raise Refused("reads bits as a type of another size")

    def compute(index: Indices) -> Any:
        given = x.at(index)
        return given if given.dtype == dtype else held.builder.make("bits", (given,), dtype)

    parts = tuple((dim, start, bits(held, meta, part, dtype)) for dim, start, part in x.parts)
    return Lazy(held, x.shape, dtype, compute, parts)


VIEWS: dict[Any, Any] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
                     aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), reshape),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default), same),
    aten.permute.default: permute, aten.transpose.int: transpose, aten.t.default: transpose,
    aten.expand.default: expand, aten.slice.Tensor: cut, aten.select.int: select, aten.unbind.int: unbind,
    aten.split_with_sizes.default: split, aten.split.Tensor: split, aten.cat.default: cat,
    aten.flip.default: flip, ops.prims.rev.default: flip,
    aten.full.default: full, aten.scalar_tensor.default: full, aten.full_like.default: full,
    aten.zeros_like.default: lambda held, meta, *_, **__: full(held, meta, 0),
    aten.ones_like.default: lambda held, meta, *_, **__: full(held, meta, 1),
    ops.prims.iota.default: iota, aten.arange.start_step: arange, aten.view.dtype: bits,
}  # fmt: skip
