"""overlap through torch.compile: side streams are used at the rows where they pay, in steps that become one graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch.fx import GraphModule

import v41
from tests.cpu_graphs import CpuGraphs, record_captures
from tests.passes.test_assign_streams import US, by_kind
from tests.strategies.mhc import Stack
from tests.strategies.plans import plan
from v41 import backend, overlap
from v41.errors import InvalidOptionValue
from v41.gains import file_of, keep
from v41.lowering.kept import TunedWarning
from v41.options import parse
from v41.passes.assign_streams import assign_streams, sites_of
from v41.passes.side_work import HALVES
from v41.plan import Plan
from v41.regions import region_of, regions
from v41.report import CompileReport, Decision
from v41.runtime.executor import LanesOf, events_of
from v41.tools.why_not import judged, lines

STACK = Stack(sites=1, iters=1)
JUDGED = "measured, else as predicted for H200"


class Calls(list[str]):
    """Lanes and their flights: nothing but a list of what the plan's function calls."""

    def of(self, plan: Plan) -> Any:
        assert events_of(plan) == len({event.after for event in plan.events})
        return lambda: self

    def mark(self, event: int) -> None:
        self.append(f"mark {event}")

    def wait(self, event: int) -> None:
        self.append(f"wait {event}")

    def switch(self, stream: int) -> None:
        self.append(f"switch {stream}")

    def end(self) -> None:
        self.append("end")

    def abandon(self) -> None:
        self.append("abandon")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """A CPU that has streams, on which the halves of a boundary take what `by_kind` says up to 8 rows."""
    made = Calls()

    def lanes_of(device: torch.device) -> LanesOf:
        return made.of

    def measured(plan: Plan, rungs: Any, measure: Any, *told: Any) -> Any:
        return assign_streams(plan, rungs, lambda body, rows: by_kind(body, rows) if rows <= 8 else 9.0, *told)

    for owner in (backend, overlap):
        monkeypatch.setattr(owner, "lanes_of", lanes_of)
    monkeypatch.setattr(overlap, "assign_streams", measured)
    torch.compiler.reset()
    with torch.no_grad():
        yield made


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    return record_captures(monkeypatch)


def rows_of(count: int) -> Tensor:
    made = torch.randn(count, STACK.width, generator=torch.Generator().manual_seed(count)).to(STACK.dtype)
    mark_unbacked(made, 0, shape_id="rows")
    return made


def compiled(stack: Stack = STACK, **options: Any) -> tuple[Any, list[Tensor], list[CompileReport]]:
    function, _, weights = stack.to_trace()
    fast = torch.compile(function, backend="v41", options={"codegen": "eager", "cache": False, **options})
    with v41.collect() as reports:
        fast(rows_of(3), *weights)
    return fast, weights, reports


def check_bits(fast: Any, weights: list[Tensor], count: int, stack: Stack = STACK) -> None:
    function, x = stack.to_trace()[0], rows_of(count)
    pairs = zip(fast(x, *weights), function(x, *weights), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_captured_step_switches_streams_where_it_pays(calls: Calls, graphs: list[CpuGraphs]) -> None:
    fast, weights, (report,) = compiled(overlap="on")
    assert report.plan is not None and report.plan.overlapped is not None
    assert report.plan.overlapped.pays_at == (1, 2, 4, 8)
    assert report.options["overlap"] == ("on", f"options; 1 of 1 sites (1 {JUDGED}), at 1 to 8 rows")
    assert report.passes[-1].name == "assign_streams" and report.passes[-1].applied == 1
    calls.clear()
    check_bits(fast, weights, 8)  # warms up
    check_bits(fast, weights, 8)  # is captured
    assert calls.count("end") == 2 and calls.count("switch 1") == 2 and "abandon" not in calls
    assert "rows=8" in report.captures.captured[-1] if report.captures else False
    calls.clear()
    check_bits(fast, weights, 8)  # is replayed: no call of ours
    check_bits(fast, weights, 16)
    check_bits(fast, weights, 16)
    assert not calls


def test_programs_of_a_block_share_side_work(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    made, eager = list[Any](), backend.eager_artifact
    monkeypatch.setattr(backend, "eager_artifact", lambda body: made.append(body) or eager(body))
    with backend.shared_artifacts():
        compiled(overlap="on", capture="off")
        count = len(made)
        torch.compiler.reset()
        fast, weights, _ = compiled(overlap="on", capture="off")
    assert len(made) == count > 0
    check_bits(fast, weights, 5)


def test_an_uncaptured_step_switches_streams_where_asked(calls: Calls) -> None:
    fast, weights, _ = compiled(overlap="on", capture="off")
    calls.clear()
    check_bits(fast, weights, 5)
    assert calls[0].startswith("mark") and calls[-1] == "end"
    calls.clear()
    check_bits(fast, weights, 9)
    assert not calls


def test_each_rung_has_the_plan_of_its_sites(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two boundaries the first is measured to lose beyond 2 rows; beyond 8 no plan is used."""

    def assigned(plan: Plan, rungs: Any, *told: Any) -> Any:
        sites = [p.body for p in plan.pieces if any(region_of(call).kind in US for call in regions(p.body))]

        def measured(body: GraphModule, rows: int) -> float:
            loses = body is sites[0] and rows > 2
            return 9.0 if rows > 8 else by_kind(body, rows) - 9.0 * loses

        return assign_streams(plan, rungs, measured)

    monkeypatch.setattr(overlap, "assign_streams", assigned)
    two, own = Stack(sites=2, iters=1), {"rows": (1, 2, 4, 6, 20)}
    fast, weights, (report,) = compiled(two, overlap="on", capture="off", buckets=own)
    assert report.plan is not None
    assert [each.pays_at for each in report.plan.sides] == [(1, 2), (4, 6)]
    assert report.options["overlap"] == ("on", f"options; 2 of 2 sites (2 {JUDGED}), at 1 to 6 rows")
    for rows, switches in ((1, 2), (2, 2), (3, 1), (6, 1), (7, 0), (20, 0), (21, 0)):
        calls.clear()
        check_bits(fast, weights, rows, two)
        assert calls.count("switch 1") == switches, rows


CPU = torch.device("cpu")
LOST = "it gains where it was measured on this GPU"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    return tmp_path


def site_of(report: CompileReport) -> str:
    assert report.plan is not None
    (site,) = sites_of(report.plan)
    return site.key


def decision_of(report: CompileReport) -> Decision:
    assert report.passes[-1].name == "assign_streams"
    (decision,) = report.passes[-1].decisions
    return decision


def again(**options: Any) -> CompileReport:
    torch.compiler.reset()
    return compiled(overlap="on", capture="off", **options)[2][0]


def test_a_site_that_lost_in_steps_is_off_at_these_rows_from_the_next_compile_on(calls: Calls, folder: Path) -> None:
    site = site_of(first := again())
    assert first.plan is not None and first.plan.sides[0].pays_at == (1, 2, 4, 8)
    keep(CPU, "eager", 2, {site: -1.0})
    keep(CPU, "eager", 4, {site: 2.5, "another": -1.0})
    keep(CPU, "inductor", 8, {site: -1.0})
    second = again()
    assert second.plan is not None and second.plan.sides[0].pays_at == (1, 4, 8)
    decision = decision_of(second)
    assert decision.applied and decision.times is not None
    assert {rows: decision.times["measured gain"][rows] for rows in (2, 4)} == {2: -1.0, 4: 2.5}
    assert decision.times["predicted gain"].keys() == set(overlap.RUNGS)


def test_a_site_that_lost_at_all_rows_is_refused_and_told_so(calls: Calls, folder: Path) -> None:
    site = site_of(again())
    for rows in overlap.RUNGS:
        keep(CPU, "eager", rows, {site: -1.0})
    report = again()
    assert report.plan is not None and report.plan.sides == ()
    assert report.options["overlap"] == ("off", f"options; 0 of 1 sites (1 {JUDGED}), at no rows")
    assert decision_of(report).rule == LOST
    told = list(lines(report.passes[-1], judged(report.passes[-1], None)))
    assert told[0].endswith(f'is refused by assign_streams: "{LOST}"') and "v41 bench overlap --sites" in told[-1]
    file_of(CPU).write_text("damaged")
    with pytest.warns(TunedWarning, match="is not used: its checksum does not hold"):
        assert decision_of(again()).applied


def test_a_stored_program_is_that_of_what_is_kept(calls: Calls, folder: Path) -> None:
    """Else a process that has the program on disk would never hear what was measured since."""
    site = site_of(first := again(cache=True))
    assert first.cache.startswith("miss") and again(cache=True).cache.startswith("hit")
    for rows in overlap.RUNGS:
        keep(CPU, "eager", rows, {site: -1.0})
    second = again(cache=True)
    assert second.cache.startswith("miss") and "overlap" in second.cache and decision_of(second).rule == LOST
    assert again(cache=True).cache.startswith("hit")
    assert again(cache=True).options["overlap"][0] == "off"


def test_a_failure_is_told_where_side_streams_are(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(overlap, "assign_streams", broken)
    fast, weights, (report,) = compiled(overlap="on", capture="off")
    assert report.options["overlap"] == ("off", "options; assign_streams failed: RuntimeError: out of memory")
    check_bits(fast, weights, 4)
    assert not calls


def test_rungs_are_told_in_runs() -> None:
    bare = plan("x", "y", "a: x -> y,")
    made = replace(bare, buckets={"rows": (1, 2, 4, 8, 16)}, overlapped=replace(bare, pays_at=(1, 2, 8)))
    assert (overlap.pays_told(made), overlap.pays_told(bare)) == ("1 to 2, 8", "no")


def test_captured_steps_have_side_streams_unasked(calls: Calls, graphs: list[CpuGraphs]) -> None:
    fast, weights, (report,) = compiled()
    assert report.options["overlap"] == ("on", f"auto; 1 of 1 sites (1 {JUDGED}), at 1 to 8 rows")
    for _ in range(3):
        check_bits(fast, weights, 4)
    assert calls.count("switch 1") == 2


def test_uncaptured_steps_have_none_unless_asked_for(calls: Calls) -> None:
    fast, weights, (report,) = compiled(capture="off")
    assert report.plan is not None and report.plan.overlapped is None
    assert report.options["overlap"] == ("off", 'auto: nothing is captured; overlap="on" takes uncaptured steps too')
    check_bits(fast, weights, 4)
    assert not calls


def test_it_can_be_turned_off(calls: Calls, graphs: list[CpuGraphs]) -> None:
    fast, weights, (report,) = compiled(overlap="off")
    assert report.options["overlap"] == ("off", "options") and report.passes[-1].name != "assign_streams"
    for _ in range(3):
        check_bits(fast, weights, 4)
    assert not calls and report.captures is not None and report.captures.replays == 2


def test_a_cpu_has_no_streams() -> None:
    torch.compiler.reset()
    with torch.no_grad():
        _, _, (report,) = compiled(overlap="on")
    assert report.options["overlap"] == ("off", "on: no streams on cpu")


def test_each_half_of_a_boundary_gets_a_kernel_where_kernels_are_generated() -> None:
    assert set(HALVES) <= set(backend.kernel_kinds(("triton", "eager")))
    assert set(HALVES).isdisjoint(backend.kernel_kinds(("eager",)))


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidOptionValue, match="'auto' or 'on' or 'off'"):
        parse({"overlap": "yes"}, None)
