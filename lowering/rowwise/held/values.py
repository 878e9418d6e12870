"""values: a tensor of the body as a function from an index to an expression; nothing is computed unasked.

    y = x[:, 448:] * w       y.at(c) is mul(x.at(c + 448), w.at(c))

The row axis is None in a shape, and its index says nothing: a program has its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.expr import Builder, Expr
from v41.lowering.rowwise.held.index import Digit, Index, Lane, at, may_leave, total
from v41.lowering.rowwise.read import Tensor

Shape = tuple[int | None, ...]
Indices = tuple[Index, ...]
UNCUT = 16  # a lane so short stays whole unless asked
LARGEST = 1 << 14  # elements of a row, or of a part of it, that a program has at once: what its registers hold
LONG, MOST_RUNS = 1024, 9  # an axis so long, of an odd number of equal runs up to this, is taken run by run


@dataclass(eq=False)
class Lazy:
    """A tensor. `parts`: where it is others laid side by side along one axis, (axis, start, tensor) of each."""

    held: Held
    shape: Shape
    dtype: torch.dtype
    compute: Callable[[Indices], Expr]
    parts: tuple[tuple[int, int, Lazy], ...] = ()
    known: dict[Any, Expr] = field(default_factory=dict)

    def at(self, index: Indices) -> Expr:
        key = (self.held.splits_at, index)
        if key not in self.known:
            before, self.held.builder.name = self.held.builder.name, self.held.name_of(self)
            self.known[key] = self.compute(index)
            self.held.builder.name = before
        return self.known[key]

    def size(self, dim: int) -> int:
        size = self.shape[dim]
        if size is None:
            raise Refused("works along the row axis")
        return size


@dataclass
class Held:
    """What is known while a body is read. `splits`: size of a lane -> how much of it is inner, a table for each store
    and one, at None, for what all of them share."""

    builder: Builder
    rows: Any = None
    inputs: list[Tensor | None] = field(default_factory=list)
    splits: dict[Any, dict[int, int]] = field(default_factory=dict)
    splits_at: Any = None
    names: dict[Lazy, str] = field(default_factory=dict)
    store: Indices = ()  # the index of the store that is asked for
    front: Any = None  # the product whose sums come before everything else (products.py)
    parts: int = 1  # of axis 1 of all results, each by a program of its own
    cuts: bool = True  # whether long axes are taken run by run; else their odd part is a lane, which is padded
    runs: int = 1  # the most that an axis is cut into

    def runs_of(self, size: int) -> int:
        """Into how many runs an axis is cut, each a power of two long: no lane of it is padded then."""
        count = size // (size & -size) if self.cuts and size >= LONG else 1
        if count > MOST_RUNS:
            return 1
        self.runs = max(self.runs, count)
        return count

    def name_of(self, value: Lazy) -> str:
        return self.names.get(value, self.builder.name)

    def factors(self, size: int) -> list[int]:
        """Lanes of an axis, the outermost first: an odd part, which is padded, and powers of two, cut where asked."""
        if size == 1:
            return []
        inner = self.splits.get(self.splits_at, {}).get(size, size & -size if size > UNCUT else size)
        return [*self.factors(size // inner), *self.factors(inner)] if 1 < inner < size else [size]

    def axis(self, size: int, used: set[Lane]) -> Index:
        """An index over a whole axis, in lanes that are not in `used`, to which they are added."""
        terms, unit = list[tuple[int, Any]](), size
        for factor in self.factors(size):
            unit //= factor
            lane = next(lane for n in range(64) if (lane := Lane(factor, n)) not in used)
            used.add(lane)
            terms.append((unit, lane))
        return Index(tuple(terms))

    def fetch(self, source: int, tensor: Tensor, index: Indices) -> Expr:
        """The element of input `source` at `index`; outside of the tensor, some element of it."""
        row = 0
        offset = Index()
        for size, stride, where in zip(tensor.shape, tensor.steps, index, strict=True):
            if size is None:
                row = stride
            else:
                offset = offset + inside(where, size) * stride
        return self.read_at("fetch", offset, tensor.dtype, source, row, rowwise=row > 0)

    def read_at(self, op: str, offset: Index, dtype: torch.dtype, *data: object, rowwise: bool) -> Expr:
        taken = tuple(offset.taken())
        lanes = check_size(offset.lanes(), self.runs)
        varies = rowwise or any(expr.row for expr in taken)
        return self.builder.make(op, taken, dtype, *data, offset, lanes=lanes, row=varies, wide=bool(lanes))

    def number(self, index: Index, dtype: torch.dtype) -> Expr:
        """An index as a value."""
        if index.number is not None:
            return self.builder.const(index.number, dtype)
        return self.read_at("index", index, dtype, rowwise=False)

    def below(self, index: Index, bound: int) -> Expr:
        """Whether `index` is below `bound`."""
        return self.read_at("below", index, torch.bool, bound, rowwise=False)


class TooLarge(Refused):
    """A tile that no program holds: less of the row may be asked for at a time."""


def inside(where: Index, size: int) -> Index:
    """`where`, kept within the axis if it may leave it: in lanes that nobody reads, or by a damaged index."""
    if not may_leave(where, size) and not where.taken():
        return where
    if where.number is not None:
        return at(min(max(where.number, 0), size - 1))
    return Index(((1, Digit(where, 1, size)),))


def check_size(lanes: Iterable[Lane], runs: int) -> frozenset[Any]:
    if count := too_many(found := frozenset(lanes), runs):
        raise TooLarge(f"holds {count} values of a row at once")
    return found


def too_many(lanes: Iterable[Lane], runs: int) -> int:
    """The elements of `runs` tiles with `lanes`, if they are more than a program holds."""
    count = runs
    for lane in lanes:
        count *= lane.padded
    return count if count > LARGEST else 0


def aligned(index: Indices, shape: Shape) -> Indices:
    """`index` of a broadcast result, for an operand of `shape`."""
    own = index[len(index) - len(shape) :]
    return tuple(at(0) if size == 1 else each for each, size in zip(own, shape, strict=True))


def flat(index: Indices, shape: Shape) -> Index:
    """The number of an element among those of a row."""
    found, step = list[Index](), 1
    for each, size in zip(reversed(index), reversed(shape), strict=True):
        if size is not None:
            found.append(each * step)
            step *= size
    return total(found)
