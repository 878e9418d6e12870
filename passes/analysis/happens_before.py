"""happens_before: which pieces a plan orders, by its streams and events alone.

    stream 0    start   A .......... C   end
    stream 1             \\__ B ____/              events A -> B and B -> C: B runs after A and before C

The host issues the pieces in the order of `plan.pieces`. What it issues to one stream runs in that order, between
streams nothing but an event orders. `start` and `end` are the caller's stream before and after the plan. Pieces go by
their index: START_AT (-1) for `start`, the number of pieces for `end`.
"""

from __future__ import annotations

from v41.plan import END, START, Plan

START_AT = -1


class Order:
    """The order of a plan whose events all go forward; one that does not orders nothing."""

    def __init__(self, plan: Plan) -> None:
        self.index = {START: START_AT, **{piece.name: i for i, piece in enumerate(plan.pieces)}, END: len(plan.pieces)}
        self._past = _pasts(plan, self.index)

    def before(self, first: int, second: int) -> bool:
        """Whether all of `first` is done when `second` begins, on any GPU at any speed."""
        return bool(self._past[second + 1] >> (first + 1) & 1)


def _pasts(plan: Plan, index: dict[str, int]) -> list[int]:
    """For `start`, each piece and `end` what is done before it begins, as bits in that order."""
    waits: dict[int, list[int]] = {}
    for event in plan.events:
        after, before = index.get(event.after), index.get(event.before)
        if after is not None and before is not None and after < before:
            waits.setdefault(before, []).append(after)
    pasts: list[int] = []
    last_on: dict[int, int] = {}  # stream -> the latest there
    for position, stream in enumerate((0, *(piece.stream for piece in plan.pieces), 0), START_AT):
        past = 0
        for earlier in (*waits.get(position, ()), *([last_on[stream]] if stream in last_on else ())):
            past |= pasts[earlier + 1] | 1 << (earlier + 1)
        pasts.append(past)
        last_on[stream] = position
    return pasts
