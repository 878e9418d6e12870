"""partition: cuts where told, borders are what lives, equal pieces have one key, order and results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import SymInt, Tensor
from torch.fx import GraphModule

from tests.invariants import check_borders, check_plan_runs
from tests.strategies.tracing import trace
from v41.passes.partition import partition
from v41.passes.pipeline import copy_of
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.plan import Plan
from v41.regions import outline

aten = torch.ops.aten
ROWS, WEIGHTS = torch.randn(3, 4), tuple(torch.randn(4, 4) for _ in range(6))


def seam(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).tanh()


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = seam(x, (x @ w).relu())
    return x


def with_seams(function: Callable[..., Any], *rows: Tensor, static: tuple[Tensor, ...] = ()) -> GraphModule:
    """`function` traced, each add-and-tanh of it a region of kind "seam"."""
    gm = trace(function, *rows, static=static)
    for node in [node for node in gm.graph.nodes if node.target is aten.tanh.default]:
        outline(gm, [node.args[0], node], kind="seam")
    return gm


def test_a_program_without_regions_is_one_piece() -> None:
    gm = trace(layers, ROWS, static=WEIGHTS)
    plan = partition(gm, cut_at=["seam"])
    assert [piece.border for piece in plan.pieces] == ["start of the graph"]
    check_borders(plan)
    check_plan_runs(gm, plan)


def test_seams_and_what_lies_between_are_pieces_and_share_artifacts() -> None:
    gm = with_seams(layers, ROWS, static=WEIGHTS)
    plan = partition(gm, cut_at=["seam"])
    assert [piece.border for piece in plan.pieces[:3]] == ["start of the graph", "region seam", "end of region seam"]
    assert len(plan.pieces) == 12
    assert [len(names) for names in plan.keys.values()] == [
        1,
        6,
        5,
    ]  # the first also asserts that sizes are none below 0
    assert {len(piece.returns) for piece in plan.pieces} == {1}
    check_borders(plan)
    check_plan_runs(gm, plan)


def test_another_kind_does_not_cut() -> None:
    assert len(partition(with_seams(layers, ROWS, static=WEIGHTS), cut_at=["other"]).pieces) == 1


def test_one_other_constant_is_another_artifact() -> None:
    def odd_one_out(x: Tensor, *weights: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            x = seam(x, (x @ w) * (3.0 if i == 2 else 2.0))
        return x

    plan = partition(with_seams(odd_one_out, ROWS, static=WEIGHTS), cut_at=["seam"])
    assert [len(names) for names in plan.keys.values()] == [1, 6, 4, 1]


def test_neighbouring_regions_are_pieces_of_their_own() -> None:
    """Each is what a kernel is made of, and its artifact serves it wherever it stands."""
    plan = partition(with_seams(lambda x, y: seam(seam(x, y), y), ROWS, ROWS), cut_at=["seam"])
    assert [piece.border for piece in plan.pieces][-2:] == ["region seam"] * 2
    assert len({piece.key for piece in plan.pieces[-2:]}) == 1


def test_writes_stay_in_order_and_in_one_piece_with_their_views() -> None:
    def step(slots: Tensor, x: Tensor, cache: Tensor, w: Tensor) -> Any:
        for turn in range(3):
            cache.view(-1, 4)[slots + turn] = x
            x = seam(x, cache.view(-1, 4)[slots] @ w)
        return x

    gm = with_seams(step, torch.tensor([1, 3, 5]), ROWS, static=(torch.zeros(8, 2, 4), WEIGHTS[0]))
    (decision,) = reinplace_cache_writes(gm)
    plan = partition(gm, cut_at=["seam"])
    cache = next(name for name, what in plan.values.items() if what == "f32[8, 2, 4]")
    assert decision.applied
    assert [piece.writes for piece in plan.pieces] == [(cache,), ()] * 3
    crossing = {name for piece in plan.pieces[:-1] for name in piece.returns}
    assert all(plan.values[name].startswith("f32[u") for name in crossing)
    check_borders(plan)
    check_plan_runs(gm, plan)


def test_a_piece_that_only_writes_stays() -> None:
    def step(x: Tensor, cache: Tensor) -> Tensor:
        y = x + 1
        cache[0].copy_(seam(x, x).sum(0))
        return y

    gm = with_seams(step, ROWS, static=(torch.zeros(5, 4),))
    reinplace_cache_writes(gm)
    plan = partition(gm, cut_at=["seam"])
    assert [bool(piece.writes) for piece in plan.pieces] == [False, False, True] and not plan.pieces[-1].returns
    check_borders(plan)
    check_plan_runs(gm, plan)


def test_sizes_cross_as_ints() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        z = seam(x, y)
        return z * x.shape[0], torch.arange(2 * x.shape[0])

    gm = with_seams(step, ROWS, ROWS)
    plan = partition(gm, cut_at=["seam"])
    for piece in plan.pieces:
        for node in piece.body.graph.nodes:
            if node.op == "placeholder":
                assert isinstance(node.meta["val"], (Tensor, SymInt))
    check_borders(plan)
    check_plan_runs(gm, plan)


def test_a_program_that_computes_nothing_has_no_piece() -> None:
    gm = trace(lambda x: x + 1, static=(ROWS,))
    (x,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    gm.graph.output_node().args = ((x, None),)
    plan = partition(gm)
    assert plan.pieces == ()
    assert plan.outputs == (x.name, None)


SHAPE = st.lists(st.sampled_from(["seam", "mm", "relu", "keep", "write"]), min_size=1, max_size=8)


@given(SHAPE)
def test_any_program(steps: list[str]) -> None:
    def program(x: Tensor, cache: Tensor, w: Tensor) -> Any:
        kept, y = [], x
        for step in steps:
            match step:
                case "seam":
                    y = seam(y, x)
                case "mm":
                    y = y @ w
                case "relu":
                    y = y.relu()
                case "keep":
                    kept.append(y + 1)
                case "write":
                    cache[0].copy_(y.sum(0))
        return y, *kept

    gm = with_seams(program, ROWS, static=(torch.zeros(5, 4), WEIGHTS[0]))
    reinplace_cache_writes(gm)
    plan = partition(copy_of(gm), cut_at=["seam"])
    check_borders(plan)
    check_plan_runs(gm, plan)
    in_pieces = [str(n.target) for p in plan.pieces for n in p.body.graph.nodes if n.target in WRITES_AND_PRODUCTS]
    assert in_pieces == [str(n.target) for n in gm.graph.nodes if n.target in WRITES_AND_PRODUCTS]


WRITES_AND_PRODUCTS = (aten.copy_.default, aten.mm.default)


def test_the_plan_prints_and_has_json() -> None:
    plan = partition(with_seams(layers, ROWS, static=WEIGHTS), cut_at=["seam"])
    header, first, _, third = str(plan).splitlines()[:4]
    heads = ["piece", "artifact", "nodes", "reads", "returns", "writes", "sizes", "capture", "begins", "source"]
    assert header.split() == heads
    assert first.split()[0] == "piece_0" and "= piece" not in third
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("kinds", [["seam"], []])
def test_partition_leaves_the_graph_alone(kinds: list[str]) -> None:
    gm = with_seams(layers, ROWS, static=WEIGHTS)
    before = str(gm.graph)
    partition(gm, cut_at=kinds)
    assert str(gm.graph) == before
