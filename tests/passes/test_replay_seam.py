"""The seam of a trimmed program takes rows where some are left out, and gives what it reads where every row is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.passes.test_trim_replay import trimmed, trimmed_twice
from tests.side_streams import SideStreams
from tests.strategies.rows import CACHES, LOCAL, READS_BEFORE, WINDOW, WRITES, Program, programs, step
from tests.strategies.rows import Step as Inputs
from tests.strategies.tracing import trace
from v41.passes import replay_seam
from v41.passes.assign_streams import sites_of, with_sides
from v41.passes.partition import partition
from v41.passes.replay_seam import KIND, Parted, outline_seam, parted, rows_taken
from v41.plan import Plan
from v41.regions import outline, regions
from v41.runtime.all_kept import AllKept, fresh
from v41.runtime.executor import eager_artifact, executor

aten = torch.ops.aten
ENOUGH = 99  # more last rows than any chunk here has
SOME = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6)), min_size=1, max_size=3)
FIRST = ["norm", "window", "by request", "experts", "ring", "gelu"]


def seams_of(plan: Plan) -> dict[str, tuple[Parted, GraphModule]]:
    return {p.key: (found, p.body) for p in plan.pieces if (found := parted(p.body)) is not None}


class Planned:
    """A trimmed program as a plan; `taken` counts how often a seam took rows."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.plan, self.taken = gm, partition(gm, cut_at=(KIND,)), 0
        artifacts = {piece.key: eager_artifact(piece.body) for piece in self.plan.pieces}
        self.seams = seams_of(self.plan)
        self.run = executor(self.plan, artifacts | {key: self.seam(*found) for key, found in self.seams.items()})

    def seam(self, apart: Parted, body: GraphModule) -> AllKept:
        take = eager_artifact(body)

        def count(*args: Any) -> Any:
            self.taken += 1
            return take(*args)

        rest = None if apart.rest is None else eager_artifact(apart.rest)
        return AllKept(apart.kept, apart.taken, apart.same, apart.reads, count, rest)

    def both(self, given: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """What the program and its plan return and leave in the caches."""
        made = []
        for run in (lambda args: self.gm(*args), self.run):
            args = list(Inputs(*(each.clone() for each in given)))
            kept = args[CACHES:]
            made.append([*run(args), *(cache[:-1] for cache in kept)])
        return made[0], made[1]


def check_equal(planned: Planned, given: Inputs) -> None:
    for expected, found in zip(*planned.both(given), strict=True):
        assert torch.equal(expected.nan_to_num(), found.nan_to_num())


@settings(max_examples=15)
@given(programs(LOCAL, READS_BEFORE, {n: WRITES[n] for n in WRITES if n != "cache"}), SOME, st.integers(0, 9))
def test_where_every_row_is_kept_nothing_is_taken(program: Program, chunks: list[tuple[int, int]], seed: int) -> None:
    planned = Planned(trimmed(["gelu", *program], 9 * WINDOW)[1])
    given = step(chunks, seed, last=ENOUGH)
    check_equal(planned, given)
    assert len(given.kept_rows) == len(given.x) and planned.taken == 0
    few = step([(0, 14), (3, 9)], seed, last=WINDOW)
    check_equal(planned, few)
    assert len(few.kept_rows) < len(few.x) and planned.taken == 1


@settings(max_examples=10)
@given(programs(LOCAL, READS_BEFORE, {n: WRITES[n] for n in WRITES if n != "cache"}), SOME, st.integers(0, 9))
def test_of_two_seams_neither_takes_where_every_row_is_kept(
    program: Program, chunks: list[tuple[int, int]], seed: int
) -> None:
    program = ["gelu", "window", *program, "window", "norm", "window"]
    last, inner = WINDOW + 2 * len(program), WINDOW + 2
    planned = Planned(trimmed_twice(program, last, inner)[1])
    assert len(planned.seams) >= 2
    check_equal(planned, step(chunks, seed, last=ENOUGH, inner=ENOUGH))
    assert planned.taken == 0
    check_equal(planned, step([(0, 6), (3, 4)], seed, last=last, inner=inner))
    assert 0 < planned.taken <= len(planned.seams)


def test_between_graphs_rows_are_taken_even_where_all_are_kept() -> None:
    """What a graph returned may be overwritten before it is read, so a seam beside graphs has memory of its own."""
    planned = Planned(trimmed(FIRST, 9)[1])
    ((apart, body),) = planned.seams.values()
    seam = planned.seam(apart, body)
    assert fresh(seam) is seam.taken and fresh(seam.taken) is seam.taken


def test_one_row_left_out_is_enough_to_take() -> None:
    planned = Planned(trimmed(FIRST, 9)[1])
    check_equal(planned, step([(0, 10), (2, 4)], last=9))
    assert planned.taken == 1


def read_late(x: Tensor, kept: Tensor, w: Tensor) -> Tensor:
    """y is read behind the seam alone; z is late, too, and needs nothing that y went into."""
    y = (x @ w).sin()
    x = (x.exp() * 0.1).tanh().tanh()
    y, x = y[kept], x[kept]
    x, z = (x + y).sin().tanh(), (x @ w).sin()
    return x.tanh().tanh() + z


def test_what_a_seam_hands_on_goes_back_to_the_stream_that_it_came_from() -> None:
    gm = trace(read_late, torch.ones(3, 4), torch.arange(3), static=(torch.ones(4, 4),))
    taken = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    outline_seam(gm, taken, taken[0].args[1][0], 3, {})  # type: ignore[index,arg-type]
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        outline(gm, [node], kind="sublayer")
    plan = partition(gm, cut_at=("sublayer", KIND), along="rows")
    products = [site for site in sites_of(plan) if aten.mm.default in {node.target for node in site.cone.nodes}]
    made = with_sides(plan, products)
    assert [piece.stream for piece in made.pieces].count(1) == len(products) == 2
    artifacts: dict[str, Any] = {piece.key: eager_artifact(piece.body) for piece in (*plan.pieces, *made.pieces)}
    for key, (apart, body) in seams_of(made).items():
        artifacts[key] = AllKept(apart.kept, apart.taken, apart.same, apart.reads, eager_artifact(body), None)
    made_of = {"int": lambda: 3, "i64": lambda: torch.arange(3), "f32": lambda: torch.linspace(-1, 1, 12).view(3, 4)}
    inputs, twins = (
        [torch.eye(4) if plan.values[name] == "f32[4, 4]" else made_of[plan.values[name][:3]]() for name in plan.inputs]
        for _ in range(2)
    )
    (wanted,) = executor(plan, artifacts)(inputs)
    (found,) = SideStreams(made, artifacts, max).run(twins)  # side streams as early as they may
    assert torch.equal(wanted, found)


def test_a_decode_step_launches_no_gather() -> None:
    """All that is left of the seam lays kept rows out by request."""
    ((apart, _),) = Planned(trimmed(FIRST, 9)[1]).seams.values()
    assert apart.rest is not None and apart.same.count(None) == 1
    left = [str(node.target) for node in apart.rest.graph.nodes if node.op == "call_function"]
    assert not any("index" in each or "searchsorted" in each for each in left)
    assert [each for each in left if "sub" not in each and "sym" not in each] == [
        "aten.unsqueeze.default", "aten.add.Tensor", "aten.clamp_max.default",
    ]  # fmt: skip


def test_a_piece_without_a_seam_is_left_alone() -> None:
    _, gm, _ = trimmed(FIRST, 9)
    (whole,) = partition(gm).pieces  # in which the seam is not alone
    assert parted(whole.body) is None
    (call,) = regions(gm, KIND)
    assert call.target is torch.ops.higher_order.invoke_subgraph


def test_rows_are_told_of_what_was_there_before_the_seam() -> None:
    """Not by another index, nor along another dimension, nor where nobody reads them any more."""

    def take(x: Tensor, kept: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return x[kept], x.sin()[other], x.T.cos()[:, kept], x.exp()[kept]

    gm = trace(take, torch.randn(5, 3), torch.arange(3), torch.arange(3), sizes=("rows", "last", "last"))
    x, kept, _ = (node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], Tensor))
    (exp,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    made = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    call = outline_seam(gm, made, kept, 2, {})
    assert call is not None and len(call.users) == 4
    assert rows_taken(call).keys() == {x, exp}
    gm.graph.output_node().args = ([rows_taken(call)[exp]],)
    for user in [user for user in call.users if not user.users]:
        gm.graph.erase_node(user)
    assert rows_taken(call).keys() == {exp}


def never(*_: object) -> None:
    return None


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "places are never numbers": ("_end", lambda equal, node: node),
    "rows are taken along no dimension": ("_taken_along", never),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_seeded_bug_leaves_gathers(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gm, _ = trimmed(FIRST, 9)
    plan = partition(gm, cut_at=(KIND,))
    ((apart, _),) = seams_of(plan).values()
    assert apart.same.count(None) == 1
    monkeypatch.setattr(replay_seam, *WRONG[bug])
    ((apart, _),) = seams_of(plan).values()
    assert apart.same.count(None) > 1 or apart.rest is None or "index" in str(apart.rest.graph)
