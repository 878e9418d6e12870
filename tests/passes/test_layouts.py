"""layouts: rows lie where they are said to, tried on tensors that hold the number of their row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from v41.passes.analysis.algebra import Expr, expression
from v41.passes.analysis.layouts import (
    GRID,
    ROWS,
    SORTED,
    Found,
    Layout,
    Space,
    aligned,
    apart,
    multiplied,
    permuted,
    reduced,
    reshaped,
)

T, R, Q = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "TRQ")
NUMBERS = {T: 3, R: 2, Q: 5}
OTHER, PLACES = "pairs rows with others", "pairs sorted rows with their places"
VIEWED, MIXED, SUMMED = "views rows as something else", "mixes rows", "sums over rows"
Shape = Sequence[Any]  # of sizes and numbers


def exprs(shape: Shape) -> tuple[Expr, ...]:
    return tuple(expression(size) if isinstance(size, int) else size for size in shape)


def sizes(shape: Shape) -> list[int]:
    return [int(size.subs(NUMBERS)) for size in exprs(shape)]


def rows(*dims: int, kind: str = ROWS, counts: Shape = ()) -> Layout:
    """Of T rows, or of R x Q where two dimensions are given."""
    return Layout(Space(kind, exprs(counts or ((T,) if len(dims) < 2 else (R, Q)))), dims)


def numbered(layout: Layout, shape: Shape) -> Tensor:
    """Each element is the number of the row that it belongs to."""
    found = torch.zeros(sizes(shape), dtype=torch.int64)
    for size, dim in zip(sizes(layout.space.sizes), layout.dims, strict=True):
        places = torch.arange(found.shape[dim]) // (found.shape[dim] // size)
        found = found * size + places.view(-1, *[1] * (found.ndim - dim - 1))
    return found


# ---- views


VIEWS: list[tuple[Layout, Shape, Shape, tuple[int, ...] | str]] = [  # rows, shape, the new shape, where they are
    (rows(0), (T, 8), (T, 2, 4), (0,)),
    (rows(0), (T, 8), (T * 8,), (0,)),
    (rows(0), (T * 2, 8), (T, 2, 8), (0,)),
    (rows(0), (T * 2, 8), (T * 4, 4), (0,)),
    (rows(0), (T, 8), (1, 1, T, 8), (2,)),
    (rows(1), (1, T, 8), (T, 8), (0,)),
    (rows(1), (4, T, 8), (2, 2, T, 8), (2,)),
    (rows(1), (4, T), (4, T, 1), (1,)),
    (rows(0, counts=(1,)), (1, 8), (1, 8), (0,)),  # of one row that is known to be one, the first of the ones
    (rows(1), (4, T, 8), (4 * T, 8), VIEWED),
    (rows(0), (T, 8), (8, T), VIEWED),
    (rows(0), (T, 8), (T * 2 // 3, 12), VIEWED),
    (rows(0), (T,), (), VIEWED),
    (rows(0, 1), (R, Q, 8), (R, Q, 2, 4), (0, 1)),
    (rows(0, 1), (R, Q, 8), (R, 1, Q * 8), (0, 2)),
    (rows(0, 2), (R, 1, Q), (R, Q), (0, 1)),
    (rows(0, 1), (R, Q, 8), (R * Q, 8), VIEWED),
    (rows(0, 1, counts=(1, Q)), (1, Q), (Q,), VIEWED),
    (rows(), (8,), (2, 4), MIXED),
]


@pytest.mark.parametrize(("layout", "old", "new", "where"), VIEWS, ids=str)
def test_a_view_leaves_rows_where_they_are_said_to_be(
    layout: Layout, old: Shape, new: Shape, where: tuple[int, ...] | str
) -> None:
    found = reshaped(layout, exprs(old), exprs(new))
    assert found == (where if isinstance(where, str) else layout.at(*where))
    if isinstance(found, Layout):
        assert torch.equal(numbered(layout, old).reshape(sizes(new)), numbered(found, new))


@pytest.mark.parametrize("order", [[1, 0, 2], [-1, 0, 1], [2, 1, 0], [-3, -1, -2]])
@pytest.mark.parametrize(("layout", "shape"), [(rows(0), (T, 4, 8)), (rows(1), (4, T, 8)), (rows(0, 1), (R, Q, 8))])
def test_a_permutation_takes_rows_along(layout: Layout, shape: Shape, order: list[int]) -> None:
    new = [shape[dim] for dim in order]
    assert torch.equal(numbered(layout, shape).permute(order), numbered(permuted(layout, order), new))


# ---- sums


SUMS: list[tuple[Layout, int, tuple[int, ...], bool, tuple[int, ...] | str]] = [  # rows, ndim, summed, kept, where
    (rows(1), 3, (0,), False, (0,)),
    (rows(1), 3, (0,), True, (1,)),
    (rows(2), 3, (0, 1), False, (0,)),
    (rows(0), 3, (1, -1), False, (0,)),
    (rows(1), 3, (-3, 2), False, (0,)),
    (rows(0, 2), 4, (1, 3), False, (0, 1)),
    (rows(0), 2, (0,), True, MIXED),
    (rows(1), 2, (-1,), False, MIXED),
    (rows(0, 1), 3, (2, 1), False, MIXED),
    (rows(0), 2, (), False, MIXED),
    (rows(), 1, (0,), False, MIXED),
    (rows(), 0, (), False, MIXED),
]


@pytest.mark.parametrize(("layout", "ndim", "dims", "keep", "where"), SUMS, ids=str)
def test_a_sum_leaves_rows_apart_where_it_takes_other_dimensions(
    layout: Layout, ndim: int, dims: tuple[int, ...], keep: bool, where: tuple[int, ...] | str
) -> None:
    assert reduced(layout, dims, ndim, keep) == (where if isinstance(where, str) else layout.at(*where))
    mixes = isinstance(where, str) and (dims or not layout.dims)  # of no dimension it takes none
    assert apart(layout, dims, ndim) == (MIXED if mixes else layout)


# ---- pairs


Operands = list[tuple[Layout | None, Shape]]
SOME = rows(0, kind=SORTED)
PAIRS: list[tuple[Shape, Operands, Found]] = [
    ((T, 8), [(None, (8,)), (rows(0), (T, 8))], rows(0)),
    ((T, 8), [(rows(0), (T, 8)), (rows(0), (T, 1)), (None, ())], rows(0)),
    ((4, T, 8), [(rows(0), (T, 8)), (None, (4, 1, 1))], rows(1)),
    ((4, T, 8), [(rows(0), (T, 8)), (rows(1), (4, T, 8))], rows(1)),
    ((R, Q, 8), [(rows(0, 1), (R, Q, 1)), (None, (8,))], rows(0, 1)),
    ((8, 8), [(None, (8, 8)), (None, (8,))], None),
    ((T, T), [(rows(0), (T, T)), (rows(0), (T,))], OTHER),
    ((T, 8), [(rows(0), (T, 8)), (SOME, (T, 8))], OTHER),
    ((T, 8), [(rows(), (8,)), (rows(0), (T, 8))], "broadcasts rows over others"),
    ((4, 8), [(rows(0, counts=(1,)), (1, 8))], "broadcasts rows over others"),
    ((R, 4, 8), [(rows(0, 1, counts=(R, 1)), (R, 1, 8))], "broadcasts rows over others"),
    ((T, 8), [(SOME, (T, 8)), (None, (8,))], SOME),
    ((T, 8), [(SOME, (T, 8)), (None, (1, 8))], SOME),
    ((T, 8), [(SOME, (T, 8)), (None, (T, 1))], PLACES),
    ((T, 8), [(None, (T, 8)), (SOME, (T, 8))], PLACES),
    ((T, 8), [(rows(0), (T, 8)), (None, (T, 1))], rows(0)),  # rows in order are at their places
]


@pytest.mark.parametrize(("result", "operands", "expected"), PAIRS, ids=str)
def test_operands_pair_a_row_with_itself_and_with_what_has_no_rows(
    result: Shape, operands: Operands, expected: Found
) -> None:
    assert aligned(exprs(result), [(layout, exprs(shape)) for layout, shape in operands]) == expected


PRODUCTS: list[tuple[Layout | None, Layout | None, int, Found]] = [  # of [.., m, k] x [.., k, n], so many in front
    (None, None, 0, None),
    (rows(0), None, 0, rows(0)),
    (None, rows(1), 0, rows(1)),
    (rows(1), None, 1, rows(1)),
    (rows(0), rows(0), 1, rows(0)),
    (rows(0, 1), rows(0, 1), 2, rows(0, 1)),
    (rows(1), None, 0, SUMMED),
    (None, rows(0), 0, SUMMED),
    (rows(1), rows(1), 1, SUMMED),
    (rows(), None, 0, SUMMED),
    (None, rows(), 0, SUMMED),
    (rows(1), rows(2), 1, "multiplies rows with others"),
    (rows(0), rows(2), 1, "multiplies rows with others"),
    (rows(0), rows(0, kind=SORTED), 1, "multiplies rows with others"),
    (SOME, None, 0, SOME),
    (rows(1, kind=SORTED), None, 1, rows(1, kind=SORTED)),
    (SOME, None, 1, PLACES),
    (rows(0), None, 1, rows(0)),
]


@pytest.mark.parametrize(("left", "right", "batches", "expected"), PRODUCTS, ids=str)
def test_a_product_keeps_the_rows_that_it_does_not_sum(
    left: Layout | None, right: Layout | None, batches: int, expected: Found
) -> None:
    assert multiplied(left, right, batches) == expected


def test_a_grid_has_two_coordinates() -> None:
    layout = rows(0, 1, kind=GRID)
    assert layout.by(2).dims == (2, 3) and numbered(layout, (R, Q)).flatten().tolist() == list(range(10))
