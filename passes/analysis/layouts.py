"""layouts: where the rows of a step lie in a tensor, and where a view, a reduction or a product leaves them.

    [T, S, D]            rows      row r is [r]
    [G, T, D]            rows      row r is [:, r]
    [T * k, D]           rows      row r is [r * k : (r + 1) * k], its picks
    [T * k, D], sorted   sorted    row r is wherever the sort put its picks
    [R, Q, D]            grid      row r is [request of r, column of r]

What counts the rows is a Space of one coordinate, or two. A coordinate lies in one dimension and is its slowest part.
Functions return the Layout of the result, or a text: what keeps it from having one. None is a tensor without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from v41.passes.analysis.algebra import Expr, multiple, product

ROWS, SORTED, GRID = "rows", "sorted", "grid"


@dataclass(frozen=True)
class Space:
    """What counts rows. by: the sort that put them in order, behind the subgraph calls it happens in."""

    kind: str
    sizes: tuple[Expr, ...]
    by: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Layout:
    """In which dimension each coordinate of a Space lies; no dimension: the tensor sums all rows up."""

    space: Space
    dims: tuple[int, ...]

    def at(self, *dims: int) -> Layout:
        return replace(self, dims=dims)

    def by(self, step: int) -> Layout:
        """With so many more dimensions in front."""
        return replace(self, dims=tuple(dim + step for dim in self.dims))


Found = Layout | None | str


def aligned(result: Sequence[Expr], operands: Sequence[tuple[Layout | None, Sequence[Expr]]]) -> Found:
    """Of what computes each element of `result` from those of the operands that broadcasting puts there."""
    found: Layout | None = None
    for layout, shape in operands:
        if layout is None:
            continue
        moved = layout.by(len(result) - len(shape))
        if not layout.dims or any(result[dim] != shape[dim - len(result)] for dim in moved.dims):
            return "broadcasts rows over others"
        if found is not None and found != moved:
            return "pairs rows with others"
        found = moved
    if found is not None and found.space.kind == SORTED:
        for layout, shape in operands:
            if layout is None and any(_size(shape, dim - len(result)) != 1 for dim in found.dims):
                return "pairs sorted rows with their places"  # a row's place depends on all others
    return found


def _size(shape: Sequence[Expr], from_end: int) -> Expr | int:
    return shape[from_end] if -from_end <= len(shape) else 1


def reshaped(layout: Layout, old: Sequence[Expr], new: Sequence[Expr]) -> Found:
    """Of a view: a coordinate stays the slowest part of the dimension that begins where its own began."""
    dims = list[int]()
    if not layout.dims:
        return "mixes rows"
    for coordinate, dim in zip(layout.space.sizes, layout.dims, strict=True):
        before, at = product(tuple(old[:dim])), 0
        while at < len(new) and (product(tuple(new[:at])) != before or new[at] == 1 != coordinate):
            at += 1
        if at == len(new) or not multiple(new[at], coordinate):
            return "views rows as something else"
        dims.append(at)
    return layout.at(*dims) if len(set(dims)) == len(dims) else "views rows as something else"


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """order: for each dimension of the result the one it was."""
    was = [dim % len(order) for dim in order]
    return layout.at(*(was.index(dim) for dim in layout.dims))


def apart(layout: Layout, dims: Sequence[int], ndim: int) -> Found:
    """Of what mixes elements along `dims` alone."""
    if not layout.dims or any(dim % max(ndim, 1) in layout.dims for dim in dims):
        return "mixes rows"
    return layout


def reduced(layout: Layout, dims: Sequence[int], ndim: int, keep: bool) -> Found:
    """Of what sums `dims` up, and keeps them with size 1 or not. No dims are all."""
    found = apart(layout, dims or range(ndim), ndim)
    if keep or not isinstance(found, Layout):
        return found
    gone = [dim % ndim for dim in dims]
    return layout.at(*(dim - sum(each < dim for each in gone) for dim in layout.dims))


def multiplied(left: Layout | None, right: Layout | None, batches: int) -> Found:
    """Of a matrix product [.., m, k] x [.., k, n] with so many dimensions in front."""
    if left is None and right is None:
        return None
    m, k, n = batches, batches + 1, batches + 1
    in_sum = (left is not None and k in left.dims) or (right is not None and m in right.dims)
    if in_sum or any(layout is not None and not layout.dims for layout in (left, right)):
        return "sums over rows"
    if left is not None and right is not None:
        same = left == right and m not in left.dims and n not in right.dims
        return left if same else "multiplies rows with others"
    found = left or right
    assert found is not None
    if found.space.kind == SORTED and any(dim < batches for dim in found.dims):
        return "pairs sorted rows with their places"
    return found
