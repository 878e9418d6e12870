"""What a pass changed is told node by node, and nothing that it left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import copy_program
from tests.strategies.tracing import trace
from v41.passes.analysis.counts import counts
from v41.passes.changes import changes, lines_of
from v41.passes.pipeline import run_pipeline
from v41.regions import outline
from v41.report import Change

aten = torch.ops.aten


def program() -> GraphModule:
    def step(x: Tensor) -> Tensor:
        y = (x * 2).relu()
        return (y + 1).view(-1) * y.sum()

    return trace(step, torch.randn(3, 4))


def found(gm: GraphModule, edit: Callable[[GraphModule], object]) -> list[Change]:
    before = lines_of(gm)
    edit(gm)
    return changes(before, lines_of(gm))


def outline_two(gm: GraphModule) -> None:
    outline(gm, [node for node in gm.graph.nodes if node.name in ("mul", "relu")], kind="twice")


def test_an_outlined_region_is_told_by_itself_and_who_reads_it_is_not() -> None:
    gm = program()
    told = found(gm, outline_two)
    assert [(c.kind, c.node, c.body) for c in told] == [
        ("moved", "mul", "twice_0"),
        ("moved", "relu", "twice_0"),
        ("added", "invoke_subgraph", ""),
    ]
    assert str(told[-1].after).startswith("region twice_0(") and str(told[-1].after).endswith(" -> [relu]")
    assert all("(x * 2).relu()" in c.source for c in told if c.kind == "moved")


def test_a_rewired_node_is_told_with_both_lines() -> None:
    def read_the_input(gm: GraphModule) -> None:
        add = next(node for node in gm.graph.nodes if node.target is aten.add.Tensor)
        add.args = (next(iter(reversed(list(gm.graph.find_nodes(op="placeholder"))))), 1)

    (change,) = found(program(), read_the_input)
    assert (change.kind, change.node) == ("rewired", "add")
    assert str(change.before).startswith("aten.add.Tensor(relu, 1)  f32[")
    assert str(change.after).startswith("aten.add.Tensor(") and "relu" not in str(change.after)


def test_a_removed_node_is_told_and_a_copy_has_no_changes() -> None:
    def drop_the_sum(gm: GraphModule) -> None:
        total = next(node for node in gm.graph.nodes if node.target is aten.sum.default)
        total.replace_all_uses_with(total.all_input_nodes[0])
        gm.graph.erase_node(total)

    told = found(program(), drop_the_sum)
    assert {(c.kind, c.node) for c in told} == {("rewired", "mul_1"), ("removed", "sum_1")}
    gm = program()
    assert changes(lines_of(gm), lines_of(copy_program(gm))) == []


def test_the_pipeline_keeps_changes_on_demand_alone() -> None:
    _, runs = run_pipeline(program(), programs=True)
    assert all(run.changes is not None for run in runs) and any(run.changes for run in runs)
    _, runs = run_pipeline(program())
    assert [run.changes for run in runs] == [None] * len(runs)


@pytest.mark.parametrize(("whole", "launches"), [((), 5), (("twice",), 4)])
def test_what_computes_is_a_launch_and_so_is_a_region_with_a_kernel(whole: tuple[str, ...], launches: int) -> None:
    """Two products, relu, add and sum launch; the view and the sizes do not. A kernel takes one product and relu."""
    gm = program()
    assert (counts(gm, whole).launches, counts(gm, whole).regions) == (5, 0)
    outline_two(gm)
    assert (counts(gm, whole).launches, counts(gm, whole).regions) == (launches, 1)
