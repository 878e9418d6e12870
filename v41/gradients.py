"""gradients: programs that need them are refused; what is compiled computes forwards alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import input_name
from v41.errors import GradientsRequested
from v41.report import source_of


def refuse_gradients(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises where gradients would flow, before tracing; a graph that switches them itself is left to AOTAutograd."""
    needing = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    if needing and torch.is_grad_enabled() and not any(switches_gradients(node) for node in gm.graph.nodes):
        raise gradients_requested(gm, inputs)


def switches_gradients(node: Node) -> bool:
    return "set_grad_enabled" in str(node.target) or "inference_mode" in str(node.target)


def gradients_requested(gm: GraphModule, inputs: Sequence[Any]) -> GradientsRequested:
    needing = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    placeholder = [node for node in gm.graph.nodes if node.op == "placeholder"][needing[0]]
    where = next((s for s in (source_of(node) for node in placeholder.users) if s != "unknown"), "torch.compile")
    return GradientsRequested(where, count=len(needing), total=len(tensors), first=input_name(placeholder))
