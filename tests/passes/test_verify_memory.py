"""What one judgement of a program found spares the next the nodes that are as they were, and hides no breach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies.tracing import trace
from v41.errors import InvariantBroken
from v41.passes.verify import Memory, facts, verify
from v41.regions import body_of, outline, regions

aten = torch.ops.aten


class Ran(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def program() -> GraphModule:
    """sin and cos in a region, then tanh."""

    def step(x: Tensor) -> Tensor:
        return (x.sin().cos() * 2).tanh()

    gm = trace(step, torch.randn(3, 4))
    outline(gm, [node for node in gm.graph.nodes if node.target in (aten.sin.default, aten.cos.default)], kind="wave")
    return gm


def called(gm: GraphModule, target: Any) -> Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def ran(gm: GraphModule, memory: Memory) -> set[str]:
    with Ran() as mode:
        facts(gm, memory)
    return {name for name in mode.names if name in ("sin", "cos", "mul", "tanh", "relu")}


def test_what_is_as_it_was_does_not_run_again() -> None:
    gm, memory = program(), Memory()
    assert ran(gm, memory) == {"sin", "cos", "mul", "tanh"}
    assert ran(gm, memory) == set()
    tanh = called(gm, aten.tanh.default)
    tanh.target = aten.relu.default
    assert ran(gm, memory) == {"relu"}
    cosine = called(body_of(next(regions(gm))), aten.cos.default)
    cosine.args = (cosine.args[0],)
    assert ran(gm, memory) == {"cos", "mul", "relu"}  # and what reads it


def wider(node: Node) -> None:
    node.meta["val"] = node.meta["val"].double()


def other_operator(node: Node) -> None:
    node.target, node.args = aten.sum.dim_IntList, (node.args[0], [0])


@pytest.mark.parametrize("breach", [wider, other_operator])
@pytest.mark.parametrize("inside", [False, True])
def test_a_breach_is_found_as_without_memory(breach: Callable[[Node], None], inside: bool) -> None:
    gm, memory = program(), Memory()
    before = facts(gm, memory)
    verify(gm, before, name="none", memory=memory)
    breach(called(body_of(next(regions(gm))), aten.sin.default) if inside else called(gm, aten.mul.Tensor))
    told = []
    for given in (memory, None):
        with pytest.raises(InvariantBroken) as broken:
            verify(gm, before, name="breach", memory=given)
        told.append(str(broken.value))
    assert told[0] == told[1] and "fresh propagation" in told[0]
