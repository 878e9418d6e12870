"""segments: the runs of neighbouring pieces of a Plan that one graph can hold, and what lies loose between them.

    pieces    rows  rows  rows+blocks  rows  uncapturable  rows
    segments  [ captured ] [  loose  ] [cap.] [  loose   ] [cap.]

A segment is captured if its pieces depend on one size at most, that size has buckets, no piece is uncapturable, what it
reads can be copied, and nothing is written in place that would have to be. Order is the plan's. What leaves a segment
is what a later one reads or the plan returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

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
    sizes = {name for piece in plan.pieces if (name := _one_size(plan, piece)) is not None}
    (only,) = sizes if len(sizes) == 1 else (None,)  # one axis: with two, steps would seldom lie on both ladders
    uncopied = {name for name in moving if uncopyable(plan, name)}
    groups = groupby(plan.pieces, lambda piece: _holds(plan, piece, only, moving) and uncopied.isdisjoint(piece.reads))
    return list(_segments(plan, [(captured, tuple(pieces)) for captured, pieces in groups], only))


def _one_size(plan: Plan, piece: Piece) -> str | None:
    names = {plan.sizes.get(symbol, symbol) for symbol in piece.sizes}
    (name,) = names if len(names) == 1 else (None,)
    return name if name in plan.buckets else None


def _holds(plan: Plan, piece: Piece, size: str | None, moving: set[str]) -> bool:
    """Whether a graph for each value of `size` may hold `piece`."""
    names = {plan.sizes.get(symbol, symbol) for symbol in piece.sizes}
    stays = {name for name in plan.inputs if name not in moving}
    return size is not None and piece.uncapturable is None and names <= {size} and stays.issuperset(piece.writes)


def _segments(plan: Plan, groups: list[tuple[bool, tuple[Piece, ...]]], size: str | None) -> Iterator[Segment]:
    later = {name for name in plan.outputs if isinstance(name, str)}
    kept: list[Segment] = []
    for index, (captured, pieces) in reversed(list(enumerate(groups))):
        made = [name for piece in pieces for name in piece.returns]
        reads = tuple(dict.fromkeys(name for piece in pieces for name in piece.reads if name not in made))
        kept.append(
            Segment(
                name=f"segment_{index}",
                pieces=pieces,
                reads=reads,
                returns=tuple(name for name in made if name in later),
                frees=tuple(name for name in reads if name not in later),
                captured=captured,
                size=size if captured else None,
            )
        )
        later.difference_update(made)
        later.update(reads)
    yield from reversed(kept)
