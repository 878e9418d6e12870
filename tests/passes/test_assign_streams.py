"""assign_streams: cones leave the path where it pays, nothing of theirs changes a bit at any timing, effects stay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tests.invariants import check_fired_share
from tests.side_streams import SideStreams
from tests.strategies.mhc import Stack, stacks
from tests.strategies.side_work import by_nodes, check_sides, planned, program, programs
from tests.strategies.tracing import trace
from v41.passes import assign_streams as module
from v41.passes import side_work, split_piece, synchronise
from v41.passes.analysis.happens_before import races
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.analysis.times import Machine
from v41.passes.assign_streams import RULES, STREAMS, assign_streams
from v41.passes.canonicalize import canonicalize
from v41.passes.check_plan import check_plan
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.outline_mhc import outline_mhc
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT
from v41.passes.plan_passes import run_plan_pass
from v41.passes.same_values import random_inputs
from v41.passes.side_work import PARTS
from v41.plan import Piece, Plan
from v41.regions import flatten, invoke_subgraph, outline, region_of, regions
from v41.report import Decision
from v41.runtime.executor import eager_artifact, executor

RUNGS = (1, 4)
FEWEST = settings(max_examples=max(1, settings.default.max_examples // 8))  # seconds each
US = {"mhc_boundary": 10.0, "mhc_critical": 4.0, "mhc_coefficients": 6.0}


def by_kind(body: GraphModule, rows: int) -> float:
    """A Measure: what the halves of a boundary take, and 9 µs for all else."""
    return next((US[region_of(call).kind] for call in regions(body) if region_of(call).kind in US), 9.0)


def boundaries(stack: Stack) -> GraphModule:
    function, row, weights = stack.to_trace()
    gm = trace(function, row, static=weights)
    for each in (canonicalize, fold_sinkhorn, outline_mhc):
        each(gm)
    return gm


def check_streams(gm: GraphModule, plan: Plan, made: Plan, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """`made` is sound, needs each of its events, and gives the plan's bits in any order that these leave open; so do
    the plans of other rungs that it holds."""
    if made.overlapped is not None:
        check_streams(gm, plan, made.overlapped, seeds)
        made = replace(made, overlapped=None)
    check_plan(made)
    check_sides(made)
    for event in made.events:
        fewer = replace(made, events=tuple(each for each in made.events if each is not event))
        assert races(PlanFacts(fewer)), f"{event} is not needed"
    artifacts = {piece.key: eager_artifact(piece.body) for piece in (*plan.pieces, *made.pieces)}
    for seed in seeds:
        inputs, twins = (random_inputs(flatten(gm), 3, seed=seed) for _ in range(2))
        torch.manual_seed(seed)
        wanted = executor(plan, artifacts)(list(inputs))
        torch.manual_seed(seed)
        results = SideStreams(made, artifacts, random.Random(seed).choice, seed=seed).run(twins)
        written = [plan.inputs.index(name) for piece in plan.pieces for name in piece.writes]
        pairs = [*((inputs[at], twins[at]) for at in written), *zip(wanted, results, strict=True)]
        for one, other in pairs:
            assert not isinstance(one, Tensor) or torch.equal(bits(one), bits(other)), f"seed {seed}"


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


@pytest.mark.slow
@FEWEST
@given(stacks())
def test_the_coefficients_of_any_boundary_run_beside_its_sublayer(stack: Stack) -> None:
    check_boundaries(stack)


def test_the_coefficients_of_every_boundary_run_beside_its_sublayer() -> None:
    check_boundaries(Stack(engrams=(1,), iters=1))


def test_where_rows_crowd_the_chip_whole_steps_alone_are_believed() -> None:
    """6 µs of 10 leave the stream, for a join of 3: not if they hold up what is beside them as long."""
    plan = partition(boundaries(Stack(sites=1, iters=1)), cut_at=CUT_AT, along=ALONG)
    machine = Machine(multiprocessors=20)
    made, (decision,) = assign_streams(plan, (10, 11), by_kind, machine=machine)
    assert made.pays_at == (10,) and decision.times is not None
    assert decision.times["measured gain"] == {10: 3.0, 11: -3.0}
    made, _ = assign_streams(plan, (10, 11), by_kind, lambda key, rows: 1.0, machine)
    assert made.pays_at == (10, 11)


def check_boundaries(stack: Stack) -> None:
    gm = boundaries(stack)
    plan = partition(gm, cut_at=CUT_AT, along=ALONG)
    made, decisions = assign_streams(plan, RUNGS, by_kind)
    kinds = [[region_of(call).kind for call in regions(piece.body)] for piece in made.pieces if piece.stream]
    boundary = [call for call in regions(gm) if region_of(call).kind == "mhc_boundary"]
    assert kinds == [["mhc_coefficients"]] * len(boundary) and all(each.applied for each in decisions)
    assert not any(region_of(call).kind in PARTS for piece in made.pieces for call in regions(piece.body))
    check_streams(gm, plan, made)


@cache
def interrupted() -> tuple[GraphModule, Plan]:
    """Three boundaries that an Engram gate parts: halves of boundaries may leave, and whole pieces."""
    gm = boundaries(Stack(engrams=(1, 2), iters=1))
    return gm, partition(gm, cut_at=CUT_AT, along=ALONG)


@FEWEST
@given(st.data())
def test_any_choice_of_sites(data: st.DataObject) -> None:
    """What gains at a number of rows decides, so any of a piece's sites may leave, and any may stay."""
    gm, plan = interrupted()
    by_piece: dict[int, list[module.Site | None]] = {}
    for site in module.sites_of(plan):
        by_piece.setdefault(site.cone.at, [None]).append(site)
    chosen = [site for each in by_piece.values() if (site := data.draw(st.sampled_from(each))) is not None]
    check_streams(gm, plan, module.with_sides(plan, chosen), [data.draw(st.integers(0, 99))])


@FEWEST
@given(programs)
def test_any_program(steps: list[str]) -> None:
    gm = program(steps)
    plan = planned(gm)
    made, _ = assign_streams(plan, RUNGS, by_nodes)
    check_streams(gm, plan, made)


def decided_of(steps: list[str]) -> list[bool]:
    """Of each cone whether it leaves, by the driver, which holds what comes out to check_plan."""
    _, run = run_plan_pass(
        "assign_streams", lambda plan: assign_streams(plan, RUNGS, by_nodes), planned(program(steps)), strict=True
    )
    return [each.applied for each in run.decisions]


def test_of_drawn_programs_some_have_work_that_leaves_and_some_have_not() -> None:
    fired: list[bool] = []

    @given(programs)
    @settings(max_examples=max(20, settings.default.max_examples // 2), phases=[Phase.generate])
    def draw(steps: list[str]) -> None:
        fired.append(any(decided_of(steps)))

    draw()
    check_fired_share(fired)


@FEWEST
@given(st.lists(st.sampled_from(["seam", "use", "gather", "keep a read"]), min_size=2, max_size=8))
def test_nothing_leaves_that_hangs_on_layers_and_on_what_is_written(steps: list[str]) -> None:
    assert not any(decided_of([*steps, "write"]))


LATE = ["keep", "seam", "seam", "seam", "use", "seam"]
EARLY = ["seam", "seam", "seam", "look up", "seam"]
BESIDE_WRITES = ["gather", "keep", "seam", "write", "seam", "keep a read", "seam", "use", "look up", "gather", "seam"]


@cache
def compiled(*steps: str) -> tuple[GraphModule, Plan]:
    gm = program(steps)
    return gm, planned(gm)


def streams_of(made: Plan) -> list[str]:
    return [f"{piece.name}@{piece.stream}" for piece in made.pieces if piece.stream]


def test_what_is_read_late_forks_behind_its_piece_and_joins_at_its_reader() -> None:
    gm, plan = compiled(*LATE)
    made, (decision,) = assign_streams(plan, RUNGS, by_nodes)
    assert decision.applied and streams_of(made) == ["piece_0_side@1"]
    assert [piece.border for piece in made.pieces if piece.stream] == ["read late: side work of piece_0"]
    check_streams(gm, plan, made)


def test_what_hangs_on_ids_alone_starts_at_once() -> None:
    gm, plan = compiled(*EARLY)
    made, decisions = assign_streams(plan, RUNGS, by_nodes)
    assert [each.applied for each in decisions] == [True]
    assert [piece.stream for piece in made.pieces[:2]] == [0, STREAMS["early"]]
    assert made.pieces[1].border.startswith("ready early: for piece_")
    check_streams(gm, plan, made)


def with_dead(piece: Piece) -> Piece:
    """`piece` with a product of each input by itself that nobody reads, ahead of all else it does."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    inputs = piece.body.graph.find_nodes(op="placeholder")
    copied |= {node: graph.node_copy(node) for node in inputs}
    for node in inputs:
        if isinstance(node.meta["val"], Tensor):
            graph.call_function(torch.ops.aten.mul.Tensor, (copied[node],) * 2).meta["val"] = node.meta["val"]
    for node in piece.body.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in side_work.results_of(piece.body)))
    return replace(piece, body=GraphModule(piece.body, graph), key=f"{piece.key} with dead nodes")


GATHERED = ["seam", "write", "seam", "seam", "gather", "seam"]  # ids are early, and what is looked up by them is not


@pytest.mark.parametrize("steps", [LATE, EARLY, GATHERED], ids=["late", "early", "dead alone"])
def test_nodes_that_nobody_needs_are_no_side_work(steps: list[str]) -> None:
    """They hang on early values, and no late result needs them; yet there is nothing to run for them."""
    gm, plan = compiled(*steps)
    dead = replace(plan, pieces=tuple(map(with_dead, plan.pieces)))
    made, decisions = assign_streams(dead, RUNGS, by_nodes)
    assert streams_of(made) == streams_of(assign_streams(plan, RUNGS, by_nodes)[0])
    assert len(decisions) == len(assign_streams(plan, RUNGS, by_nodes)[1])
    check_streams(gm, dead, made)


def test_writes_and_what_reads_them_stay() -> None:
    gm, plan = compiled(*BESIDE_WRITES)
    made, decisions = assign_streams(plan, RUNGS, by_nodes)
    assert any(each.applied for each in decisions)
    check_streams(gm, plan, made)


def test_a_body_that_layers_share_and_that_draws_stays() -> None:
    """Numbers are drawn in order: beside a sublayer that draws, others would come."""

    @torch.compiler.nested_compile_region
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return (torch.rand_like(x) @ w).exp()

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for _ in range(2):
            kept.append(noisy(x, w))
            x = x.exp() * 0.1
            for _ in range(3):
                x = x.tanh()
        return x, *kept

    gm = trace(run, torch.randn(3, 4), static=(torch.randn(4, 4),))
    for node in [node for node in gm.graph.nodes if node.target is torch.ops.aten.tanh.default]:
        outline(gm, [node], kind="seam")
    assert sum(node.target is invoke_subgraph for node in gm.graph.nodes) == 8
    plan = planned(gm)
    made, decisions = assign_streams(plan, RUNGS, by_nodes)
    assert not any(each.applied for each in decisions)
    check_streams(gm, plan, made)


def test_a_piece_that_nobody_reads_soon_leaves_as_it_is() -> None:
    """What is kept is of a piece of its own, since what stands in front of the seam is ready without it."""
    gm, plan = compiled("seam", "look up", "seam", "seam", "keep", "seam")
    made, decisions = assign_streams(plan, RUNGS, by_nodes)
    assert any(each.applied for each in decisions)
    check_streams(gm, plan, made)


def test_a_plan_without_slack_stays_as_it_is() -> None:
    _, plan = compiled("seam", "seam", "seam")
    assert assign_streams(plan, RUNGS, by_nodes) == (plan, [])


def test_it_is_used_at_the_rungs_where_it_pays() -> None:
    """Above 4 rows the rest alone takes as long as all did."""
    _, plan = compiled(*LATE)
    made, (decision,) = assign_streams(plan, (1, 4, 16, 64), lambda body, rows: by_nodes(body, rows) if rows < 9 else 5)
    assert made.pays_at == (1, 4) and made.overlapped is None and decision.times is not None
    assert {rows: gain > 0 for rows, gain in decision.times["gain"].items()} == {1: True, 4: True, 16: False, 64: False}
    assert Plan.from_json(replace(plan, overlapped=made).to_json()) == replace(plan, overlapped=made)


TWICE = ["keep", "seam", "seam", "use", "seam", "keep", "seam", "look up", "seam", "seam", "use", "seam"]


def test_a_site_is_off_at_the_rungs_where_it_costs() -> None:
    """At 8 rows the first site alone is measured to lose, so there the plan is one without it."""
    gm, plan = compiled(*TWICE)
    sites = assign_streams(plan, RUNGS, by_nodes)[1]
    first = plan.pieces[0].body

    def measure(body: GraphModule, rows: int) -> float:
        return 0.0 if rows == 8 and body is first else by_nodes(body, rows)

    made, decisions = assign_streams(plan, (1, 8), measure)
    assert len(sites) > 1 and all(each.applied for each in decisions)
    whole, fewer = made, made.overlapped
    assert fewer is not None and (whole.pays_at, fewer.pays_at) == ((1,), (8,))
    assert {*streams_of(whole)} - {*streams_of(fewer)} == {"piece_0_side@1"} and streams_of(fewer)
    assert replace(plan, overlapped=made).sides == (whole, fewer)
    check_streams(gm, plan, made)
    decision = decisions[0]
    assert decision.times is not None and decision.times["measured gain"] == decision.times["gain"]
    assert decision.times["gain"][8] < 0 < decision.times["gain"][1]
    assert decision.times["predicted gain"].keys() == {1, 8}


def test_bodies_to_be_measured_are_told_of_first() -> None:
    asked, told = list[GraphModule](), list[GraphModule]()

    def measure(body: GraphModule, rows: int) -> float:
        assert told, "told before the first is measured"
        asked.append(body)
        return by_kind(body, rows)

    assign_streams(planned(boundaries(Stack(2))), RUNGS, measure, expect=told.extend)
    assert {*map(id, asked)} == {*map(id, told)} != set()
    assign_streams(planned(boundaries(Stack(2))), RUNGS, expect=lambda bodies: pytest.fail("nothing is measured"))


def test_what_nothing_measures_is_judged_by_prediction() -> None:
    _, plan = compiled(*LATE)
    made, (decision,) = assign_streams(plan, RUNGS, lambda body, rows: None)
    assert decision.times is not None and decision.times["measured gain"] == {} and made.sides == ()
    assert decision.times["gain"] == decision.times["predicted gain"]


def test_where_one_piece_cannot_be_timed_none_of_its_times_is_believed() -> None:
    """A cone, its piece and the rest are compared with each other, and a prediction with no time of a GPU."""

    def measure(body: GraphModule, rows: int) -> float | None:
        kinds = {region_of(call).kind for call in regions(body)}
        return None if "mhc_critical" in kinds else by_kind(body, rows)

    plan = partition(boundaries(Stack(sites=1, iters=1)), cut_at=CUT_AT, along=ALONG)
    (measured,), (predicted,) = (assign_streams(plan, RUNGS, by)[1] for by in (measure, None))
    assert measured.times is not None and predicted.times is not None
    assert measured.times["measured gain"] == {} != measured.times["gain"]
    for name in ("own", "gain"):
        assert measured.times[name] == predicted.times[name]


def test_a_cone_is_named_by_its_last_node_that_computes() -> None:
    facts = PlanFacts(partition(boundaries(Stack(sites=1, iters=1)), cut_at=CUT_AT, along=ALONG))
    (cone,) = side_work.find_cones(facts)
    assert cone.nodes[-1].target is getitem  # takes the last result from the region
    assert region_of(cone.anchor).kind == "mhc_coefficients"


def test_the_plan_of_its_rung_runs() -> None:
    """Between rungs the upper one counts; beyond them, and without streams, all runs on one."""
    _, plan = compiled(*TWICE)
    made, _ = assign_streams(plan, (1, 4), lambda body, rows: by_nodes(body, rows) if rows < 4 else 2.0)
    first, second = (replace(made, pays_at=pays, overlapped=None) for pays in ((1, 2), (4,)))
    plan = replace(plan, overlapped=replace(first, overlapped=second), buckets={"rows": (1, 2, 4, 8)})
    begun: list[tuple[int, ...]] = []
    artifacts = {piece.key: eager_artifact(piece.body) for piece in (*plan.pieces, *made.pieces)}

    class Quiet:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    def lanes(of: Plan) -> Any:
        return lambda: begun.append(of.pays_at) or Quiet()

    def chosen(run: Any, rows: int) -> list[tuple[int, ...]]:
        begun.clear()
        run(inputs_of(plan, rows))
        return list(begun)

    run = executor(plan, artifacts, lanes)
    assert [chosen(run, rows) for rows in (1, 2, 3, 4)] == [[(1, 2)], [(1, 2)], [(4,)], [(4,)]]
    assert [chosen(run, rows) for rows in (5, 8, 9)] == [[], [], []]
    assert chosen(executor(plan, artifacts), 1) == []


def inputs_of(plan: Plan, rows: int) -> list[Any]:
    """Inputs of a program of side_work.py, by what each is."""
    values = {"f32[u0, 4]": torch.randn(rows, 4), "i64[u0]": torch.zeros(rows, dtype=torch.int64), "int u0": rows}
    static = {"f32[4, 4]": torch.randn(4, 4), "f32[2, 4]": torch.randn(2, 4), "f32[5, 4]": torch.zeros(5, 4)}
    return [(values | static)[plan.values[name]] for name in plan.inputs]


def flawed(rule: str) -> tuple[Plan, Any, Any]:
    """A plan, a Measure and a Gained for which a cone breaks this rule alone."""
    _, plan = compiled(*LATE)
    if "captured" in rule:
        first, *others = plan.pieces
        return replace(plan, pieces=(replace(first, uncapturable="it asks the host"), *others)), by_nodes, None
    if "takes longer" in rule:
        slow = lambda body, rows: 100.0 if any("mm" in str(node.target) for node in body.graph.nodes) else 1.0
        return plan, slow, None
    if "was measured" in rule:
        return plan, by_nodes, lambda site, rows: -0.1
    return plan, lambda body, rows: 5.0, None


FLAWS = tuple(rule for rule, _ in RULES)


def decided(rule: str) -> list[Decision]:
    plan, measure, gained = flawed(rule)
    return assign_streams(plan, RUNGS, measure, gained)[1]


@pytest.mark.parametrize("rule", FLAWS)
def test_names_the_rule_that_a_cone_breaks(rule: str) -> None:
    (decision,) = decided(rule)
    assert (decision.applied, decision.rule, decision.node) == (False, rule, "piece_0_side")
    assert "side_work.py" in decision.source


@pytest.mark.parametrize("rule", FLAWS)
def test_a_deleted_rule_lets_its_flaw_through(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RULES", tuple(each for each in RULES if each[0] != rule))
    (decision,) = decided(rule)
    assert decision.rule != rule


needed, ready = side_work._needed, side_work.Finder._ready
WRONG: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "effects may leave": (
        side_work, "effect_of", lambda node: None, ("keep a draw", *["seam"] * 7, "use", "seam")),
    "what reads a cache may leave": (
        side_work, "_needed", lambda body, soon, touched: needed(body, soon, ()),
        ("keep a read", "seam", "write", "seam", "seam", "seam", "seam", "use", "seam")),
    "a written cache is there from the start": (
        side_work.Finder, "_ready", lambda self, at, piece: unwritten(self, at, piece),
        ("seam", "write", "seam", "seam", "seam", "gather", "seam")),
    "streams without events": (module, "synchronise", lambda plan: plan, tuple(LATE)),
    "inputs are free as soon as the host is done": (
        synchronise, "_unused_from", lambda facts, memory, at: at, ("keep", "seam", "seam", "seam", "seam", "use")),
    "a part returns what it likes": (split_piece, "_renamed", lambda piece, name, names: piece, tuple(LATE)),
}  # fmt: skip


def unwritten(finder: side_work.Finder, at: int, piece: Any) -> Any:
    finder.written = set()
    return ready(finder, at, piece)


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_assignment_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, steps = WRONG[bug]
    gm, plan = compiled(*steps)

    def shows() -> None:
        made, _ = assign_streams(plan, RUNGS, by_nodes)
        check_streams(gm, plan, made)

    shows()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception):  # noqa: B017
        shows()
