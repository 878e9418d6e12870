"""inspect tells streams: which plan decode steps of which rows have, what runs beside, and in which layers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.strategies.side_work import planned, program
from tests.tools.printed import printed
from tests.tools.small_models import run_of_balanced
from tests.tools.test_timeline import sided
from v41.overlap import RUNGS
from v41.tools.cli import main
from v41.tools.html_page import lanes
from v41.tools.inspect import LayerView
from v41.tools.predicted import predicted
from v41.tools.run import Run
from v41.tools.run_folder import load, save
from v41.tools.streams_view import beside_by_layer, streams_table, streams_values, used
from v41.tools.timeline import length, schedule


def run_with_sides() -> Run:
    """Its first piece, from which the side work is cut, is layer 7; all else is in none."""
    found = sided()
    plan = replace(found.plan, overlapped=None)
    report = replace(run_of_balanced().report, plan=plan)
    parts = {**run_of_balanced().parts, "nodes": list, "work": list, "predicted": lambda: found}
    (side, *_) = (piece.name for piece in found.at(1).pieces if piece.stream)
    own = [piece for piece in plan.pieces if piece.name == side.removesuffix("_side")]
    views = [LayerView(None, pieces=[each for each in plan.pieces if each not in own]), LayerView(7, pieces=own)]
    return replace(run_of_balanced(), report=report, layers=views, parameters={}, parts=parts)


def test_rows_of_one_plan_stand_together_with_its_times_at_the_most_of_them() -> None:
    found = sided()
    few, many = used(found)
    assert few.rows + many.rows == RUNGS and few.rows[-1] == 8
    assert few.plan is found.at(8) and many.plan is found.plan and many.beside == []
    assert few.us == length(few.plan, schedule(few.plan, found.us(few.plan, 8)))
    assert few.one_stream_us == length(found.plan, schedule(found.plan, found.us(found.plan, 8)))
    assert many.us == many.one_stream_us


def test_the_table_and_the_values_say_the_same() -> None:
    plans = used(sided())
    first, second = (line.split() for line in printed(streams_table(plans))[1:])
    assert first[:3] == ["1", "to", "8"] and second[:3] == ["16", "to", str(RUNGS[-1])]
    few, many = streams_values(plans)
    assert first[3:7] == ["2", str(len(plans[0].plan.pieces)), str(len(few["streams"])), str(len(few["events"]))]
    assert second[3:7] == ["1", str(len(plans[1].plan.pieces)), "-", "-"]
    assert {*few["streams"].values()} == {1} and not many["streams"] and not many["events"]


def test_inspect_tells_them_by_layer_of_a_saved_run_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with_sides()
    assert beside_by_layer(run, used(run.predicted))[7] == 1
    save(run, tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split()[-1] == "beside"
    (line,) = [each.split() for each in told if each.startswith("7 ")]
    assert line[-1] == "1" and any(each.startswith("1 to 8") for each in told)
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["streams"] == streams_values(used(load(tmp_path / "run").predicted))


def test_a_program_without_slack_has_one_stream() -> None:
    (only,) = used(predicted(planned(program(["seam", "seam"]))))
    assert only.rows == RUNGS and only.us == only.one_stream_us and not only.beside


def test_a_program_that_knows_no_rows_has_no_decode_steps() -> None:
    made = planned(program(["seam", "seam"]))
    assert used(predicted(replace(made, sizes={}))) == [] and streams_table([]) is None
    assert not beside_by_layer(run_with_sides(), [])


def test_the_page_draws_each_stream_within_its_width() -> None:
    made = lanes(run_with_sides(), 4)
    assert len(made) == 2 and len(made[1]) == 1
    for pieces in made:
        ends = [(each["from"], each["from"] + each["for"]) for each in pieces]
        assert all(0 <= start < end <= 1000 + 1e-6 for start, end in ends)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(ends))
