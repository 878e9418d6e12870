"""Small programs without Dynamo, for tests of analyses: of real tensors, or of fakes on any device, sizes symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Fakes:
    """Makes tensors without values."""

    def __init__(self) -> None:
        self.shapes = ShapeEnv()

    def size(self) -> SymInt:
        """A size of at least 2 of which no more is known."""
        with self.shapes.ignore_fresh_unbacked_symbols():
            size = self.shapes.create_unbacked_symint()
        torch._check(size >= 2)
        return size

    def __call__(self, *sizes: int | SymInt, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)


@contextmanager
def fakes() -> Iterator[Fakes]:
    made = Fakes()
    with FakeTensorMode(shape_env=made.shapes, allow_non_fake_inputs=True):
        yield made


def graph_of(run: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The ATen graph of run(*inputs), with meta; numbers for sizes where `inputs` are real."""
    return make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)


def inputs_of(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def calls_of(gm: GraphModule, name: str = "") -> list[Node]:
    """Calls of operators with `name` in theirs."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and name in str(node.target)]
