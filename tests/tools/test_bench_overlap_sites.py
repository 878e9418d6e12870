"""bench overlap --sites: each kind of site alone against the plan without, kept for the compiler, which obeys."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu_graphs import CpuGraphs
from tests.tools.test_bench_overlap import DRY, dry
from v41.gains import IGNORED, gained_on
from v41.passes.assign_streams import Site, assign_streams
from v41.passes.plan_passes import run_plan_pass
from v41.report import CompileReport
from v41.tools.bench import overlap_sites
from v41.tools.bench.overlap_sites import (
    best_of_each_piece,
    captured,
    compared,
    in_turn,
    kinds_of,
    measured,
    overview,
    run,
    verdict,
    with_kind,
)
from v41.tools.cli import main, parser
from v41.tools.planned_step import PlannedStep

GPU = torch.device("cuda")
ROWS = [1, 4]


@cache
def step_and_report() -> tuple[PlannedStep, CompileReport]:
    """The step of the dry run and what assign_streams says of it."""
    step = dry()[2]
    alone = step.alone(step.plan)
    report = CompileReport(options={"codegen": ("triton", "test")})
    report.passes.append(run_plan_pass("assign_streams", lambda plan: assign_streams(plan, ROWS), alone)[1])
    return step, report


def arguments_for(tmp_path: Path, **changes: Any) -> Namespace:
    arguments = parser().parse_args([*DRY[:-2], "--sites"])
    return Namespace(**vars(arguments) | {"out": tmp_path / "sites.json"} | changes)


def new_result() -> dict[str, Any]:
    return {"case": "overlap", "date": "-", "records": [], "stress": [], "left_out": []}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command as on a GPU, where a step takes 100 µs, and each site of a plan makes it so much shorter."""
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    step, report = step_and_report()
    asked: list[bool] = []

    def stepped(*_: Any) -> tuple[PlannedStep, CompileReport]:
        asked.append(IGNORED.get())
        return replace(step, device=GPU), report

    def made(gain: float, together: float = 0.0, noise: float = 0.0, **changes: Any) -> dict[str, Any]:
        """together: what every two sites that are in a plan gain beside that. noise: of other captures of no site."""

        def replayed(one: int, other: int) -> list[tuple[float, float]]:
            assert one == 0
            less = gain * other + together * (other - 1) if other else noise
            return [(100.0, 100.0 - less), (500.0, 100.0), (101.0, 101.0 - less)]

        monkeypatch.setattr(overlap_sites, "step_of", stepped)
        monkeypatch.setattr(overlap_sites, "captured", lambda step, plan, case, lanes=None: sides_in(plan))
        monkeypatch.setattr(overlap_sites, "in_turn", replayed)
        result, arguments = new_result(), arguments_for(tmp_path, **changes)
        run(dry()[0], arguments, result, started=overlap_sites.time.perf_counter())
        assert asked == [True] * len(asked)
        return result

    return made


def sides_in(plan: Any) -> int:
    """Pieces on side streams of the plan itself; its own `overlapped` counts for nothing."""
    return sum(piece.stream > 0 for piece in plan.pieces)


def test_on_a_cpu_each_kind_of_site_gives_the_bits_of_one_stream() -> None:
    _, cases, _, _ = dry()
    step, report = step_and_report()
    kinds = kinds_of(step, report)
    assert kinds and all(sides_in(with_kind(step, kind)) == len(kind.sites) for kind in kinds)
    with torch.no_grad():
        assert all(compared(step, kind, case) == {"same_bits": True} for kind in kinds for case in cases)


def test_sites_of_a_kind_are_measured_together_and_what_has_no_artifact_is_left_out() -> None:
    step, report = step_and_report()
    kinds = kinds_of(step, report)
    applied = {decision.node for decision in report.passes[-1].decisions if decision.applied}
    named = {
        f"{site.cone.piece.name}_side" if site.cone.rest else site.cone.piece.name
        for kind in kinds
        for site in kind.sites
    }
    assert applied <= named and len({kind.key for kind in kinds}) == len(kinds)
    assert all(site.key == kind.key for kind in kinds for site in kind.sites)
    assert kinds_of(replace(step, artifacts={}), report) == []
    asks = tuple(replace(piece, uncapturable="it asks the host") for piece in step.plan.pieces)
    assert kinds_of(replace(step, plan=replace(step.plan, pieces=asks)), report) == []


def test_what_steps_gain_is_kept_and_the_compiler_obeys(gpu: Any) -> None:
    step, report = step_and_report()
    gains = gained_on(GPU, "triton")
    sites = [site for kind in kinds_of(step, report) for site in kind.sites]
    assert [gains(site.key, rows) for site in sites for rows in ROWS] == [None] * len(sites) * len(ROWS)
    result = gpu(2.0)
    assert {record["gain_us"] for record in result["records"]} == {2.0} and result["codegen"] == "triton"
    assert all(record["one_us"] == 101.0 and record["predicted_us"] is not None for record in result["records"])
    known = gained_on(GPU, "triton")
    assert {known(site.key, rows) for site in sites for rows in ROWS} == {2.0}
    told = verdict(result)
    assert told[-1] == "all holds: 6 of 6 gains are kept" and len(result["records"]) == 6
    assert [text[:14].strip() for text in told[:-1]] == [*["together"] * len(ROWS), *["noise"] * len(ROWS)]
    lost = gpu(-1.5)
    assert {record["gain_us"] for record in lost["records"]} == {-1.5}
    made, decisions = assign_streams(step.alone(step.plan), ROWS, None, gained_on(GPU, "triton"))
    assert not any(decision.applied for decision in decisions) and made.sides == ()
    assert verdict(lost)[0].startswith("loses ") and verdict(lost)[0].endswith("rows: 1.5 us more")


def test_of_sites_that_lose_together_those_stay_that_gain_together(gpu: Any) -> None:
    """Three sites that spare 2 µs each by themselves cost 4 together, two of them 1: one stays."""
    step, report = step_and_report()
    assert [len(kind.sites) for kind in kinds_of(step, report)] == [1, 1, 1]
    result = gpu(2.0, together=-5.0)
    for rows in ROWS:
        together = [(each["sites"], each["gain_us"]) for each in result["together"] if each["rows"] == rows]
        assert together == [(3, -4.0), (2, -1.0), (1, 2.0)]
        of_rows = [record for record in result["records"] if record["rows"] == rows]
        assert [record["gain_us"] for record in of_rows] == [2.0] * 3
        assert [record["kept_us"] for record in of_rows] == [-1.333, -0.5, 2.0]
    made, decisions = assign_streams(step.alone(step.plan), ROWS, None, gained_on(GPU, "triton"))
    assert sum(decision.applied for decision in decisions) == 1 and sides_in(made) == 1
    told = [text[:14].strip() for text in verdict(result)]
    assert told == ["loses"] * 4 + ["together"] * 6 + ["noise"] * 2 + ["all holds: 6 o"]


@pytest.mark.parametrize("noise", [-3.0, 3.0])
def test_within_the_noise_the_compiler_judges_and_a_site_is_held_to_its_share_of_what_all_gain(
    gpu: Any, noise: float
) -> None:
    """Each site loses 1 µs by itself where two captures of one plan differ by 3; all together they spare 9."""
    step, _ = step_and_report()
    result = gpu(-1.0, together=6.0, noise=noise)
    assert result["noise_us"] == dict.fromkeys(ROWS, 3.0)
    assert [record["gain_us"] for record in result["records"]] == [-1.0] * 6
    assert [record["kept_us"] for record in result["records"]] == [3.0] * 6
    assert [(each["sites"], each["gain_us"]) for each in result["together"]] == [(3, 9.0)] * len(ROWS)
    made, decisions = assign_streams(step.alone(step.plan), ROWS, None, gained_on(GPU, "triton"))
    assert sum(decision.applied for decision in decisions) == 3 and sides_in(made) == 3


def test_all_that_gain_less_than_the_noise_together_are_off(gpu: Any) -> None:
    """Nobody knows whether 3 µs are spared where captures of one plan differ by 4."""
    step, _ = step_and_report()
    result = gpu(1.0, noise=4.0)
    assert [(each["sites"], each["gain_us"]) for each in result["together"]] == [(3, 3.0), (2, 2.0), (1, 1.0)] * 2
    assert [record["kept_us"] for record in result["records"]] == [-0.333, -1.0, -3.0] * 2
    made, _ = assign_streams(step.alone(step.plan), ROWS, None, gained_on(GPU, "triton"))
    assert made.sides == ()


def test_what_the_noise_hides_and_the_compiler_has_no_use_for_is_not_kept(gpu: Any, monkeypatch: Any) -> None:
    kinds = kinds_of(*step_and_report())
    times = kinds[0].decision.times
    assert times is not None
    useless = {**times, "gain": {rows: -1.0 for rows in times["gain"]}}
    shown = replace(kinds[0], decision=replace(kinds[0].decision, times=useless))
    monkeypatch.setattr(overlap_sites, "kinds_of", lambda step, report: [shown, *kinds[1:]])
    gpu(4.0)
    result, known = gpu(2.0, noise=3.0), gained_on(GPU, "triton")
    assert [record["kept_us"] for record in result["records"]] == [None, 2.0, 2.0] * 2
    assert [known(kind.key, 4) for kind in kinds] == [None, 2.0, 2.0]  # what was kept before is gone
    assert verdict(result)[-1] == "all holds: 4 of 6 gains are kept"


def test_what_the_compiler_would_not_hide_is_not_measured_together(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = kinds_of(*step_and_report())
    times = kinds[0].decision.times
    assert times is not None and kinds[0].hides(4) and not kinds[0].hides(64)  # nothing is known of 64 rows
    longer = {**times, "own": {rows: us + 1e6 for rows, us in times["own"].items()}}
    shown = replace(kinds[0], decision=replace(kinds[0].decision, times=longer))
    assert not shown.hides(4)
    monkeypatch.setattr(overlap_sites, "kinds_of", lambda step, report: [shown, *kinds[1:]])
    assert {each["sites"] for each in gpu(2.0)["together"]} == {2}


def test_of_a_piece_the_site_is_taken_that_gains_most() -> None:
    kinds = kinds_of(*step_and_report())
    twin = replace(kinds[0], key="twin", sites=[Site(site.cone, site.plan) for site in kinds[0].sites])
    gains = {kind.key: 1.0 for kind in kinds} | {"twin": 2.0}
    for order in ([*kinds, twin], [twin, *kinds]):
        assert best_of_each_piece(order, gains) == [*twin.sites, *(site for kind in kinds[1:] for site in kind.sites)]
        assert best_of_each_piece(order, gains | {"twin": 0.5})[0] is kinds[0].sites[0]


def test_the_json_is_written_after_every_record_and_says_what_there_was_no_time_for(gpu: Any, tmp_path: Path) -> None:
    result = gpu(2.0)
    written = json.loads((tmp_path / "sites.json").read_text())
    assert written["records"] == json.loads(json.dumps(result["records"])) and written["left_out"] == []
    assert overview(result["records"]).row_count == len(result["records"])
    late = gpu(2.0, budget=-1)
    assert late["records"] == [] and len(late["left_out"]) == len(result["records"])
    assert verdict(late)[-1] == "nothing was shown"


def test_other_bits_are_told() -> None:
    record = {"rows": 4, "site": "a_side", "same_bits": False}
    assert verdict(new_result() | {"records": [record]}) == [
        "other bits     a_side at 4 rows",
        "does not hold: other bits",
    ]
    alike = verdict(new_result() | {"records": [record | {"same_bits": True}]})
    assert alike == ["all holds: bits alone were compared"]


def test_what_is_captured_is_a_step_of_that_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (case, _), step, _ = dry()
    graphs: list[CpuGraphs] = []

    def made(device: torch.device) -> CpuGraphs:
        graphs.append(CpuGraphs())
        return graphs[-1]

    monkeypatch.setattr(overlap_sites, "CudaGraphs", made)
    with torch.no_grad():
        replay = captured(step, step.plan, case)
        replay()
        replay()
    assert [graph.replays for each in graphs for graph in each.graphs] == [2]


def test_both_take_turns_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def takes(ms: float) -> Callable[[], None]:
        def step() -> None:
            clock[0] += ms

        return step

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pairs = in_turn(takes(0.125), takes(0.0625))
    assert len(pairs) == overlap_sites.PAIRS and set(pairs) == {(125.0, 62.5)}


def test_a_sites_gain_is_its_share_of_the_median_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (case, _), step, _ = dry()
    kind = kinds_of(*step_and_report())[0]
    monkeypatch.setattr(overlap_sites, "captured", lambda *_: None)
    monkeypatch.setattr(overlap_sites, "in_turn", lambda one, other: [(10.0, 4.0), (50.0, 5.0), (12.0, 9.0)])
    monkeypatch.setattr(overlap_sites, "with_kind", lambda *_: step.plan)
    found = measured(step, replace(kind, sites=list(kind.sites)[:1] * 2), case, lambda: None)
    assert found == {"one_us": 12.0, "with_us": 5.0, "gain_us": 3.0}


@pytest.mark.slow
def test_the_command_compares_bits_on_a_cpu_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path / "cache"))
    assert main([*DRY[:-2], "--sites", "--preset", "tiny", "--out", str(tmp_path / "made.json")]) == 0
    assert "all holds: bits alone were compared" in capsys.readouterr().out
    assert not list(tmp_path.rglob("side_work_*"))


def test_stress_and_sites_are_two_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "overlap", "--sites", "--stress", "5"])
    assert "not allowed with argument" in capsys.readouterr().err
