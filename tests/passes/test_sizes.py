"""sizes: every symbol of a value is found, and has the name that it was marked with, or of an input that has it."""

from __future__ import annotations

import operator

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule

from tests.strategies.small import calls_of, fakes, graph_of, inputs_of
from v41.passes.analysis.sizes import NodeSizes, size_names, symbols_in


def names(*sizes: SymInt) -> list[str]:
    return [str(size) for size in sizes]


def test_symbols_of_shapes_strides_numbers_and_several_in_order_of_appearance() -> None:
    with fakes() as new:
        a, b, c = new.size(), new.size(), new.size()
        assert [*symbols_in(new(b, 4, a))] == names(b, a)
        assert [*symbols_in(torch.empty_strided((3, 2), (a, 1)))] == names(a)
        assert [*symbols_in(c)] == names(c) and [*symbols_in(a * b + 1)] == names(a, b)
        assert [*symbols_in([new(b), (c, None), 7])] == names(b, c)
    assert [*symbols_in(torch.rand(3))] == [*symbols_in(None)] == [*symbols_in(7)] == []


def test_a_node_works_with_the_sizes_of_its_arguments_and_makes_its_own() -> None:
    with fakes() as new:
        a, b = new.size(), new.size()
        gm = graph_of(lambda x, y: (x.sum(0), x @ y), new(a, 8), new(8, b))
    sizes = NodeSizes()
    (total,), (product,) = calls_of(gm, "sum"), calls_of(gm, "mm")
    assert [*sizes.made(total)] == [] and [*sizes.worked_with(total)] == names(a)
    assert [*sizes.made(product)] == [*sizes.worked_with(product)] == names(a, b)
    assert sizes.made(product) is sizes.made(product)  # looked up once
    x, y = inputs_of(gm)
    assert [*sizes.made(x)] == names(a) and [*sizes.worked_with(y)] == names(b)


def test_numbers_that_are_no_sizes_have_symbols_and_bools_that_follow_from_data() -> None:
    with fakes() as new:
        a, x = new.size(), new()
        graph = Graph()
        given, number, flag = (graph.placeholder(name) for name in ("x", "number", "flag"))
        item = graph.call_function(torch.ops.aten._local_scalar_dense.default, (given,))
        half, checked = (graph.call_function(each, (number, 2)) for each in (operator.truediv, operator.gt))
        values = (x, a, a > 3, a > 4, a / 2, a > 2)
        for node, value in zip((given, number, flag, item, half, checked), values, strict=True):
            node.meta["val"] = value
    sizes = NodeSizes()
    assert all([*sizes.made(node)] == names(a) for node in (number, flag, item, half))
    assert not sizes.made(checked), "who reads it can work it out from sizes"


def program(made: Tensor, **inputs: Tensor | SymInt | None) -> GraphModule:
    """One that has inputs, and makes something of other sizes."""
    graph = Graph()
    for name, value in inputs.items():
        graph.placeholder(name).meta["val"] = value
    graph.call_function(torch.ops.aten.nonzero.default, (next(iter(graph.nodes)),)).meta["val"] = made
    graph.output(())
    return GraphModule({}, graph)


def test_a_size_is_called_by_the_first_tensor_that_has_it_and_only_then_by_a_number() -> None:
    with fakes() as new:
        a, b, c, d, made = (new.size() for _ in range(5))
        strided = torch.empty_strided((3, 2), (c, 1))
        gm = program(new(made), none=None, count=a, x=new(4, a), y=new(a, b), strided=strided, other=d)
    assert size_names(gm, {}) == {str(a): "x.1", str(b): "y.1", str(c): "strided", str(d): "other"}
    called = {"x": "tokens", "strided": "cache", "other": "length"}
    assert size_names(gm, called) == {str(a): "tokens.1", str(b): "y.1", str(c): "cache", str(d): "length"}
