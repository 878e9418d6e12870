"""effects: what an operator writes, may alias and does besides, through regions too; what is unknown may alias all."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from v41.passes.analysis import effects
from v41.passes.analysis.effects import (
    bases,
    begins_collective,
    effect_of,
    effects_of,
    ends_collective,
    viewed_args,
    written_args,
    written_inputs,
)
from v41.regions import invoke_subgraph

aten = torch.ops.aten


def graph() -> tuple[Graph, Node, Node]:
    made = Graph()
    return made, made.placeholder("a"), made.placeholder("b")


VIEWS = [
    (aten.view.default, ([-1],)),
    (aten.slice.Tensor, (0, 0, 1)),
    (aten._unsafe_view.default, ([-1],)),
    (aten.split.Tensor, (1,)),
    (aten.reshape.default, ([-1],)),
    (aten.expand.default, ([2, 2],)),
    (aten.alias.default, ()),
]


@pytest.mark.parametrize(("op", "rest"), VIEWS, ids=[str(op) for op, _ in VIEWS])
def test_a_view_leads_back_to_its_base(op: object, rest: tuple[object, ...]) -> None:
    g, a, _ = graph()
    view = g.call_function(op, (a, *rest))  # type: ignore[arg-type]
    part = g.call_function(operator.getitem, (view, 0))
    assert viewed_args(view) == [a] and written_args(view) == []
    assert bases(part) == [a]


def test_a_fresh_result_is_its_own_base() -> None:
    g, a, b = graph()
    for op, args in ((aten.add.Tensor, (a, b)), (aten.clone.default, (a,)), (aten.index.Tensor, (a, [b]))):
        node = g.call_function(op, args)
        assert viewed_args(node) == [] and bases(node) == [node] and effect_of(node) is None


def test_a_write_names_what_it_writes() -> None:
    g, a, b = graph()
    for op, args in ((aten.index_put_.default, (a, [b], b)), (aten.copy_.default, (a, b)), (aten.zero_.default, (a,))):
        node = g.call_function(op, args)
        assert written_args(node) == [a] and effect_of(node) == "writes"
    assert written_args(g.call_function(aten._foreach_add_.List, ([a, b], [b, a]))) == [a, b]


@pytest.mark.parametrize(
    ("op", "effect"),
    [
        (aten.rand.default, "random"),
        (aten.bernoulli.default, "random"),
        (aten._assert_scalar.default, "asserts"),
        (torch.ops._c10d_functional.all_reduce.default, "collective"),
        (torch.ops._c10d_functional.wait_tensor.default, "collective"),
        (aten.relu.default, None),
    ],
)
def test_other_effects(op: object, effect: str | None) -> None:
    g, a, _ = graph()
    assert effect_of(g.call_function(op, (a,))) == effect  # type: ignore[arg-type]


def test_through_a_subgraph_call() -> None:
    """The body writes its second input and returns a view of its first beside a fresh value."""
    inner, x, y = graph()
    view = inner.call_function(aten.view.default, (x, [-1]))
    inner.call_function(aten.copy_.default, (y, x))
    inner.output((view, inner.call_function(aten.neg.default, (x,))))
    outer, a, b = graph()
    call = outer.call_function(invoke_subgraph, (outer.get_attr("body"), "body", a, b))
    outer.output((call,))
    gm = GraphModule({"body": GraphModule({}, inner)}, outer)
    (call,) = (node for node in gm.graph.nodes if node.target is invoke_subgraph)
    first, second = (node for node in gm.graph.nodes if node.op == "placeholder")
    assert written_args(call) == [second] and viewed_args(call) == [first] and effect_of(call) == "writes"
    assert list(written_inputs(gm)) == [second]


def test_each_result_of_several_has_a_memory_of_its_own_but_where_two_share_one() -> None:
    """Of a region: a view of its input, two views of one value, which count as whatever the call may return, a fresh
    value; of an operator: two fresh ones."""
    inner, x, _ = graph()
    shared, fresh = (inner.call_function(op, (x,)) for op in (aten.exp.default, aten.neg.default))
    views = [inner.call_function(aten.view.default, (of, [-1])) for of in (x, shared)]
    inner.output((views[0], shared, views[1], fresh))
    outer, a, b = graph()
    call = outer.call_function(invoke_subgraph, (outer.get_attr("body"), "body", a, b))
    results = [outer.call_function(operator.getitem, (call, i)) for i in range(4)]
    most = outer.call_function(aten.topk.default, (b, 1))
    parts = [outer.call_function(operator.getitem, (most, i)) for i in range(2)]
    outer.output((*results, *parts))
    gm = GraphModule({"body": GraphModule({}, inner)}, outer)
    a, _ = gm.graph.find_nodes(op="placeholder")
    view, one, other, alone, *parts = (node for node in gm.graph.nodes if node.target is operator.getitem)
    assert [bases(node) for node in (view, one, other, alone)] == [[a], [a], [a], [alone]]
    assert [bases(part) for part in parts] == [[part] for part in parts]


def test_a_collective_begins_and_its_wait_ends_it() -> None:
    g, a, _ = graph()
    begun = g.call_function(torch.ops._c10d_functional.all_reduce.default, (a, "sum", "0"))
    waited = g.call_function(torch.ops._c10d_functional.wait_tensor.default, (begun,))
    other = g.call_function(aten.relu.default, (a,))
    assert [begins_collective(node) for node in (a, begun, waited, other)] == [False, True, False, False]
    assert [ends_collective(node) for node in (a, begun, waited, other)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("inside", "effect"),
    [
        (["relu"], None),
        (["rand"], "random"),
        (["all_reduce"], "collective"),
        (["rand", "all_reduce"], "collective"),  # other ranks wait for it
        (["_assert_scalar"], None),  # holds or ends the program, whenever it runs
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_call_has_the_effects_of_its_body(inside: list[str], effect: str | None, depth: int) -> None:
    ops = {"relu": aten.relu.default, "rand": aten.rand_like.default, "_assert_scalar": aten._assert_scalar.default,
           "all_reduce": torch.ops._c10d_functional.all_reduce.default}  # fmt: skip
    body, a, _ = graph()
    body.output(tuple(body.call_function(ops[name], (a,)) for name in inside))
    gm = GraphModule({}, body)
    for _ in range(depth):
        gm = calling(gm)
    (call,) = (node for node in gm.graph.nodes if node.target is invoke_subgraph)
    assert effect_of(call) == effect


def test_a_body_that_calls_share_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body, a, _ = graph()
    body.output((body.call_function(aten.rand_like.default, (a,)),))
    outer, a, b = graph()
    called = outer.get_attr("body")
    outer.output(tuple(outer.call_function(invoke_subgraph, (called, "body", a, b)) for _ in range(3)))
    gm, looked = GraphModule({"body": GraphModule({}, body)}, outer), list[GraphModule]()
    monkeypatch.setattr(effects, "written_inputs", lambda body: looked.append(body) or written_inputs(body))
    found = effects_of(gm.graph.nodes)
    assert len(looked) == 1 and list(found.values()).count("random") == 3
    assert found == {node: effect_of(node) for node in gm.graph.nodes}


def calling(body: GraphModule) -> GraphModule:
    """A program that calls `body` and nothing else."""
    outer, a, b = graph()
    outer.output((outer.call_function(invoke_subgraph, (outer.get_attr("body"), "body", a, b)),))
    return GraphModule({"body": body}, outer)


def test_an_unknown_higher_order_operator_may_return_anything_it_reads() -> None:
    g, a, b = graph()
    assert viewed_args(g.call_function(torch.ops.higher_order.cond, (a, None, None, (b,)))) == [a, b]
