"""What a walk from a row may cross: sizes that are counted behind it, and nothing that another path brings in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from tests.strategies.tracing import trace
from v41.passes.matching import aten
from v41.passes.row_tails import reach


def reached(fn: Callable[[Tensor], Tensor], start: object) -> tuple[list[Node], list[Node]]:
    """The nodes of a graph in order, and those within reach of the first of target `start`."""
    nodes = list(trace(fn, torch.rand(5, 8)).graph.nodes)
    source = next(node for node in nodes if node.target is start)
    return nodes, reach({node: i for i, node in enumerate(nodes)}, source)


def test_a_size_counted_behind_the_row_is_no_other_path() -> None:
    nodes, found = reached(lambda x: (2 * x.exp()).view(4 * x.shape[0], 2).neg(), aten.exp.default)
    view = next(node for node in nodes if node.target is aten.view.default)
    counted = [arg for arg in view.all_input_nodes if not isinstance(arg.meta["val"], Tensor)]
    assert counted and all(nodes.index(arg) > nodes.index(found[0]) for arg in counted)
    assert [node.target for node in found] == [aten.mul.Tensor, aten.view.default, aten.neg.default]


def test_what_is_made_behind_the_row_of_something_else_is_not_crossed() -> None:
    _, found = reached(lambda x: (2 * x.exp()) * x.cumsum(1).sin(), aten.exp.default)
    assert [node.target for node in found] == [aten.mul.Tensor]
