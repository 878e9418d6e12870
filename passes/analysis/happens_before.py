"""happens_before: which pieces a plan orders, by its streams and events alone, and every race that this leaves open.

    stream 0    start   A .......... C   end
    stream 1             \\__ B ____/              events A -> B and B -> C: B runs after A and before C

The host issues the pieces in the order of `plan.pieces`. What it issues to one stream runs in that order, between
streams nothing but an event orders. `start` and `end` are the caller's stream before and after the plan. Memory that is
freed goes, at the moment the host frees it, back to the stream it was allocated on, and the next piece issued there may
get it, whoever still uses it. Pieces go by their index: START_AT (-1) for `start`, the number of pieces for `end`.

Each piece has a clock: all that is done before it begins, on any GPU at any speed. `races(plan)` compares what pieces
do to memory with these clocks alone; that a plan declares all they do is held to their bodies by check_plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41.plan import END, START, Plan

if TYPE_CHECKING:
    from v41.passes.analysis.plan_facts import PlanFacts

START_AT = -1
Breach = tuple[int, int, str]  # positions of two pieces, and what is wrong between them


@dataclass(frozen=True)
class Race:
    """Two launches that some timing of the streams lets meet. first, second: pieces, or START or END."""

    rule: str
    first: str
    second: str
    detail: str


class Order:
    """The order of a plan whose events all go forward; one that does not orders nothing."""

    def __init__(self, plan: Plan) -> None:
        self.index = {START: START_AT, **{piece.name: i for i, piece in enumerate(plan.pieces)}, END: len(plan.pieces)}
        self._past = _pasts(plan, self.index)
        self._streams = (0, *(piece.stream for piece in plan.pieces), 0)

    def before(self, first: int, second: int) -> bool:
        """Whether all of `first` is done when `second` begins, on any GPU at any speed."""
        return bool(self._past[second + 1] >> (first + 1) & 1)

    def told(self, stream: int, at: int) -> int:
        """What anything that `stream` is given behind position `at`, when the waits ahead of the next position are
        issued, begins after, as bits from START_AT on."""
        if self._streams[at + 2] == stream:
            return self._past[at + 2]
        last = next((i for i in range(at + 1, -1, -1) if self._streams[i] == stream), None)
        return 0 if last is None else self._past[last] | 1 << last


def _pasts(plan: Plan, index: dict[str, int]) -> list[int]:
    """For `start`, each piece and `end` what is done before it begins, as bits in that order."""
    waits: dict[int, list[int]] = {}
    for event in plan.events:
        after, before = index.get(event.after), index.get(event.before)
        if after is not None and before is not None and after < before:
            waits.setdefault(before, []).append(after)
    clock = Clocks()
    for position, stream in enumerate((0, *(piece.stream for piece in plan.pieces), 0), START_AT):
        clock.issue(stream, waits.get(position, ()))
    return clock.pasts


class Clocks:
    """Clocks of what was issued so far. `pasts`: by position from START_AT on, what is done before it begins, as bits
    in the same order."""

    def __init__(self) -> None:
        self.pasts: list[int] = []
        self._done: dict[int, int] = {}  # stream -> the latest there and all before it

    def issue(self, stream: int, waits: tuple[int, ...] | list[int]) -> None:
        """The next position, on `stream`, which waits for those at `waits`."""
        past = self._done.get(stream, 0)
        for earlier in waits:
            past |= self.pasts[earlier + 1] | 1 << (earlier + 1)
        self._done[stream] = past | 1 << len(self.pasts)
        self.pasts.append(past)

    def done(self, stream: int, waits: tuple[int, ...] | list[int] = ()) -> int:
        """What would be done before the next one on `stream` begins, did it wait for those at `waits`."""
        past = self._done.get(stream, 0)
        for earlier in waits:
            past |= self.pasts[earlier + 1] | 1 << (earlier + 1)
        return past


def races(facts: PlanFacts) -> list[Race]:
    """Every race of a plan, by rule and in order; none of a plan that gives the same at any speed."""
    return [
        Race(rule, facts.name(first), facts.name(second), detail)
        for rule, find in RACES
        for first, second, detail in find(facts)
    ]


def backward_event(facts: PlanFacts) -> Iterator[Breach]:
    index = facts.order.index
    for event in facts.plan.events:
        after, before = index.get(event.after, facts.end), index.get(event.before, facts.end)
        if event.after not in index or event.before not in index:
            yield after, before, f"an event leads from {event.after} to {event.before}, and one of them does not exist"
        elif after >= before:
            yield after, before, "the wait is issued before the event is recorded, so it waits for nothing"


def unjoined(facts: PlanFacts) -> Iterator[Breach]:
    for at in range(facts.end):
        if not facts.order.before(START_AT, at):
            yield START_AT, at, "nothing leads there from the caller's stream"
        if not facts.order.before(at, facts.end):
            yield at, facts.end, "nothing leads back to the caller's stream"


def unordered_read(facts: PlanFacts) -> Iterator[Breach]:
    for name, at in facts.readings:
        if not facts.order.before(facts.made[name], at):
            yield facts.made[name], at, f"{name} may be read while it is made"


def unordered_write(facts: PlanFacts) -> Iterator[Breach]:
    for memory, uses in facts.uses.items():
        writers = [at for at, writes in uses if writes]
        for other, _ in uses:
            for at in writers:
                first, second = sorted((at, other))
                if first < second and not facts.order.before(first, second):
                    yield first, second, f"both use the memory of {memory}, one writes it, and they have no order"


def freed_in_use(facts: PlanFacts) -> Iterator[Breach]:
    """The allocator hands freed memory out again on the stream it came from, by order of issue, whoever uses it. That
    another value may be in the same memory, and be held for longer, is no excuse: it may be in memory of its own."""
    for name, at in facts.freed:
        for again in facts.given_out(name, at):
            for use in (use for use in facts.users[name] if not facts.order.before(use, again)):
                yield use, again, f"the second may be given the memory of {name} while the first still uses it"


RACES: tuple[tuple[str, Callable[[PlanFacts], Iterator[Breach]]], ...] = (  # each may rely on those above
    ("records every event before it is waited for", backward_event),
    ("leads from the caller's stream through every piece back to it", unjoined),
    ("orders every read after the making", unordered_read),
    ("orders every write with all other uses of its memory", unordered_write),
    ("frees nothing that another stream still uses", freed_in_use),
)
