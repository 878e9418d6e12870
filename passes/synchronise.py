"""synchronise: a plan whose pieces have streams gets the events and frees that make every timing give the same.

    stream 0    critical -> sublayer ............ critical'        events   critical -> coefficients
    stream 1         \\__ coefficients ____________/                         coefficients -> critical'
                                                                   frees    the streams at critical', not before

Who waits for whom follows from what pieces read, write and share (plan_facts). A wait that other waits make needless is
left out, so each event is one that the plan cannot do without. A value is freed behind its last reader, or later: not
before the stream that allocated it has been told to wait for all who use it. For between two pieces whoever else works
on that stream, another thread of the host, may be given its memory. A value that may share memory with others may also
have its own, so each is freed as if it had.
"""

from __future__ import annotations

from dataclasses import replace

from v41.passes.analysis.happens_before import START_AT, Clocks
from v41.passes.analysis.plan_facts import PlanFacts
from v41.plan import Event, Plan


def synchronise(plan: Plan) -> Plan:
    """`plan`, whose buffers say what shares memory, with events and frees of its own. It keeps order and streams."""
    bare = replace(plan, events=(), pieces=tuple(replace(piece, frees=()) for piece in plan.pieces))
    ordered = replace(bare, events=tuple(_events(PlanFacts(bare))))
    frees = _frees(PlanFacts(ordered))
    pieces = tuple(replace(piece, frees=frees.get(at, ())) for at, piece in enumerate(ordered.pieces))
    return replace(ordered, pieces=pieces)


def _events(facts: PlanFacts) -> list[Event]:
    clocks, events = Clocks(), list[Event]()
    needs = _needs(facts)
    for at, stream in enumerate((0, *(piece.stream for piece in facts.plan.pieces), 0), START_AT):
        waits: list[int] = []
        for earlier in sorted(needs.get(at, ()), reverse=True):  # what the latest has waited for needs no wait
            if not clocks.done(stream, waits) >> (earlier + 1) & 1:
                waits.append(earlier)
        clocks.issue(stream, waits)
        events += [Event(facts.name(earlier), facts.name(at)) for earlier in reversed(waits)]
    return events


def _needs(facts: PlanFacts) -> dict[int, set[int]]:
    """Position -> those that must be done before it begins."""
    needs: dict[int, set[int]] = {at: {START_AT} for at in range(facts.end)}
    needs[facts.end] = set(range(facts.end))
    for name, at in facts.readings:
        needs[at].add(facts.made[name])
    for uses in facts.uses.values():
        for at in (at for at, writes in uses if writes):
            for other, _ in uses:
                if other != at:
                    needs[max(at, other)].add(min(at, other))
    return needs


def _frees(facts: PlanFacts) -> dict[int, tuple[str, ...]]:
    """Position -> values that are freed behind it, in order of their making."""
    read = {name for name, _ in facts.readings}
    last = {name: at for name, at in facts.makings if at != START_AT or name in read}
    last |= {name: at for name, at in facts.readings if name in last}
    found: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in facts.returned:
            found.setdefault(_unused_from(facts, name, at), []).append(name)
    return {at: tuple(names) for at, names in found.items()}


def _unused_from(facts: PlanFacts, name: str, at: int) -> int:
    """The first position from `at` on behind which each stream that may have allocated it has been told to wait for all
    who use it; the last where there is none, since all streams wait for a step's end."""

    def in_use(at: int) -> bool:
        done = [facts.order.told(stream, at) for stream in facts.streams[name]]
        return any(not past >> (use + 1) & 1 for past in done for use in facts.users[name])

    while at < facts.end - 1 and in_use(at):
        at += 1
    return at
