"""counts: nodes, regions by name, launches; a region is one launch where its kind gets a kernel, else what is in it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.analysis.counts import counts
from v41.regions import outline

aten = torch.ops.aten


@torch.compiler.nested_compile_region
def shared(x: Tensor) -> Tensor:
    return (x.tanh() + 1).view(-1)


def step(x: Tensor) -> Tensor:
    return shared(x.relu()) + shared(x.exp().sin())


def program() -> GraphModule:
    """Two calls of a body with two kernels and a view; a region of kind "whole", and one of kind "open"."""
    gm = trace(step, torch.randn(3, 4))
    named = {str(node.target): node for node in gm.graph.nodes}
    outline(gm, [named["aten.relu.default"]], kind="whole")
    outline(gm, [named["aten.exp.default"], named["aten.sin.default"]], kind="open")
    return gm


def test_a_region_is_one_launch_where_its_kind_has_a_kernel() -> None:
    gm = program()
    launches = {kinds: counts(gm, kinds).launches for kinds in [(), ("whole",), ("open",), ("whole", "open")]}
    assert launches == {(): 8, ("whole",): 8, ("open",): 7, ("whole", "open"): 7}  # relu, exp, sin, 2 x 2, the sum


def test_regions_are_counted_by_name_and_once_a_call() -> None:
    gm = program()
    body = next(child for name, child in gm.named_children() if "repeated" in name)
    assert isinstance(body, GraphModule)
    (tanh,) = (node for node in body.graph.nodes if node.target is aten.tanh.default)
    outline(body, [tanh], kind="inside")
    found = counts(gm, ())
    assert found.named == {"whole": 1, "open": 1, "inside": 2}
    assert (found.regions, found.launches, found.nodes) == (4, 8, len(gm.graph.nodes))
