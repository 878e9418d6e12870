"""lone: the one region that a template takes for itself, its operands by role, and how the rest is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from v41.regions import is_region, region_of


class NotTaken(Exception):
    """What a template does not take: the node, and a reason that completes "refused because it ..."."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


def lone_region(body: GraphModule, kind: str) -> Node:
    """The one region of `kind` that is all of `body`, but for arithmetic on sizes."""
    calls = [node for node in body.graph.nodes if is_region(node, kind)]
    for node in body.graph.nodes:
        counts = isinstance(node.meta.get("val"), (int, SymInt))
        if node.op == "call_function" and node not in calls and node.target is not operator.getitem and not counts:
            raise NotTaken(node, f"computes beside the region {kind}")
    if len(calls) != 1:
        raise NotTaken(body.graph.output_node(), f"holds {len(calls)} regions {kind}")
    return calls[0]


def roles_of(
    call: Node, types: Mapping[str, tuple[torch.dtype, ...]], lies: Callable[[str, Tensor], bool]
) -> dict[Node, str]:
    """The placeholders that a kernel reads, by what they are to the region. lies: whether one may lie as it does."""
    found: dict[Node, str] = {}
    for node, role in zip(call.args[2:], region_of(call).attrs["operands"], strict=True):
        assert isinstance(node, Node)
        if role == "size":
            continue
        if node.op != "placeholder" or node in found or role in found.values() or role not in types:
            raise NotTaken(node, f"is no input of its own, but {role}")
        value: Tensor = node.meta["val"]
        if value.dtype not in types[role]:
            raise NotTaken(node, f"is {role} of {value.dtype}")
        if not lies(role, value):
            raise NotTaken(node, f"lies in memory with strides {tuple(value.stride())}")
        found[node] = role
    return found
