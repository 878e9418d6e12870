"""bench overlap: bits are compared, decode loops read their own tokens, the verdict says what holds and what not."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu_graphs import CpuGraphs
from tests.strategies.plans import plan
from v41.errors import BenchNeedsGPU, StepNotCaptured
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.plan import Plan
from v41.tools import planned_step
from v41.tools.bench import overlap, overlap_stress
from v41.tools.bench.overlap import copied, overview, run, sites_table, verdict
from v41.tools.bench.overlap_stress import (
    SPIN,
    DelayedFlight,
    DelayedLanes,
    bits,
    copy_of,
    kept,
    lanes_for,
    loop,
    same,
    stressed,
)
from v41.tools.bench.program_cases import Case, prepare
from v41.tools.cli import main, parser
from v41.tools.inspect import first_layers
from v41.tools.planned_step import PlannedStep, step_of, step_on_gpu

TINY = first_layers(V41Config.preset("tiny"), 1)
DRY = ["bench", "overlap", "--device", "cpu", "--rows", "1", "4", "--context", "40", "--stress", "6"]


@cache
def dry() -> tuple[V41ForCausalLM, list[Case], PlannedStep, Namespace]:
    """One layer on the CPU: its cases, its step with side streams."""
    arguments = parser().parse_args(DRY)
    model = V41ForCausalLM.random(TINY, 0).eval().requires_grad_(False)
    with torch.no_grad():
        cases = prepare(model, arguments.rows, [], [arguments.context], room=arguments.stress)
        step, _ = step_of(model, cases[0].batch, cases[0].cache, arguments.rows)
    return model, cases, step, arguments


def test_a_step_takes_batches_of_any_size_and_any_cache() -> None:
    model, cases, step, _ = dry()
    assert [case.rows for case in cases] == [4, 1] and step.plan.sides
    for case in cases:
        twin = copy_of(case.cache)
        with torch.no_grad():
            wanted = model(case.plain, case.cache)
            (found,) = step.on(step.plan)(step.fed(case.batch, twin))
        assert torch.equal(wanted, found[: len(wanted)]) and same(kept(case.cache), kept(twin))


def test_kernels_of_a_step_are_compiled_ahead_for_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cases, step, _ = dry()
    asked = list[tuple[Plan, dict[str, int]]]()
    monkeypatch.setattr(
        planned_step, "Ahead", lambda plan, artifacts, device: lambda sizes, whole: asked.append((plan, dict(sizes)))
    )
    for case in cases:
        step.compile_ahead(step.plan.sides[0], step.fed(case.batch, case.cache))
    assert [{step.plan.sizes[symbol]: size for symbol, size in sizes.items()}["rows"] for _, sizes in asked] == [4, 1]
    assert all(sizes.keys() == step.plan.sizes.keys() for _, sizes in asked)
    assert all(plan.pieces == step.plan.sides[0].pieces and not plan.sides for plan, _ in asked)


def test_a_decode_loop_reads_its_own_tokens_and_gives_the_same_bits() -> None:
    model, (case, _), step, _ = dry()
    before = copy_of(case.cache)
    found = stressed(step, model.config, case, 6, seconds=60)
    assert (found["steps"], found["uncaptured"], found["captured"], found["caches_same"]) == (6, 0, 0, True)
    assert found["tokens"] > 1 and same(kept(before), kept(case.cache))  # requests differ, and the case is untouched
    assert stressed(step, model.config, case, 6, seconds=0)["steps"] == 1


class Quiet:
    """A flight without streams."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_captured_steps_of_the_loop_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with what stands in for graphs: several of them in turn, and every eighth step uncaptured."""
    model, (case, _), step, _ = dry()
    graphs: list[CpuGraphs] = []

    def made(device: torch.device) -> CpuGraphs:
        graphs.append(CpuGraphs())
        return graphs[-1]

    monkeypatch.setattr(overlap_stress, "CudaGraphs", made)
    monkeypatch.setattr(overlap_stress, "lanes_for", lambda *_: lambda plan: Quiet)
    found = stressed(replace(step, device=torch.device("cuda")), model.config, case, 6, seconds=60)
    assert (found["steps"], found["uncaptured"], found["captured"], found["caches_same"]) == (6, 0, 0, True)
    one, *delayed = graphs
    assert [len(delayed), one.graphs[0].replays] == [overlap_stress.GRAPHS, 5]
    assert [sum(graph.replays for graph in each.graphs) for each in delayed] == [0, 1, 0, 0]  # warm-ups, then a replay


def test_a_step_that_goes_wrong_once_spoils_the_rest() -> None:
    """Some of a cache is spoiled after the third step: what reads it has other bits from then on."""
    model, (case, _), step, _ = dry()
    one, turns = step.on(step.plan), []

    def delayed(turn: int) -> Any:
        def spoiled(inputs: list[Any]) -> tuple[Any, ...]:
            turns.append(turn)
            ring = inputs[next(place for place, name in step.places.items() if name == "ring 0")]
            results = one(inputs)
            if turn == 2:
                ring[0] = 0
            return results

        return "captured", spoiled

    found = loop(step, model.config, case, one, delayed, 6, 60)
    assert turns == list(range(6)) and found["captured"] >= 1 and not found["caches_same"]


def test_the_dry_run_writes_after_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, step, arguments = dry()
    arguments = Namespace(**vars(arguments) | {"out": tmp_path / "overlap.json"})
    written: list[int] = []

    def counted(*_: Any) -> tuple[PlannedStep, Any]:
        return step, Namespace(passes=[], options={"overlap": ("on", "test")})

    def stop_after(*_: Any) -> Any:
        written.append(len(json.loads(arguments.out.read_text())["records"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(overlap, "step_of", counted)
    result = new_result(arguments)
    run(model, arguments, result, started=overlap.time.perf_counter())
    held = verdict(json.loads(arguments.out.read_text()))
    assert [text[:14].strip() for text in held[:-1]] == ["holds", "not shown", "holds"]
    assert held[-1] == "all holds that was shown"
    assert "12 steps, 1 4 rows" in held[2] and "no step is slower" in held[1]
    monkeypatch.setattr(overlap, "stressed", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(model, arguments, new_result(arguments), started=overlap.time.perf_counter())
    assert written == [2]
    late = new_result(arguments)
    run(model, arguments, late, started=overlap.time.perf_counter() - arguments.budget)
    assert late["left_out"] == [f"{what}decode {rows}: no time" for what in ("", "stress of ") for rows in (1, 4)]


def new_result(arguments: Namespace) -> dict[str, Any]:
    return {"case": "overlap", "date": "-", "records": [], "stress": [], "left_out": []}


@pytest.mark.parametrize("value", [torch.tensor([0.0, float("nan")]), torch.tensor([1, 2]), torch.ones(2, 2).t()])
def test_bits_are_compared(value: Tensor) -> None:
    kept = copied([value, 3])
    assert same(kept, [value.clone(), 4]) and bits(value).dtype == torch.uint8
    flipped = value.clone()
    flipped[-1] += 1
    assert same(kept, [flipped, 3]) is bool(value.isnan().any() if value.is_floating_point() else False)
    assert not same([torch.tensor([0.0])], [torch.tensor([-0.0])])


GRAPH = {"nodes": 4, "edges": 4, "forks": 1, "joins": 1, "longest": 3, "branches": []}
CALM = {"rows": 4, "steps": 9, "asked": 9, "uncaptured": 0, "captured": 0, "caches_same": True, "seconds": 1.0}


def record(**changes: Any) -> dict[str, Any]:
    times = {f"{where}_{way}_us": 100.0 for where in ("captured", "uncaptured")
             for way in ("one", "side", "level", "in_order")}  # fmt: skip
    made = {"rows": 4, "on": True, "boundaries": 2, "same_bits": True, "gain_us": 0.0, "gain_us_a_boundary": 0.0}
    return made | times | {"side_graph": GRAPH} | changes


UNDER = "the bits of one stream under delays"
SLOW = {"noise_us": 1.0, "gain_us": -2.0}
VERDICTS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "all holds": ({}, {}, []),
    "slower where it is on": (SLOW, {}, ["no step is slower where it is on: 4 rows: 2.0 us more"]),
    "slower where it is off": ({**SLOW, "on": False}, {}, []),
    "no slower than another capture": ({**SLOW, "noise_us": 3.0}, {}, []),
    "other bits": (
        {"same_bits": False, "other_bits": ["side", "level"]}, {},
        ["the bits of one stream: 4 rows, side, level"]),
    "other bits under delays": (
        {}, {"captured": 2}, [f"{UNDER}: 4 rows: 2 of 9 steps differ, caches are alike"]),
    "other caches": (
        {}, {"caches_same": False}, [f"{UNDER}: 4 rows: 0 of 9 steps differ, caches differ"]),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict(case: str) -> None:
    changes, stress, broken = VERDICTS[case]
    result = {"records": [record(**changes)], "stress": [CALM | stress], "left_out": []}
    told = verdict(result)
    assert [text.removeprefix("does not hold  ") for text in told if text.startswith("does not hold")] == broken
    held = "all holds that was shown" if "off" in case else "all holds"
    assert told[-1] == ("does not all hold: 1 of 3" if broken else held)
    assert overview(result["records"]).row_count == 1


def test_each_site_is_told_with_both_gains() -> None:
    times = {"own": {1: 2.0, 64: 4.0}, "slack": {1: 9.0, 64: 9.0}, "predicted gain": {1: 3.0, 64: 1.0}}
    measured = times | {"gain": {1: 2.5, 64: 1.0}, "measured gain": {1: 2.5}}
    found = [{"site": "piece_4_side", "rule": "", "times": measured}, {"site": "b", "rule": "it is off", "times": None}]
    made = sites_table(found)
    cells = [[str(cell) for cell in column.cells] for column in made.columns]
    assert [column[0] for column in cells] == ["piece_4_side", "-", "2", "9", "3", "2.5", "4", "9", "1", "-"]
    assert [column[1] for column in cells][:3] == ["b", "it is off", "-"] and sites_table([]).row_count == 0


def test_what_was_not_run_is_not_said_to_hold() -> None:
    told = verdict({"records": [], "stress": [], "left_out": ["decode 4: no time"]})
    assert [text[:14].strip() for text in told[:-1]] == ["not shown"] * 4 and told[-1] == "nothing was shown"
    told = verdict({"records": [record()], "stress": [CALM | {"steps": 3}], "left_out": []})
    assert told[-2].startswith("cut short") and "3 of 9 steps" in told[-2]


def test_a_step_beyond_the_largest_graph_is_refused() -> None:
    _, (case, _), _, _ = dry()
    seen = Namespace(whole=None)

    @contextmanager
    def watching() -> Iterator[list[Any]]:
        yield [seen]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StepNotCaptured, match="a step of 4 rows"):
        patch.setattr("v41.tools.planned_step.watched", watching)
        step_on_gpu(lambda batch, cache: batch.tokens, case.batch, case.cache)
    assert seen.whole is None


def test_lanes_have_as_many_streams_and_events_as_the_plan() -> None:
    seen: list[Any] = []
    made = plan("x", "y", "a: x -> y,", "b@2: x -> z,", events=["start b", "b end"])
    lanes_for(lambda *facts: seen.append(facts), torch.device("cpu"), "drawn")(made)  # type: ignore[arg-type]
    assert seen == [(torch.device("cpu"), 2, 2, "drawn")]


def test_delays_stand_ahead_of_records_and_behind_waits_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            calls.append("wait")

    class Event:
        def record(self, stream: object) -> None:
            calls.append("record")

    def spins(cycles: int) -> None:
        assert 0 < cycles < SPIN
        calls.append("spin")

    monkeypatch.setattr(torch.cuda, "_sleep", spins)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: calls.append("switch"))
    lanes = DelayedLanes.__new__(DelayedLanes)
    lanes.draw = random.Random(0)
    flight = DelayedFlight(lanes, [Stream(), Stream()], [Event()])  # type: ignore[list-item]
    orders: dict[str, set[tuple[str, ...]]] = {"record": set(), "wait": set(), "switch": set()}
    for _ in range(30):
        for name, call in ("record", flight.mark), ("wait", flight.wait), ("switch", flight.switch):
            calls.clear()
            call(0)
            orders[name].add(tuple(calls))
    assert orders == {
        "record": {("record",), ("spin", "record")},
        "wait": {("wait",), ("wait", "spin")},
        "switch": {("switch",), ("switch", "spin")},
    }


def test_of_several_plans_the_one_of_the_rows_is_taken() -> None:
    _, _, step, _ = dry()
    bare = replace(step.plan, overlapped=None)
    first, second = replace(bare, pays_at=(1, 2)), replace(bare, pays_at=(4,))
    several = replace(step, plan=replace(bare, overlapped=replace(first, overlapped=second)))

    def pays(rows: int) -> Any:
        found = several.sides_at(rows)
        return found and found.pays_at

    assert [pays(rows) for rows in (1, 4, 8)] == [(1, 2), (4,), (1, 2)]
    assert replace(step, plan=bare).sides_at(1) is None and several.alone(first).sides == ()


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parser().parse_args(["bench", "overlap", "--cut", "--rows", "1", "16", "--stress", "100"])
    assert (arguments.cut, arguments.rows, arguments.stress) == (True, [1, 16], 100) and arguments.budget < 480
    if not torch.cuda.is_available():
        assert main(["bench", "overlap"]) == 2
        assert BenchNeedsGPU.fix[:20] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_holds_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--preset", "tiny", "--out", str(tmp_path / "made.json")]) == 0
    assert "holds          the bits of one stream under delays: 12 steps" in capsys.readouterr().out
