"""ranks: the top k of an axis, found one after the other, the lower index first among equals.

Ranked are integers: floats as bits in their order, NaN above all. Keys that nobody has twice (a number shifted up, the
index below) tell their index themselves, and are found with half the work; where the number is an int32 and lower
indices come first, it is ranked alone, since a warp finds the extreme of 32 bits in one instruction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.expr import Builder, Expr
from v41.lowering.rowwise.held.folds import over_lanes
from v41.lowering.rowwise.held.index import Index, Lane
from v41.lowering.rowwise.held.values import Held, Indices, Lazy

MOST = 32  # picks


def topk(held: Held, meta: Any, x: Lazy, k: int, dim: int = -1, largest: bool = True, _sorted: bool = True) -> Any:
    dim %= len(x.shape)
    size = x.size(dim)
    if not largest or not 0 < k <= MOST:
        raise Refused(f"ranks the least, or more than {MOST}")
    b = held.builder
    floating = x.dtype.is_floating_point
    if size == 1:
        return [x, Lazy(held, x.shape, torch.int64, lambda index: b.const(0, torch.int64))]

    def result(what: str, dtype: torch.dtype) -> Lazy:
        def compute(index: Indices) -> Expr:
            others = {lane for i, each in enumerate(index) if i != dim for lane in each.lanes()}
            taken = others | index[dim].lanes()  # a computed index may lie in lanes as long as the picks
            picks = lane_of(index[dim], k) or next(lane for n in range(64) if (lane := Lane(k, n)) not in taken)
            place = held.axis(size, used := {*others, picks})
            keys = x.at((*index[:dim], place, *index[dim + 1 :]))
            keys = b.make("ordered", (b.cast(keys, torch.float32),), torch.int32) if floating else integers(b, keys)
            found = ranked(b, keys, place, used - others - {picks}, picks, what)
            if what == "best" and floating:
                found = b.make("unordered", (found,), torch.float32)
            return b.cast(pick(held, found, picks, index[dim]), dtype)

        shape = tuple(k if i == dim else each for i, each in enumerate(x.shape))
        return Lazy(held, shape, dtype, compute)

    return [result("best", x.dtype), result("place", torch.int64)]


def lane_of(index: Index, k: int) -> Lane | None:
    """The lane that `index` is, if it is one of length k."""
    match index:
        case Index(((1, Lane() as lane),), 0) if lane.size == k:
            return lane
    return None


def integers(b: Builder, keys: Expr) -> Expr:
    return b.cast(keys, torch.int64 if keys.dtype == torch.int64 else torch.int32)


def ranked(b: Builder, keys: Expr, place: Index, over: set[Lane], picks: Lane, what: str) -> Expr:
    """The k best of `keys` along the lanes `over`, in lane `picks`: the "best" themselves, or the "place" of each."""
    lanes = (keys.lanes - over) | {picks}
    if (halves := number_above(keys, place)) is not None:
        number, shift, last = halves
        told = (tuple(sorted(over)), place, picks, False)
        table = b.make("rank", (number,), number.dtype, *told, lanes=lanes, wide=True)
        found = b.make("ranked", (table,), torch.int32, "place")
        if what == "place":
            return found
        best = b.cast(b.make("ranked", (table,), number.dtype, "best"), torch.int64)
        below = b.cast(b.apply("sub", b.const(last, torch.int32), found, dtype=torch.int32), torch.int64)
        return b.apply("add", b.apply("lshift", best, b.const(shift, torch.int64), dtype=torch.int64), below,
                       dtype=torch.int64)  # fmt: skip
    data = (tuple(sorted(over)), place, picks, tells_place(keys, place))
    table = b.make("rank", (keys,), keys.dtype, *data, lanes=lanes, wide=True)
    return b.make("ranked", (table,), keys.dtype if what == "best" else torch.int32, what)


def tells_place(keys: Expr, place: Index) -> bool:
    """Whether keys are unique because an index fills the bits below a shift."""
    parts = shifted(keys)
    if parts is None:
        return False
    _, shift, index = parts
    signs = {index.terms == tuple((sign * factor, atom) for factor, atom in place.terms) for sign in (1, -1)}
    return True in signs and index.lowest >= 0 and index.highest < 1 << shift


def number_above(keys: Expr, place: Index) -> tuple[Expr, int, int] | None:
    """Of keys that are (number << shift) + last - place, number an int32: number, shift, last."""
    parts = shifted(keys)
    if parts is None or not tells_place(keys, place):
        return None
    number, shift, index = parts
    falls = index.terms == tuple((-factor, atom) for factor, atom in place.terms)
    narrow = number.op == "cast" and number.args[0].dtype == torch.int32
    return (number.args[0], shift, index.const + place.const) if falls and narrow else None


def shifted(keys: Expr) -> tuple[Expr, int, Index] | None:
    """Number, shift and index of keys that are (number << shift) + index."""
    match keys:
        case Expr(op="add", args=(Expr(op="lshift", args=(number, Expr(op="const", data=(int() as shift,)))), low)):
            pass
        case Expr(op="add", args=(low, Expr(op="lshift", args=(number, Expr(op="const", data=(int() as shift,)))))):
            pass
        case _:
            return None
    index = low.data[0] if low.op == "index" else None
    return (number, shift, index) if isinstance(index, Index) else None


def pick(held: Held, found: Expr, picks: Lane, where: Index) -> Expr:
    """Of what lies in lane `picks`, what `where` says."""
    if where == Index(((1, picks),)):
        return found
    b = held.builder
    here = b.apply("eq", held.number(Index(((1, picks),)), torch.int32), held.number(where, torch.int32),
                   dtype=torch.bool)  # fmt: skip
    zero = b.const(0.0 if found.dtype.is_floating_point else 0, found.dtype)
    return over_lanes(held, "add", b.apply("where", here, found, zero, dtype=found.dtype), {picks})


RANKS: dict[Any, Any] = {ops.aten.topk.default: topk}
