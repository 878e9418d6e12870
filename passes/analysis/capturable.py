"""capturable: why a node cannot be in a CUDA graph, which replays launches and asks the host nothing.

nonzero, item, cond      the host waits for data: a size, a number or a branch depends on it
x[mask] = y              the same, hidden: the mask is turned into indices
x.cpu(), a CPU tensor    the replay reads or writes memory of the host, at a time nobody waits for
all_reduce by gloo       the same: it goes through the host; by NCCL it is launches
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import HigherOrderOperator, OpOverload
from v41._compat_groups import FAKE, backend_of
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.sizes import NodeSizes
from v41.regions import body_of, invoke_subgraph

ON_DEVICE = ("nccl", FAKE)  # backends whose collectives are launches; of a fake group there is nothing to launch


class Obstacles:
    """What keeps nodes of a program on `device` from being captured."""

    def __init__(self, device: torch.device, sizes: NodeSizes) -> None:
        self.device, self.sizes = device, sizes
        self._bodies: dict[GraphModule, str | None] = {}

    def of(self, node: Node) -> str | None:
        """Why `node` cannot be captured; None where it can."""
        if node.op != "call_function":
            return None
        if node.target is invoke_subgraph:
            return self._inside(body_of(node))
        name = str(node.target).removesuffix(".default")
        if isinstance(node.target, HigherOrderOperator) and not node.target.name().startswith("auto_functionalized"):
            return f"{name} may take a branch by data"
        if isinstance(node.target, OpOverload):
            if torch.Tag.data_dependent_output in node.target.tags:
                return f"{name} hands a number to the host"
            if "index_put" in name and any(map(_is_mask, _indices(node))):
                return f"{name} counts the rows of a mask"
            if (
                self.device.type != "cpu"
                and effect_of(node) == "collective"
                and (by := _talks_by(node, self.device)) not in ON_DEVICE
            ):
                return f"{name} by {by} goes through the host"
        arguments = {symbol for arg in node.all_input_nodes for symbol in self.sizes.made(arg)}
        if fresh := [symbol for symbol in self.sizes.made(node) if symbol not in arguments]:
            return f"{name} makes the size {fresh[0]} out of data"
        for each in (*node.all_input_nodes, node):
            if self._strange(each):
                return f"{name} uses a tensor on {each.meta['val'].device}"
        return None

    def _inside(self, body: GraphModule) -> str | None:
        if body not in self._bodies:
            self._bodies[body] = next(filter(None, map(self.of, body.graph.nodes)), None)
        return self._bodies[body]

    def _strange(self, node: Node) -> bool:
        """A tensor of another device, but for a constant number, which a launch takes along."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.device.type == self.device.type:
            return False
        return value.ndim > 0 or not _is_constant(node)


def _talks_by(node: Node, device: torch.device) -> str | None:
    """The backend of the group that a collective names; NCCL for one that names none, as a wait does."""
    named = (backend_of(arg, device) for arg in (*node.args, *node.kwargs.values()))
    return next(filter(None, named), ON_DEVICE[0])


def _is_constant(node: Node) -> bool:
    return node.op != "placeholder" and all(map(_is_constant, node.all_input_nodes))


def _indices(node: Node) -> list[Node]:
    indices = node.args[1] if len(node.args) > 1 else ()
    return [index for index in indices if isinstance(index, Node)] if isinstance(indices, (tuple, list)) else []


def _is_mask(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)
