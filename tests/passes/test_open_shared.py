"""open_shared inlines what hides a region that gets a piece of its own, at any depth, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.compiler import nested_compile_region
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.open_shared import open_shared
from v41.passes.same_values import difference
from v41.regions import body_of, invoke_subgraph, is_region, outline

X, W = torch.randn(7, 16), torch.randn(16, 16)


@nested_compile_region
def inner(x: Tensor) -> Tensor:
    return x.tanh() * 2


@nested_compile_region
def outer(x: Tensor, w: Tensor) -> Tensor:
    return inner(x @ w).relu()


@nested_compile_region
def other(x: Tensor) -> Tensor:
    return x.cos() + 1


def layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = other(outer(x, w))
    return x


def bodies(gm: GraphModule) -> list[GraphModule]:
    """Of all subgraphs, each once."""
    found: list[GraphModule] = []
    for node in gm.graph.nodes:
        if node.target is invoke_subgraph and body_of(node) not in found:
            found += [body_of(node), *(each for each in bodies(body_of(node)) if each not in found)]
    return found


def traced() -> GraphModule:
    """With a region in `inner`, which is called by `outer`, which two layers call."""
    gm = trace(layers, X, static=[W])
    for body in bodies(gm):
        for node in [n for n in body.graph.nodes if n.target is torch.ops.aten.tanh.default]:
            outline(body, [node], kind="rank")
    return gm


@pytest.mark.parametrize(("kinds", "calls"), [(("rank",), 4), (("another",), 4)], ids=["opened", "left"])
def test_opens_what_hides_a_region(kinds: tuple[str, ...], calls: int) -> None:
    gm, before = traced(), traced()
    open_shared(gm, kinds)
    gm.graph.lint()
    gm.recompile()
    found = [node for node in gm.graph.nodes if node.target is invoke_subgraph]
    opened = kinds == ("rank",)
    assert len(found) == calls and sum(map(is_region, found)) == (2 if opened else 0)
    assert difference(before, gm, 3) is None
