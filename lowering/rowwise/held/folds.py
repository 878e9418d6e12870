"""folds: reductions over axes of a row. A few elements are spelled out, more become lanes of a tile that is folded; of
the runs of a long axis, their sum is.

How lanes are added, emit.py says. Accumulation is fp32, as in eager; integers are summed as int64.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.elementwise import cast
from v41.lowering.rowwise.expr import Builder, Expr
from v41.lowering.rowwise.held.index import Index, Lane, NeedsSplit, at
from v41.lowering.rowwise.held.values import Held, Indices, Lazy, Shape, aligned, check_size
from v41.lowering.rowwise.held.views import shape_of

aten = ops.aten
SPELLED = 4  # elements of an axis that are folded one by one


def fold(held: Held, op: str, x: Lazy, dims: Any, keep: bool, dtype: torch.dtype = torch.float32) -> Lazy:
    """`x` in `dtype`, folded by `op` over `dims` (None: all)."""
    chosen = {dim % len(x.shape) for dim in (range(len(x.shape)) if dims is None or dims == [] else dims)}
    sizes = {dim: x.size(dim) for dim in chosen}
    shape = tuple(1 if dim in chosen else size for dim, size in enumerate(x.shape) if keep or dim not in chosen)
    b = held.builder

    def compute(index: Indices) -> Expr:
        kept = iter([each for dim, each in enumerate(index) if not keep or dim not in chosen])
        outer: list[Index | None] = [None if dim in chosen else next(kept) for dim in range(len(x.shape))]
        used = {lane for each in outer if each is not None for lane in each.lanes()}
        before = held.splits_at
        if not used:
            held.splits_at = None  # a number of the row: the same lanes whoever asks
        try:
            places = [[each] if each is not None else spread(held, sizes[dim], used) for dim, each in enumerate(outer)]
            items = [b.cast(x.at(place), dtype) for place in product(*places)]
        except NeedsSplit as need:
            need.tables.append(held.splits_at)
            raise
        finally:
            held.splits_at = before
        lanes = {lane for dim in chosen for lane in places[dim][0].lanes()}
        return over_lanes(held, op, in_pairs(b, op, items), lanes)

    return Lazy(held, shape, dtype, compute)


def spread(held: Held, size: int, used: set[Lane]) -> list[Index]:
    """The indices of an axis: each by itself, or one in lanes for each of its runs."""
    if size == 0:
        raise Refused("folds no elements")
    if size <= SPELLED:
        return [at(i) for i in range(size)]
    run = size // held.runs_of(size)
    first = held.axis(run, used)
    return [first + start for start in range(0, size, run)]


def in_pairs(b: Builder, op: str, items: list[Expr]) -> Expr:
    while len(items) > 1:
        pairs = [b.apply(op, *items[i : i + 2], dtype=items[0].dtype) for i in range(0, len(items) - 1, 2)]
        items = pairs + items[len(items) // 2 * 2 :]
    return items[0]


def over_lanes(held: Held, op: str, x: Expr, lanes: set[Lane]) -> Expr:
    """`x` folded over `lanes`; what does not vary along a lane is there as often as the lane is long."""
    b, same = held.builder, 1
    for lane in sorted(lanes - x.lanes):
        same *= lane.size
    if op == "add" and same > 1:
        x = b.apply("mul", x, b.const(float(same) if x.dtype.is_floating_point else same, x.dtype), dtype=x.dtype)
    over = tuple(sorted(lanes & x.lanes))
    check_size(x.lanes, held.runs)
    if not over:
        return x
    rest = x.lanes - set(over)
    return b.make("fold", (x,), x.dtype, op, over, lanes=rest, wide=bool(rest))


def each(held: Held, shape: Shape, dtype: torch.dtype, function: Callable[..., Expr], *values: Lazy) -> Lazy:
    """An elementwise result of `values`, rounded to `dtype`."""
    return Lazy(held, shape, dtype, lambda index: held.builder.cast(
        function(*(x.at(aligned(index, x.shape)) for x in values)), dtype))  # fmt: skip


def count(x: Lazy, dims: Any) -> int:
    found = 1
    for dim in range(len(x.shape)) if dims is None or dims == [] else dims:
        found *= x.size(dim)
    return found


def total(held: Held, meta: Any, x: Lazy, dims: Any = None, keep: bool = False, **_: Any) -> Lazy:
    kind = torch.float32 if meta.dtype.is_floating_point else torch.int64
    sums = fold(held, "add", x, dims, keep, kind)
    return each(held, sums.shape, meta.dtype, lambda item: item, sums)


def mean(held: Held, meta: Any, x: Lazy, dims: Any = None, keep: bool = False, **_: Any) -> Lazy:
    return divided(held, fold(held, "add", x, dims, keep), count(x, dims), meta.dtype)


def divided(held: Held, x: Lazy, by: float, dtype: torch.dtype) -> Lazy:
    b = held.builder
    return each(held, x.shape, dtype, lambda item: b.apply("div", item, b.const(float(by))), x)


def extreme(op: str) -> Any:
    def handler(held: Held, meta: Any, x: Lazy, dims: Any = None, keep: bool = False) -> Lazy:
        kind = torch.float32 if meta.dtype.is_floating_point else meta.dtype
        if kind == torch.bool:
            raise Refused(f"folds {meta.dtype}")
        found = fold(held, op, x, dims, keep, kind)
        return each(held, found.shape, meta.dtype, lambda item: item, found)

    return handler


def any_of(held: Held, meta: Any, x: Lazy, dims: Any = None, keep: bool = False) -> Lazy:
    dims = [dims] if isinstance(dims, int) else dims
    b = held.builder
    if x.dtype != torch.bool:
        given, x = x, Lazy(held, x.shape, torch.bool, lambda index: cast(b, torch.bool, given.at(index)))
    found = fold(held, "maximum", x, dims, keep, torch.int32)
    return Lazy(held, found.shape, torch.bool,
                lambda index: b.apply("ne", found.at(index), b.const(0, torch.int32), dtype=torch.bool))  # fmt: skip


def var_mean(
    held: Held, meta: Any, x: Lazy, dims: Any = None, *, correction: float = 1, keepdim: bool = False
) -> list[Lazy]:
    """Two passes: the mean, then the mean square of what is left; never E[x^2] - E[x]^2, which cancels."""
    b = held.builder
    middle = divided(held, fold(held, "add", x, dims, True), count(x, dims), torch.float32)

    def away(item: Expr, mean: Expr) -> Expr:
        difference = b.apply("sub", b.cast(item, torch.float32), mean)
        return b.apply("mul", difference, difference)

    squares = fold(held, "add", each(held, x.shape, torch.float32, away, x, middle), dims, keepdim)
    variance = divided(held, squares, max(count(x, dims) - correction, 0), meta[0].dtype)
    means = divided(held, fold(held, "add", x, dims, keepdim), count(x, dims), meta[1].dtype)
    return [variance, means]


def var(held: Held, meta: Any, x: Lazy, dims: Any = None, **settings: Any) -> Lazy:
    return var_mean(held, (meta, meta), x, dims, **settings)[0]


def softmax(held: Held, meta: Any, x: Lazy, dim: int, half_to_float: bool = False) -> Lazy:
    """exp(x - max) over its sum, as eager does."""
    b = held.builder

    def power(item: Expr, high: Expr) -> Expr:
        return b.apply("exp", b.apply("sub", b.cast(item, torch.float32), high))

    powers = each(held, x.shape, torch.float32, power, x, fold(held, "maximum", x, [dim], True))
    sums = fold(held, "add", powers, [dim], True)
    return each(held, shape_of(held, meta), meta.dtype, lambda a, c: b.apply("div", a, c), powers, sums)


FOLDS: dict[Any, Any] = {
    aten.sum.dim_IntList: total, aten.sum.default: total, aten.mean.dim: mean, aten.mean.default: mean,
    aten.amax.default: extreme("maximum"), aten.amin.default: extreme("minimum"), aten.any.dim: any_of,
    aten._softmax.default: softmax, aten.var_mean.correction: var_mean, aten.var.correction: var,
}  # fmt: skip
