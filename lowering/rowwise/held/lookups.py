"""lookups: elements at indices that the kernel computes.

    table[i]                      read from memory at i, kept within the table
    scores.gather(-1, picks)      the same; of scores that lie in memory in parts, all are read, and those picked kept

A damaged index gives some element, or zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.expr import Expr, reachable
from v41.lowering.rowwise.held.folds import over_lanes
from v41.lowering.rowwise.held.index import Index, Lane, Taken
from v41.lowering.rowwise.held.values import Held, Indices, Lazy, too_many
from v41.lowering.rowwise.held.views import shape_of

aten = ops.aten


def gather(held: Held, meta: Any, x: Lazy, dim: int, picked: Lazy, **_: Any) -> Lazy:
    """Out of memory, by address; of what a product in front is summed to, out of registers: the sums lie in parts."""
    dim %= len(x.shape)
    size = x.size(dim)

    def compute(index: Indices) -> Any:
        where = picked.at(index)
        if held.front is not None and (found := picked_among(held, x, dim, index, where)) is not None:
            return found
        return x.at((*index[:dim], taken(where, size), *index[dim + 1 :]))

    return Lazy(held, shape_of(held, meta), x.dtype, compute)


def picked_among(held: Held, x: Lazy, dim: int, index: Indices, where: Expr) -> Expr | None:
    """The elements of `x` at `where` along axis `dim`, chosen among all along it; None where `x` does not hang on a
    product in front, or these are too many at once."""
    if not (x.dtype.is_floating_point or x.dtype in (torch.int32, torch.int64)):
        return None
    b, used = held.builder, set[Lane]()
    for each in index:
        used |= each.lanes()
    along = held.axis(x.size(dim), among := set(used))
    value = x.at((*index[:dim], along, *index[dim + 1 :]))
    lanes = among - used
    summed = any(expr.op == "summed" for expr in reachable([value], b.order))
    if not summed or too_many(lanes | where.lanes | used, held.runs):
        return None
    kind = torch.int32 if x.dtype.is_floating_point else x.dtype  # bits, which a sum with zeros leaves as they are
    if x.dtype.is_floating_point:
        value = b.make("bits", (b.cast(value, torch.float32),), kind)
    here = b.apply("eq", held.number(along, torch.int32), b.cast(where, torch.int32), dtype=torch.bool)
    found = over_lanes(held, "add", b.apply("where", here, value, b.const(0, kind), dtype=kind), lanes)
    return b.cast(b.make("bits", (found,), torch.float32), x.dtype) if x.dtype.is_floating_point else found


def embedding(held: Held, meta: Any, table: Lazy, rows: Lazy, *_: Any, **__: Any) -> Lazy:
    size = table.size(0)
    return Lazy(held, shape_of(held, meta), table.dtype,
                lambda index: table.at((taken(rows.at(index[:-1]), size), index[-1])))  # fmt: skip


def index_select(held: Held, meta: Any, x: Lazy, dim: int, picked: Lazy) -> Lazy:
    dim %= len(x.shape)
    size = x.size(dim)
    return Lazy(held, shape_of(held, meta), x.dtype, lambda index: x.at(
        (*index[:dim], taken(picked.at((index[dim],)), size), *index[dim + 1 :])))  # fmt: skip


def taken(expr: Any, size: int) -> Index:
    return Index(((1, Taken(expr, size)),))


LOOKUPS: dict[Any, Any] = {
    aten.gather.default: gather, aten.embedding.default: embedding, aten.index_select.default: index_select,
}  # fmt: skip
