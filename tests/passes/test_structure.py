"""structure_key: equal for equal work whatever the names, another for any change of it, the same in every process."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.invariants import check_in_another_process, copy_program
from tests.strategies.tracing import trace
from v41.passes.structure import structure_key
from v41.regions import outline

ROWS = torch.randn(4, 8)


def two_steps(x: Tensor) -> Tensor:
    return (x * 2.0).relu() + torch.tensor([1.0, 2.0]).sum()


def last(gm: GraphModule, name: str) -> torch.fx.Node:
    return [node for node in gm.graph.nodes if name in node.name][-1]


def change_a_constant(gm: GraphModule) -> None:
    node = last(gm, "mul")
    node.args = (node.args[0], 2.0000000000000004)


def change_an_operator(gm: GraphModule) -> None:
    last(gm, "relu").target = torch.ops.aten.neg.default


def change_the_wiring(gm: GraphModule) -> None:
    node = last(gm, "relu")
    node.args = (node.args[0].args[0],)  # type: ignore[union-attr]


def change_a_held_tensor(gm: GraphModule) -> None:
    (name,) = (str(node.target) for node in gm.graph.nodes if node.op == "get_attr")
    setattr(gm, name, torch.tensor([1.0, 2.5]))


def change_a_dtype(gm: GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], Tensor))
    node.meta["val"] = node.meta["val"].double()


CHANGES = [change_a_constant, change_an_operator, change_the_wiring, change_a_held_tensor, change_a_dtype]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_work_changes_the_key(change: Callable[[GraphModule], None]) -> None:
    gm = trace(two_steps, ROWS)
    key = structure_key(gm)
    change(gm)
    assert structure_key(gm) != key


def test_names_do_not_matter() -> None:
    gm = trace(two_steps, ROWS)
    assert structure_key(copy_program(gm, prefix="other_")) == structure_key(gm)


def test_shapes_matter_and_strides() -> None:
    square = torch.randn(8, 8)
    keys = {
        structure_key(trace(lambda x, w: x @ w, ROWS, static=(w,)))
        for w in (square, square.t(), torch.randn(8, 9), square.double().float()[:, :8])
    }
    assert len(keys) == 3


def test_unbacked_symbols_are_numbered_and_backed_ones_keep_their_name() -> None:
    first = structure_key(trace(lambda x: x * 2, ROWS))
    assert first == structure_key(trace(lambda y: y * 2, ROWS))
    assert first != structure_key(trace(lambda x: x * 2, ROWS, backed=True))
    assert first != structure_key(trace(lambda x: x * 2, static=(ROWS,)))


def test_regions_count_with_kind_and_attributes() -> None:
    keys = set()
    for kind, steps in (("fold", 2), ("fold", 3), ("other", 2)):
        gm = trace(two_steps, ROWS)
        outline(gm, [last(gm, "mul"), last(gm, "relu")], kind=kind, steps=steps)
        keys.add(structure_key(gm))
    assert len(keys) == 3


def test_the_order_of_attributes_does_not_count() -> None:
    keys = set()
    for attributes in ({"steps": 2, "eps": 1e-6}, {"eps": 1e-6, "steps": 2}):
        gm = trace(two_steps, ROWS)
        outline(gm, [last(gm, "mul"), last(gm, "relu")], kind="fold", **attributes)
        keys.add(structure_key(gm))
    assert len(keys) == 1


def key_of_an_example() -> str:
    return structure_key(trace(lambda x, w: two_steps(x) @ w, ROWS, static=(torch.ones(8, 3),)))


def test_another_process_finds_the_same_key() -> None:
    check_in_another_process(__name__, "key_of_an_example", key_of_an_example())


def key_of_functions() -> str:
    """Of a graph that calls functions of Python, as sizes do."""
    graph = Graph()
    size = graph.placeholder("size")
    size.meta["val"] = 7
    least = graph.call_function(torch.sym_min, (size, 3))
    graph.output((graph.call_function(torch.sym_max, (least, 2)), graph.call_function(operator.mul, (size, 2))))
    return structure_key(GraphModule(torch.nn.Module(), graph))


def test_another_process_finds_the_same_key_of_functions() -> None:
    check_in_another_process(__name__, "key_of_functions", key_of_functions())
