"""segments: the runs of neighbouring pieces of a Plan that one graph can hold, and what lies loose between them.

    pieces    rows  rows  rows+blocks  rows  rows+last 128  last 128  uncapturable  last 128
    segments  [ captured ] [  loose  ] [cap.] [   loose   ] [captured] [  loose   ] [captured]

A segment is captured if its pieces depend on one size at most, that size has buckets, no piece is uncapturable, what it
reads can be copied, and nothing is written in place that would have to be. Which size that is may differ from segment
to segment. Order is the plan's. What leaves a segment is what a later one reads or the plan returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from v41.plan import Piece, Plan
from v41.runtime.executor import Artifact, Run, flat_function
from v41.runtime.static_inputs import symbolic, uncopyable


@dataclass(frozen=True)
class Segment:
    """`size`: the name its work depends on, None for none. `captured`: whether a graph may hold it."""

    name: str
    pieces: tuple[Piece, ...]
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    frees: tuple[str, ...]
    captured: bool
    size: str | None

    def function(self, artifacts: Mapping[str, Artifact]) -> Run:
        """Runs the pieces: takes `reads` as a list, which it empties, and returns `returns`."""
        return flat_function(self.reads, self.pieces, self.returns, {p.name: artifacts[p.key] for p in self.pieces})


def segments(plan: Plan) -> list[Segment]:
    """All pieces of `plan`, in order, in segments."""
    moving = {name for name in plan.inputs if symbolic(plan.values[name])}
    uncopied = {name for name in moving if uncopyable(plan, name)}
    sizes = [_size(plan, piece, moving) if uncopied.isdisjoint(piece.reads) else LOOSE for piece in plan.pieces]
    groups = groupby(zip(_joined(sizes), plan.pieces, strict=True), key=itemgetter(0))
    return list(_segments(plan, [(size, tuple(piece for _, piece in group)) for size, group in groups]))


LOOSE, ANY = "", "any"  # no graph may hold a piece; one of any size may


def _size(plan: Plan, piece: Piece, moving: set[str]) -> str:
    """The size for each value of which a graph may hold `piece`."""
    names = {plan.sizes.get(symbol, symbol) for symbol in piece.sizes}
    stays = {name for name in plan.inputs if name not in moving}
    if piece.uncapturable is not None or len(names) > 1 or not stays.issuperset(piece.writes):
        return LOOSE
    (name,) = names or {ANY}
    return name if name in plan.buckets or name == ANY else LOOSE


def _joined(sizes: list[str]) -> list[str]:
    """Pieces that depend on no size lie with those in front of them, else with those behind; alone they stay loose."""
    for order in (range(1, len(sizes)), range(len(sizes) - 2, -1, -1)):
        for at in order:
            beside = sizes[at - 1] if order.step > 0 else sizes[at + 1]
            if sizes[at] == ANY and beside != LOOSE:
                sizes[at] = beside
    return [LOOSE if size == ANY else size for size in sizes]


def _segments(plan: Plan, groups: list[tuple[str, tuple[Piece, ...]]]) -> Iterator[Segment]:
    later = {name for name in plan.outputs if isinstance(name, str)}
    kept: list[Segment] = []
    for index, (size, pieces) in reversed(list(enumerate(groups))):
        made = [name for piece in pieces for name in piece.returns]
        reads = tuple(dict.fromkeys(name for piece in pieces for name in piece.reads if name not in made))
        kept.append(
            Segment(
                name=f"segment_{index}",
                pieces=pieces,
                reads=reads,
                returns=tuple(name for name in made if name in later),
                frees=tuple(name for name in reads if name not in later),
                captured=size != LOOSE,
                size=size or None,
            )
        )
        later.difference_update(made)
        later.update(reads)
    yield from reversed(kept)
