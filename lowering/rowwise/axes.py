"""Axes: every tensor of a body as small arrays of expressions, the row axis and the wide axis kept apart.

    x bf16[T, 4, 5120]           dims (ROW,) (4,) (WIDE,)        elements [1, 4, 1]: four tiles
    flattened bf16[T, 20480]     dims (ROW,) (4, WIDE)           the same four
    m f32[T, 4, 4]               dims (ROW,) (4,) (4,)           elements [1, 4, 4]: sixteen numbers a row

A logical dimension is a tuple of factors: ROW, WIDE or a small size; size 1 has none. Views only move factors about,
so they cost nothing in a kernel. What would cut the row axis or the wide axis is Refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

ROW, WIDE = -1, -2  # factors that are not sizes
Factors = tuple[int, ...]
SMALL_LIMIT = 256  # elements of one tensor that may each become a variable


class Refused(Exception):
    """The body is beyond this generator: `reason` completes "refused because it ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Value:
    """A tensor: one tuple of factors a logical dimension, one axis of `elements` a factor (ROW and WIDE have length
    1)."""

    dims: tuple[Factors, ...]
    elements: Any  # numpy array of Expr
    dtype: torch.dtype

    def axis(self, dim: int) -> int:
        """The first axis of `elements` that belongs to logical dimension `dim`."""
        return sum(len(factors) for factors in self.dims[:dim])

    def items(self) -> list[Any]:
        return list(self.elements.flat)


@dataclass(frozen=True)
class Axes:
    """The sizes that a body's shapes are read with: `width` of the wide axis (0: there is none)."""

    width: int

    def factors(self, size: int | torch.SymInt) -> Factors:
        """The factors of a dimension of `size` elements, from its size alone."""
        if not isinstance(size, int):
            return (ROW,)
        if self.width and size % self.width == 0:
            return (WIDE,) if size == self.width else (size // self.width, WIDE)
        if size > SMALL_LIMIT:
            raise Refused(f"has an axis of {size} elements beside the wide axis of {self.width}")
        return (size,) if size != 1 else ()

    def value(self, dims: tuple[Factors, ...], elements: Any, dtype: torch.dtype) -> Value:
        """A Value whose dimensions have adjacent small factors merged, so that equal shapes have equal dims."""
        if elements.size > SMALL_LIMIT:
            raise Refused(f"holds {elements.size} values a row and column")
        merged = tuple(_merge(factors) for factors in dims)
        return Value(merged, elements.reshape(lengths(merged)), dtype)


def lengths(dims: tuple[Factors, ...]) -> tuple[int, ...]:
    return tuple(max(factor, 1) for factors in dims for factor in factors)


def _merge(factors: Factors) -> Factors:
    out: list[int] = []
    for factor in factors:
        if factor > 0 and out and out[-1] > 0:
            out[-1] *= factor
        elif factor != 1:
            out.append(factor)
    return tuple(out)


def reshape(axes: Axes, value: Value, shape: tuple[int | torch.SymInt, ...]) -> Value:
    """Regroups factors into `shape`. Small factors may split and join, ROW and WIDE stay whole."""
    rest = list(_merge(tuple(factor for factors in value.dims for factor in factors)))
    dims = tuple(_take(axes, rest, size) for size in shape)
    if rest:
        raise Refused("reshapes across the row axis")
    return axes.value(dims, value.elements.reshape(lengths(dims)), value.dtype)


def _take(axes: Axes, rest: list[int], size: int | torch.SymInt) -> Factors:
    if not isinstance(size, int):
        if not rest or rest.pop(0) != ROW:
            raise Refused("moves the row axis in a reshape")
        return (ROW,)
    taken: list[int] = []
    while size > 1:
        factor = rest.pop(0) if rest else ROW
        width = axes.width if factor == WIDE else factor
        if factor == ROW or (size % width and (factor == WIDE or width % size)):
            raise Refused("cuts the row axis or the wide axis in a reshape")
        if size % width:
            rest.insert(0, width // size)
            factor = width = size
        taken.append(factor)
        size //= width
    return tuple(taken)


def permute(axes: Axes, value: Value, order: list[int]) -> Value:
    order = [dim % len(value.dims) for dim in order]
    moved = [axis for dim in order for axis in range(value.axis(dim), value.axis(dim) + len(value.dims[dim]))]
    return axes.value(tuple(value.dims[dim] for dim in order), value.elements.transpose(moved), value.dtype)


def expand(axes: Axes, value: Value, shape: tuple[int | torch.SymInt, ...]) -> Value:
    """Broadcasts to `shape`: dimensions of size 1 grow, new ones appear in front."""
    old = ((),) * (len(shape) - len(value.dims)) + value.dims
    dims = tuple(was or axes.factors(size) for was, size in zip(old, shape, strict=True))
    return _spread(axes, value, dims)


def _spread(axes: Axes, value: Value, dims: tuple[Factors, ...]) -> Value:
    old = ((),) * (len(dims) - len(value.dims)) + value.dims
    if any(was not in ((), now) for was, now in zip(old, dims, strict=True)):
        raise Refused("pairs an axis with another that is cut differently")
    start = [length for was, now in zip(old, dims, strict=True) for length in (lengths((was,)) or (1,) * len(now))]
    return Value(dims, np.broadcast_to(value.elements.reshape(start), lengths(dims)), value.dtype)


def broadcast(axes: Axes, values: list[Value]) -> list[Value]:
    """All of one shape, as an elementwise op reads them."""
    rank = max(len(value.dims) for value in values)
    padded = [((),) * (rank - len(value.dims)) + value.dims for value in values]
    dims = tuple(next((factors for factors in column if factors), ()) for column in zip(*padded, strict=True))
    if prod(lengths(dims)) > SMALL_LIMIT:
        raise Refused(f"holds {prod(lengths(dims))} values a row and column")
    return [_spread(axes, value, dims) for value in values]


def take(axes: Axes, value: Value, dim: int, start: int, stop: int, keep: bool = True) -> Value:
    """Elements start..stop of a small dimension, or whole multiples of the wide axis; `keep` False drops the
    dimension."""
    dim %= len(value.dims)
    factors = value.dims[dim]
    unit = axes.width if factors[-1:] == (WIDE,) else 1
    if ROW in factors or start % unit or stop % unit or (factors == (WIDE,) and (start, stop) != (0, unit)):
        raise Refused("picks part of the row axis or the wide axis")
    if factors in ((), (WIDE,)):
        elements, count = value.elements, (stop - start) // unit
    else:
        elements = value.elements.take(range(start // unit, stop // unit), axis=value.axis(dim))
        count = (stop - start) // unit
    wide = (WIDE,) if factors[-1:] == (WIDE,) else ()
    middle = ((count, *wide),) if keep else (wide,) if wide else ()
    return axes.value((*value.dims[:dim], *middle, *value.dims[dim + 1 :]), elements, value.dtype)


def concatenate(axes: Axes, values: list[Value], dim: int) -> Value:
    """Values one behind the other along a small dimension, or by whole multiples of the wide axis."""
    dim %= len(values[0].dims)
    wide = values[0].dims[dim][-1:] == (WIDE,)
    parts = []
    for value in values:
        factors = value.dims[dim]
        if ROW in factors or (factors[-1:] == (WIDE,)) != wide or len(factors) - wide > 1:
            raise Refused("joins along the row axis, or a wide axis with a small one")
        full = factors if len(factors) - wide else (1, *factors)
        parts.append(
            value.elements.reshape(lengths((*value.dims[:dim], full, *value.dims[dim + 1 :])))
            if full != factors
            else value.elements
        )
    joined = np.concatenate(parts, axis=values[0].axis(dim))
    middle = (joined.shape[values[0].axis(dim)], *([WIDE] if wide else []))
    return axes.value((*values[0].dims[:dim], middle, *values[0].dims[dim + 1 :]), joined, values[0].dtype)
