"""synchronise: no timing changes what a synchronised plan gives, no event of it can go, nothing is freed too early."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import check_fired_share
from tests.passes.test_check_plan import CHEAP, accepted, depends_on_timing
from tests.strategies.plans import piece, plan, plans
from v41.passes import synchronise as module
from v41.passes.analysis.happens_before import START_AT, freed_in_use, races
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.check_plan import check_plan
from v41.passes.synchronise import synchronise
from v41.plan import END, START, Event, Plan
from v41.runtime.executor import source_with_streams

CONES = plan(
    "x cache", "out", "critical: x -> s h,", "cone@1: s -> pre,", "attend: h cache* -> y,", "mix: s y pre -> out,"
)


def check_synchronised(drawn: Plan) -> Plan:
    """`drawn` synchronised: accepted, the same at any timing, and of no use without any one of its events."""
    made = synchronise(drawn)
    assert [(piece.name, piece.stream) for piece in made.pieces] == [(p.name, p.stream) for p in drawn.pieces]
    check_plan(made)
    assert races(PlanFacts(made)) == [] and given_too_early(made) == []
    for event in made.events:
        fewer = replace(made, events=tuple(each for each in made.events if each is not event))
        found = races(PlanFacts(fewer))
        assert found and all(race.first != race.second for race in found), event
    return made


def with_another(made: Plan, at: int, stream: int) -> Plan:
    """`made` with what another thread launches on `stream` behind position `at`, when the next piece's waits are
    issued."""
    behind = made.pieces[at + 1]
    events = made.events
    if behind.stream == stream:
        events = tuple(replace(each, before="other") if each.before == behind.name else each for each in events)
    pieces = (*made.pieces[: at + 1], piece(f"other@{stream}: ->"), *made.pieces[at + 1 :])
    return replace(made, pieces=pieces, events=events)


def given_too_early(made: Plan) -> list[str]:
    """What another thread may be given in the middle of a step while a piece uses it."""
    places = product(range(len(made.pieces) - 1), {0, *(each.stream for each in made.pieces)})
    meant = [PlanFacts(with_another(made, at, stream)) for at, stream in places]
    return [why for facts in meant for _, again, why in freed_in_use(facts) if facts.name(again) == "other"]


def on_stream(drawn: Plan, stream: int) -> Plan:
    return replace(drawn, pieces=tuple(replace(each, stream=stream) for each in drawn.pieces))


def test_a_cone_forks_behind_its_maker_and_joins_before_its_reader() -> None:
    made = check_synchronised(CONES)
    assert made.events == (Event("critical", "cone"), Event("cone", "mix"))
    assert [piece.frees for piece in made.pieces] == [("x",), (), ("cache", "h"), ("s", "pre", "y")]


def test_what_a_side_stream_still_reads_is_freed_behind_the_join() -> None:
    """Behind b the next on the stream of s would be c, which may run before cone is done; mix waits for cone."""
    sublayer = "b: s -> y,", "c: y -> z,"
    made = check_synchronised(plan("x", "out", "a: x -> s,", "cone@1: s -> pre,", *sublayer, "mix: z pre -> out,"))
    assert [piece.frees for piece in made.pieces] == [("x",), (), (), ("s", "y"), ("pre", "z")]


def test_it_is_freed_there_though_another_value_may_be_in_its_memory_and_is_held_for_longer() -> None:
    """t may be in the memory of s, or have its own: then nothing but s kept what cone still reads."""
    pieces = "a: x -> s t,", "cone@1: s -> pre,", "b: t -> y,", "c: t y -> z,", "mix: z t pre -> out,"
    made = check_synchronised(plan("x", "out", *pieces, views=["t s"]))
    assert [piece.frees for piece in made.pieces] == [("x",), (), (), ("s", "y"), ("t", "pre", "z")]


def test_another_thread_is_given_nothing_that_is_in_use() -> None:
    """Behind cone, which reads h, the caller's stream has not been told to wait for it; before mix it has."""
    made = check_synchronised(plan("x", "out", "a: x -> h s,", "cone@1: h -> pre,", "mix: s pre -> out,"))
    assert [each.frees for each in made.pieces] == [("x",), ("h",), ("s", "pre")]
    lines = source_with_streams(made).split("flight.switch(0)")
    assert ["del h" in each for each in lines] == [False, True]
    waits, gone, used, ended, last = map(lines[1].index, ("flight.wait(1)", "del h", "mix(", "flight.end()", "del s"))
    assert waits < gone < used < ended < last
    made = check_synchronised(plan("x", "out", "a: x -> h s,", "b@1: h -> y,", "c@2: s -> z,", "mix: y z -> out,"))
    assert [each.frees for each in made.pieces] == [("x",), (), ("h", "s"), ("y", "z")]


def test_a_side_stream_that_nobody_reads_is_joined_at_the_end() -> None:
    made = check_synchronised(plan("x", "y", "a: x -> y,", "b@1: x -> z,"))
    assert made.events == (Event(START, "b"), Event("b", END))


@CHEAP
@given(plans(), st.integers(0, 2))
def test_one_stream_needs_no_event(drawn: Plan, stream: int) -> None:
    """Whatever its pieces read and write; on another stream than the caller's it begins and ends with that."""
    made = check_synchronised(on_stream(drawn, stream))
    ends = (Event(START, drawn.pieces[0].name), Event(drawn.pieces[-1].name, END))
    assert made.events == (ends if stream else ())


def test_no_timing_changes_what_it_gives() -> None:
    fired: list[bool] = []

    @CHEAP
    @given(plans(), st.sampled_from([True, True, True, False]))
    def draw(drawn: Plan, several: bool) -> None:
        made = check_synchronised(drawn if several else on_stream(drawn, 0))
        fired.append(bool(made.events))
        assert not depends_on_timing(made)

    draw()
    check_fired_share(fired)


@CHEAP
@given(plans(views=True))
def test_no_timing_changes_what_it_gives_though_values_share_memory(drawn: Plan) -> None:
    assert not depends_on_timing(check_synchronised(drawn))


@CHEAP
@given(plans(), st.data())
def test_a_planted_race_is_found_and_named(drawn: Plan, data: st.DataObject) -> None:
    """An event less is a race, and what is found is what timings show: neither missed nor invented."""
    made = synchronise(drawn)
    if made.events:
        gone = data.draw(st.sampled_from(made.events))
        fewer = replace(made, events=tuple(event for event in made.events if event != gone))
        named = {name for race in races(PlanFacts(fewer)) for name in (race.first, race.second)}
        assert named <= {START, END, *(piece.name for piece in made.pieces)}
        assert unjoined(fewer) or accepted(fewer) is not depends_on_timing(fewer)


def unjoined(made: Plan) -> bool:
    return any("caller's stream" in race.rule for race in races(PlanFacts(made)))


WRONG = {  # of synchronise -> what takes its place
    "nobody waits for a writer": ("_needs", lambda facts: {at: needs - writers(facts) for at, needs in of(facts)}),
    "what nobody reads is left running": ("_needs", lambda facts: dict(of(facts)) | {facts.end: set()}),
    "a stream begins whenever it likes": ("_needs", lambda facts: {at: n - {START_AT} for at, n in of(facts)}),
    "memory is freed behind its last reader in order of issue": ("_unused_from", lambda facts, name, at: at),
}
needs_of, frees_of = module._needs, module._unused_from


def of(facts: PlanFacts) -> list[tuple[int, set[int]]]:
    return list(needs_of(facts).items())


def writers(facts: PlanFacts) -> set[int]:
    return {at for at, piece in enumerate(facts.plan.pieces) if piece.writes}


@pytest.mark.parametrize("bug", WRONG)
def test_a_bug_of_synchronise_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = plan(
        "x cache", "out", "a: x -> s,", "b@1: s -> pre,", "c: s -> t,", "d: t cache* -> y,", "e@2: cache x -> z,",
        "f: y pre z -> w,", "g@3: -> late,", "h: w -> out,",
    )  # fmt: skip
    check_synchronised(shows)
    monkeypatch.setattr(module, *WRONG[bug])
    with pytest.raises(Exception):  # noqa: B017
        check_synchronised(shows)
