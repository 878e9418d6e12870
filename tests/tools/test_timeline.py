"""timeline: pieces begin when their stream and what they wait for are done; the trace has a track a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.plans import plan, plans
from tests.strategies.side_work import planned, program
from v41.passes.analysis.happens_before import Order
from v41.passes.synchronise import synchronise
from v41.plan import Plan
from v41.tools.timeline import Slot, length, schedule, schedule_table, trace
from v41.tools.timeline_command import show

PIECES = "critical: x -> s h,", "cone@1: s -> pre,", "attend: h -> y,", "mix: s y pre -> out,"
STEP = synchronise(plan("x", "out", *PIECES))
US = {"critical": 5.0, "cone": 9.0, "attend": 30.0, "mix": 5.0}


def slots(us: dict[str, float], made: Plan = STEP) -> list[tuple[str, float, float]]:
    return [(slot.name, slot.start, slot.end) for slot in schedule(made, us)]


def test_side_work_hides_behind_what_takes_longer() -> None:
    assert slots(US) == [("critical", 0, 5), ("cone", 5, 14), ("attend", 5, 35), ("mix", 35, 40)]
    assert length(STEP, schedule(STEP, US)) == 40


def test_side_work_that_takes_longer_is_waited_for() -> None:
    assert slots(US | {"cone": 50.0})[-1] == ("mix", 55, 60)


def test_what_the_caller_waits_for_at_the_end_counts() -> None:
    late = synchronise(plan("x", "y", "a: x -> y,", "b@1: x -> z,"))
    assert length(late, schedule(late, {"a": 1.0, "b": 7.0})) == 7


@given(plans(), st.data())
def test_no_slot_begins_before_what_it_waits_for(drawn: Plan, data: st.DataObject) -> None:
    made = synchronise(drawn)
    us = {piece.name: data.draw(st.floats(0.5, 9)) for piece in made.pieces}
    found, order = schedule(made, us), Order(made)
    for i, first in enumerate(found):
        for j, second in enumerate(found):
            assert not order.before(i, j) or first.end <= second.start


def test_the_trace_has_a_track_a_stream_and_an_arrow_an_event() -> None:
    found = trace(STEP, schedule(STEP, US))["traceEvents"]
    kinds = [event["ph"] for event in found]
    assert (kinds.count("M"), kinds.count("X"), kinds.count("s"), kinds.count("f")) == (2, 4, 2, 2)
    (cone,) = (event for event in found if event["name"] == "cone")
    assert (cone["tid"], cone["ts"], cone["dur"]) == (1, 5.0, 9.0)


def test_the_table_has_a_line_a_piece() -> None:
    assert schedule_table([Slot("a", 0, 0.0, 1.0, "start")]).row_count == 1


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(program(["keep", "seam", "seam", "seam", "use", "seam"]))
    assert show(made, 4, tmp_path / "trace.json", as_json=True) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {each["name"] for each in facts["pieces"]}
    assert facts["side_streams_us"] > 0 and facts["sites"] >= 1
    assert show(made, 4, None, as_json=False) == 0
    assert "4 rows, predicted" in capsys.readouterr().out
