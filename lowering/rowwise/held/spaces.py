"""spaces: which axis of the kernel's tiles each lane is. Axis 0 is the program's rows.

    store of [7, 64] out of groups of 32: lanes 7, 2, 32      tiles [ROWS, 7, 2, 32], sums of groups [ROWS, 7, 2, 1]

Lanes that meet in a tile have different axes, those that are far apart in memory the earlier ones; others may share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from v41.lowering.rowwise.expr import Expr
from v41.lowering.rowwise.held.index import Digit, Index, Lane, Part, Taken


@dataclass(frozen=True)
class Space:
    """`axis` of every lane; all tiles have `rank` axes. `row`: the axis of rows."""

    axis: dict[Lane, int]
    rank: int
    row: int | None = 0

    def across(self, axis: int) -> str:
        """The subscript that puts a vector along `axis`; nothing for vectors as they are."""
        if self.rank == 1:
            return ""
        return "[" + ", ".join(":" if i == axis else "None" for i in range(self.rank)) + "]"

    def shape(self, lanes: Iterable[Lane], rows: str = "ROWS") -> list[str]:
        """The shape of a tile with `lanes`."""
        sizes = ["1"] * self.rank
        if self.row is not None:
            sizes[self.row] = rows
        for lane in lanes:
            if not isinstance(lane, Part):
                sizes[self.axis[lane]] = str(lane.padded)
        return sizes


def assign(order: Sequence[Expr], extra: Iterable[tuple[Index, frozenset[Lane]]]) -> Space:
    """The Space of the tiles in `order`; `extra` are the offsets and lanes of stores."""
    stride: dict[Lane, int] = {}
    meetings: list[list[Lane]] = []
    for expr in order:
        found = expr.lanes | expr.args[0].lanes if expr.op in ("fold", "rank") else expr.lanes
        for each in expr.data:
            if isinstance(each, tuple):
                found |= set(each)  # those that are folded, or ranked though nothing varies along them
            if isinstance(each, Index):
                strides_of(each, stride)
        meetings.append(in_tiles(found))
    for offset, whole in extra:
        meetings.append(in_tiles(whole))
        strides_of(offset, stride)
    axis: dict[Lane, int] = {}
    after: dict[Lane, set[Lane]] = {lane: set() for lanes in meetings for lane in lanes}
    ranked = sorted(after, key=lambda lane: (-stride.get(lane, 0), lane))
    place = {lane: i for i, lane in enumerate(ranked)}
    for lanes in meetings:
        for lane in lanes:
            after[lane] |= {other for other in lanes if place[other] < place[lane]}
    for lane in ranked:
        axis[lane] = 1 + max((axis[other] for other in after[lane]), default=0)
    return Space(axis, 1 + max(axis.values(), default=0))


def in_tiles(lanes: Iterable[Lane]) -> list[Lane]:
    """Those of `lanes` that are axes of tiles."""
    return [lane for lane in lanes if not isinstance(lane, Part)]


def strides_of(index: Index, stride: dict[Lane, int]) -> None:
    """Notes the largest step of each lane in `index`."""
    for factor, atom in index.terms:
        if isinstance(atom, Lane):
            stride[atom] = max(stride.get(atom, 0), abs(factor))
        elif isinstance(atom, Digit):
            strides_of(atom.inner, stride)
        else:
            assert isinstance(atom, Taken)
