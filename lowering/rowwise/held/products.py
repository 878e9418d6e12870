"""products: matrix products of rows. A short one is a fold of a tile; a long one is the front of the kernel.

    [T, 8] @ [8, 3]          sums over a lane          [T, 5120] @ [5120, 384]     a front: see front.py

A front fills memory with sums that whatever reads the product reads as if it were an input, at any index. A kernel has
one, and nothing that it multiplies may need a whole row first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.expr import Expr, reachable, widens
from v41.lowering.rowwise.held.folds import fold
from v41.lowering.rowwise.held.index import Along, Index, at
from v41.lowering.rowwise.held.values import Held, Indices, Lazy, aligned, inside
from v41.lowering.rowwise.held.views import shape_of
from v41.lowering.rowwise.products import Unrounded
from v41.lowering.rowwise.schedule import RUNS

aten = ops.aten
SHORT = 1 << 12  # elements of a row's products that are summed in registers
BLOCK = 64  # terms of a long product that are taken at a time, at most
WHOLE_ROW = ("fold", "rank", "summed")


@dataclass(frozen=True)
class Front:
    """The product that comes first: `depth` terms a sum, `columns` sums a row; its factors at (row, depth) and
    (column, depth), as they were before casts that only widened them."""

    depth: int
    columns: int
    left: Expr
    right: Expr

    @property
    def block(self) -> int:
        """Terms taken at a time: fixed, since the order of the sums follows from it."""
        return min(self.depth & -self.depth, BLOCK)

    @property
    def runs(self) -> tuple[int, int]:
        """How many runs a sum is cut into, and blocks a run: what comes out even, since no term is padded."""
        blocks = self.depth // self.block
        count = max(n for n in range(1, RUNS + 1) if blocks % n == 0)
        return count, blocks // count

    @property
    def stride(self) -> int:
        """Columns in memory."""
        return -(-self.columns // 128) * 128


def mm(held: Held, meta: Any, x: Lazy, w: Lazy) -> Lazy:
    """[T, k] @ [k, n]."""
    if None in w.shape or x.shape[0] is not None:
        raise Refused("multiplies rows with each other")
    depth, columns = x.size(1), w.size(1)
    if depth * columns <= SHORT:
        return spelled(held, meta, x, w)
    if held.front is not None:
        raise Refused("has a second long product")
    k, n = Index(((1, Along(depth, 0)),)), Index(((1, Along(columns, 1)),))
    front = Front(depth, columns, narrow(x.at((at(0), k))), narrow(w.at((k, n))))
    if front.block < 16:
        raise Refused(f"multiplies along {depth} elements, of which no 16 come at once")
    if any(expr.op in WHOLE_ROW for expr in reachable((front.left, front.right), held.builder.order)):
        raise Refused("multiplies what needs a whole row first")
    held.front = front

    def compute(index: Indices) -> Expr:
        where = inside(index[1], columns)
        sums = held.read_at("summed", where, torch.float32, front.stride, rowwise=True)
        return held.builder.cast(sums, meta.dtype)

    return Lazy(held, shape_of(held, meta), meta.dtype, compute)


def narrow(x: Expr) -> Expr:
    """`x` before a cast that only widened it: tensor cores want the narrow one."""
    return x.args[0] if x.op == "cast" and widens(x.args[0].dtype, x.dtype) and x.args[0].dtype != torch.bool else x


def spelled(held: Held, meta: Any, x: Lazy, w: Lazy) -> Lazy:
    """sum over k of x[..., a, k] * w[..., k, b]."""
    b = held.builder
    shape = (*shape_of(held, meta), x.size(-1))

    def terms(index: Indices) -> Expr:
        *batch, row, column, k = index
        left = x.at(aligned((*batch, row, k), x.shape))
        right = w.at(aligned((*batch, k, column), w.shape))
        return b.apply("mul", b.cast(left, torch.float32), b.cast(right, torch.float32))

    sums = fold(held, "add", Lazy(held, shape, torch.float32, terms), [-1], False)
    return Lazy(held, sums.shape, meta.dtype, lambda index: b.cast(sums.at(index), meta.dtype))


def bmm(held: Held, meta: Any, x: Lazy, w: Lazy) -> Lazy:
    """[T, a, k] @ [T, k, b]: a product a row."""
    if x.shape[0] is not None or None in (*x.shape[1:], *w.shape[1:]):
        raise Refused("multiplies along an axis other than the row's")
    return spelled(held, meta, x, w)


def addmm(held: Held, meta: Any, bias: Lazy, x: Lazy, w: Lazy, *, beta: float = 1, alpha: float = 1) -> Lazy:
    if beta != 1 or alpha != 1:
        raise Refused("scales an addmm")
    b = held.builder
    product = mm(held, Unrounded(meta), x, w)
    return Lazy(held, product.shape, meta.dtype, lambda index: b.cast(b.apply(
        "add", product.at(index), b.cast(bias.at(aligned(index, bias.shape)), torch.float32)), meta.dtype))  # fmt: skip


PRODUCTS: dict[Any, Any] = {aten.mm.default: mm, aten.addmm.default: addmm, aten.bmm.default: bmm}
