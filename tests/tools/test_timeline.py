"""timeline: pieces begin when their stream and what they wait for are done; the trace has a track a stream."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from tests.strategies.plans import plan, plans
from tests.strategies.side_work import by_nodes, planned, program
from tests.tools.small_models import run_of_balanced
from v41.overlap import RUNGS
from v41.passes.analysis.happens_before import Order
from v41.passes.analysis.times import Times
from v41.passes.assign_streams import assign_streams
from v41.passes.same_values import random_inputs
from v41.passes.synchronise import synchronise
from v41.plan import Plan
from v41.regions import flatten
from v41.runtime.executor import eager_artifact
from v41.tools.cli import main
from v41.tools.measured_schedule import Measured, measured_schedule, schedule_of
from v41.tools.planned_step import PlannedStep
from v41.tools.predicted import Predicted, predicted, with_times
from v41.tools.run import Run
from v41.tools.run_folder import load, save
from v41.tools.timeline import Slot, beside, length, schedule, schedule_table, trace
from v41.tools.timeline_command import config_to_measure, show
from v41.tools.why_not import times_lines

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
    assert (kinds.count("M"), kinds.count("X"), kinds.count("s"), kinds.count("f")) == (3, 4, 2, 2)
    (cone,) = (event for event in found if event["name"] == "cone")
    assert (cone["tid"], cone["ts"], cone["dur"]) == (1, 5.0, 9.0)


def test_the_table_has_a_line_a_piece() -> None:
    assert schedule_table([Slot("a", 0, 0.0, 1.0, "start")]).row_count == 1


def test_what_was_measured_stands_beside_it_under_the_same_names() -> None:
    predicted, ran = schedule(STEP, US), schedule(STEP, US | {"attend": 40.0})[:-1]
    assert [(a and a.name, b and b.name) for a, b in beside(predicted, ran)][2:] == [
        ("attend", "attend"),
        ("mix", None),
    ]
    made = schedule_table(predicted, ran)
    assert (made.row_count, len(made.columns)) == (4, 9) and len(schedule_table(predicted).columns) == 6
    events = trace(STEP, predicted, ran)["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted", "measured"]
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1} == {"critical", "cone", "attend"}
    arrows = {(e["id"], e["ph"]) for e in events if e.get("cat") == "event"}
    assert len(arrows) == 6  # two events predicted, one of them measured at both ends


@dataclass(frozen=True)
class Ran:
    """What the profiler says of a range."""

    name: str
    start: float
    end: float
    device_type: DeviceType = DeviceType.CUDA
    device_resource_id: int = 7
    is_user_annotation: bool = True

    @property
    def time_range(self) -> Interval:
        return Interval(self.start, self.end)


HOST = [Ran(f"v41 {name}", at, at + 1.0, DeviceType.CPU, 0) for at, name in enumerate(US)]
DEVICE = [Ran("v41 critical", 50, 56), Ran("v41 cone", 57, 66, device_resource_id=20), Ran("v41 attend", 57, 90),
          Ran("v41 mix", 91, 97), Ran("a kernel", 10, 50), Ran("aten::mm", 50, 52)]  # fmt: skip


def test_a_gpu_tells_when_each_piece_ran_and_where() -> None:
    made = schedule_of(STEP, [*HOST, *DEVICE], DeviceType.CUDA)
    told = [(slot.name, slot.stream, slot.start, slot.end) for slot in made.slots]
    assert told == [("critical", 0, 0, 6), ("cone", 1, 7, 16), ("attend", 0, 7, 40), ("mix", 0, 41, 47)] and made.ahead
    behind = [*HOST, Ran("v41 mix", 60, 70, DeviceType.CPU, 0)]
    assert not schedule_of(STEP, [*behind, *DEVICE], DeviceType.CUDA).ahead
    fewer = schedule_of(STEP, [*HOST, *DEVICE[:1], *DEVICE[2:]], DeviceType.CUDA)
    assert [slot.name for slot in fewer.slots] == ["critical", "attend", "mix"]
    assert schedule_of(STEP, HOST, DeviceType.CUDA).slots == []


def test_on_a_cpu_the_ranges_are_the_schedule() -> None:
    gm = program(["keep", "seam", "seam", "use", "seam"])
    made = planned(gm)
    artifacts = {piece.key: eager_artifact(piece.body) for piece in made.pieces}
    step = PlannedStep(made, artifacts, random_inputs(flatten(gm), 3), torch.device("cpu"), {})
    ran = measured_schedule(step, made)
    names, starts = [slot.name for slot in ran.slots], [slot.start for slot in ran.slots]
    assert names == [piece.name for piece in made.pieces] and starts == sorted(starts) and starts[0] == 0
    assert all(slot.stream == 0 and slot.end > slot.start for slot in ran.slots) and ran.ahead


def sided() -> Predicted:
    """Of a program whose side work pays up to 8 rows."""
    made = planned(program(["keep", "seam", "seam", "seam", "use", "seam"]))
    sides, decisions = assign_streams(made, RUNGS, lambda body, rows: by_nodes(body, rows) if rows < 9 else 5)
    return with_times(replace(made, overlapped=sides), decisions)


def test_the_plan_that_is_used_is_that_of_the_next_rung() -> None:
    """As at run time: what is judged at 4 rows counts for 3, and where it does not pay there is one stream."""
    found = sided()
    (side,) = found.plan.sides
    assert side.pays_at == (1, 2, 4, 8) and found.at(3) is found.at(8) is side
    assert found.at(9) is found.at(RUNGS[-1] + 1) is found.plan
    assert found.us(side, 10**18).keys() == {piece.name for piece in side.pieces}
    none = predicted(planned(program(["seam", "seam"])))
    assert (none.plan.sides, none.judged) == ((), []) and none.at(4) is none.plan


def test_what_a_piece_takes_is_what_the_passes_reckon_with() -> None:
    found = sided()
    reckoned = Times(found.plan.sizes)
    for each in (found.plan, *found.plan.sides):
        for rows in (1, 7, 256):
            us = found.us(each, rows)
            assert us == {piece.name: pytest.approx(reckoned.piece(piece).us(rows), rel=1e-6) for piece in each.pieces}


def run_with(found: Predicted) -> Run:
    plan = replace(found.plan, overlapped=None)
    report = replace(run_of_balanced().report, plan=plan)
    parts = {**run_of_balanced().parts, "nodes": list, "work": list, "predicted": lambda: found}
    return replace(run_of_balanced(), report=report, layers=[], parameters={}, parts=parts)


@pytest.mark.parametrize("pays", [True, False])
def test_a_saved_run_says_why_a_site_has_no_stream_and_by_what_times(
    pays: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sided()
    if not pays:
        plan = replace(found.plan, overlapped=None)
        found = with_times(plan, assign_streams(plan, RUNGS, lambda body, rows: 5.0)[1])
    save(run_with(found), tmp_path / "run")
    assert list(load(tmp_path / "run").predicted.judged) == list(found.judged)
    (site,) = found.judged
    assert main(["why-not", "assign_streams", *([site.node] if pays else []), "--run", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{site.node} is {'applied' if pays else 'refused'} by assign_streams")
    times = [line for line in told if line.endswith(" us")]
    assert len(times) == len(RUNGS) and times[0].split()[:4] == ["1", "rows", "slack", f"{site.times['slack'][1]:.1f},"]
    assert all("own " in line and "predicted gain " in line and "measured gain " in line for line in times)
    assert main(["why-not", "assign_streams", "--run", str(tmp_path / "run"), "--strict"]) == 0  # no spelling spares it
    ends = list(times_lines([site], all_rows=False))
    assert [line.split()[0] for line in ends] == ["1", str(RUNGS[-1])]


def test_the_timeline_of_a_saved_run_is_that_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Side streams as well, without a graph. What would change nothing is refused."""
    found = sided()
    run = run_with(found)
    save(run, tmp_path / "run")
    assert main(["timeline", str(tmp_path / "run"), "--rows", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    slots = schedule(found.at(4), found.us(found.at(4), 4))
    assert {slot.stream for slot in slots} == {0, 1}
    assert told["pieces"] == [asdict(slot) for slot in slots] and told["source"] == run.source
    for more, why in ((["--context", "9"], "--measure"), (["--layers", "2"], "captured with its own")):
        assert main(["timeline", str(tmp_path / "run"), *more]) == 2
        assert why in " ".join(capsys.readouterr().err.split())


def test_only_a_preset_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is named instead is a command that is understood."""
    told = {
        "preset tiny, 2 layers": "v41 timeline tiny --layers 2 --measure",
        "preset tiny, one of 4 ranks": "--measure runs a preset, whole or its first layers, in this process",
        "small_models:balanced": "and this is small_models:balanced",
    }
    for source, why in told.items():
        save(replace(run_with(sided()), source=source), tmp_path / "run")
        assert main(["timeline", str(tmp_path / "run"), "--measure"]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
    for model in ("small_models:balanced", str(tmp_path)):
        assert main(["timeline", model, "--measure"]) == 2
        assert f"and this is {model}" in " ".join(capsys.readouterr().err.split())


def test_the_name_of_a_preset_is_that_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert config_to_measure(Namespace(model="tiny", layers=1)).num_hidden_layers == 1


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sided()
    given = (found, found.at(4))
    how: dict[str, Any] = {"rows": 4, "file": tmp_path / "trace.json", "as_json": True}
    assert show(Console(width=100), "a program", *given, None, **how) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {each["name"] for each in facts["pieces"]}
    assert facts["side_streams_us"] > 0 and facts["sites"] >= facts["applied"] >= 1
    assert "measured" not in facts and "measured_us" not in facts
    ran = Measured([Slot(piece.name, 0, 1.0, 3.0, piece.border) for piece in given[1].pieces], ahead=False)
    assert show(Console(width=100), "a program", *given, ran, rows=4, file=None, as_json=False) == 0
    told = capsys.readouterr().out
    assert "4 rows, predicted" in told and "measured: 3.0 us; the host was not ahead" in told
    assert show(Console(width=100), "a program", *given, ran, rows=4, file=None, as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["measured_us"], facts["host_ahead"], len(facts["measured"])) == (3.0, False, len(given[1].pieces))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it takes a compilation")
def test_the_command_measures_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_file = tmp_path / "trace.json"
    arguments = ["--layers", "1", "--rows", "4", "--context", "40", "--measure", "--json", "--trace", str(trace_file)]
    assert main(["timeline", *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in facts["measured"]} >= {each["name"] for each in facts["pieces"]}
    assert facts["applied"] >= 1 and facts["measured_us"] > 0 and facts["source"] == "preset tiny, 1 layer"
    assert {e["pid"] for e in json.loads(trace_file.read_text())["traceEvents"]} == {0, 1}
