"""Nodes outlive their graph with what each calls, its lines of the model and its module; each body is told once."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from tests.tools.small_models import run_of_balanced, run_of_routed
from v41.passes.analysis.cost import Costs
from v41.regions import invoke_subgraph
from v41.tools.nodes import PRODUCTS, frames, module_of, nodes_of, work_of


def node(**meta: object) -> Node:
    made = Graph().placeholder("x")
    made.meta.update(meta)
    return made


@pytest.mark.parametrize(
    ("told", "name"),
    [("L['self'].layers.3.attn", "layers.3.attn"), ("L['self']", None),
     ("L['self']._modules['layers']._modules['3'].attn", "layers.3.attn"), ("L['model'].up", "L.model.up"),
     ("L['self'].blocks[2]", "blocks.2")],
)  # fmt: skip
def test_a_module_goes_by_what_its_owner_calls_it(told: str, name: str | None) -> None:
    assert module_of(node(nn_module_stack={"1": ("L['self']", object), "2": (told, object)})) == name
    assert module_of(node()) is None


def test_lines_lead_from_the_outermost_call_to_the_innermost() -> None:
    trace = 'File "/a/model.py", line 3, in forward\n    y = f(x)\n  File "/a/b/f.py", line 7, in f\n    return x + 1\n'
    assert frames(node(stack_trace=trace)) == ("a/model.py:3  y = f(x)", "b/f.py:7  return x + 1")
    assert frames(node()) == ()


def test_every_node_that_calls_something_is_told() -> None:
    run = run_of_balanced()
    told = nodes_of(run.plan)
    calls = [each for piece in run.plan.pieces for each in piece.body.graph.nodes if each.op == "call_function"]
    results = sum(len(each.users) for each in calls if "invoke_subgraph" in each.name)  # go by their names inside
    assert len([each for each in told if not each.body]) == len(calls) - results
    assert [each.region for each in told if each.body] == ["sinkhorn"] * 18
    assert all(each.source == each.path[-1] for each in told if each.path)


def test_equal_work_is_counted_and_none_is_lost() -> None:
    run = run_of_balanced()
    work = work_of(run.plan, run.layer_of)
    launches = sum(Costs().program(piece.body).launches for piece in run.plan.pieces)
    assert sum(each.count * each.launches for each in work) == launches
    assert [each.count for each in work if each.kind == "sinkhorn"] == [2]
    assert {each.layer for each in work} == {1} and sum(each.count for each in work if each.kind == PRODUCTS) == 2


def test_bodies_of_one_name_are_told_apart() -> None:
    """Two shared bodies, each with a loop that it calls by the same name."""

    def owner(steps: int) -> GraphModule:
        inner = Graph()
        x = inner.placeholder("x")
        for _ in range(steps):
            x = inner.call_function(torch.ops.aten.neg.default, (x,))
        inner.output((x,))
        graph = Graph()
        given = graph.placeholder("x")
        call = graph.call_function(invoke_subgraph, (graph.get_attr("loop_0"), "loop_0", given))
        graph.output((graph.call_function(operator.getitem, (call, 0)),))
        return GraphModule({"loop_0": GraphModule({}, inner)}, graph)

    bare = run_of_balanced().plan
    pieces = tuple(replace(piece, body=owner(i + 1)) for i, piece in enumerate(bare.pieces))
    told = nodes_of(replace(bare, pieces=pieces))
    assert [node.body for node in told if "neg" in node.text] == ["loop_0", "loop_0~2", "loop_0~2"]
    calls = [node.text for node in told if node.text.startswith("subgraph")]
    assert calls == ["subgraph loop_0(x)", "subgraph loop_0~2(x)"]


def test_a_node_has_an_identity_that_no_other_has() -> None:
    """Two bodies that layers share call their nodes and their routers alike."""
    run = run_of_routed("eager")
    told = {(node.body, node.name): node.text for node in run.nodes}
    assert len(told) > len({node.name for node in run.nodes}) and len({node.identity for node in run.nodes}) == len(
        told
    )
    calls = [node for node in run.nodes if node.region == "moe_gate" and node.text.startswith("region ")]
    called = {node.text.split("(")[0].removeprefix("region ") for node in calls}
    assert called == {node.body for node in run.nodes if "sqrt" in node.text}
    assert len(called) in (2, 4)  # some versions of torch keep a body for each call
    assert all(body.endswith("/moe_gate_0") for body in called)
    assert {node.attrs["k"] for node in calls if node.attrs is not None} == {"1", "2"}


def test_what_a_node_was_to_the_passes_outlives_that_its_body_was_opened() -> None:
    """As a piece's own node it is called otherwise; its origin is what the changes of passes name."""
    shared, opened = run_of_routed("inductor").nodes, run_of_routed("triton").nodes
    assert {node.origin for node in opened} < {node.origin for node in shared}  # less the calls of what was opened
    moved = [node for node in opened if node.origin != (node.body, node.name)]
    assert moved and all(node.origin[0] for node in moved)
