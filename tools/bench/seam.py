"""seam: the mHC boundary as a case to measure: plain function, inputs at released widths, captured body, oracle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from v41.model_def.mhc import Mix, boundary
from v41.model_def.norm import RMSNorm, rms_norm
from v41.regions import flatten

STREAMS, WIDTH, ITERS, EPS, NORM_EPS = 4, 5120, 20, 1e-6, 1e-20
ROW_INPUTS = 5  # of the arguments of `plain`, the first are per row


def plain(
    X: Tensor, y: Tensor, C: Tensor, B: Tensor, A: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor
) -> tuple[Tensor, ...]:
    """model_def's boundary as a function of tensors."""

    def normalise(x: Tensor) -> Tensor:
        return rms_norm(x, norm, NORM_EPS)

    return boundary(X, y, C, B, A, Mix(fn, base, scale, cast(RMSNorm, normalise), ITERS, EPS, NORM_EPS))


def inputs(rows: int, device: str, seed: int = 0, width: int = WIDTH) -> tuple[Tensor, ...]:
    """Random arguments of `plain`, at the scales a model has."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    S, n = STREAMS, STREAMS * (STREAMS + 2)
    comb = torch.softmax(normal(rows, S, S), -1)
    return (
        normal(rows, S, width).bfloat16(), normal(rows, width).bfloat16(), 2 * normal(rows, S).sigmoid(), comb,
        normal(rows, S).sigmoid(), normal(n, S * width) / (S * width) ** 0.5, normal(n), 1 + 0.1 * normal(3),
        (1 + 0.1 * normal(width)).bfloat16(),
    )  # fmt: skip


class _Plain(torch.nn.Module):
    def forward(
        self,
        X: Tensor,
        y: Tensor,
        C: Tensor,
        B: Tensor,
        A: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
    ) -> tuple[Tensor, ...]:
        return plain(X, y, C, B, A, fn, base, scale, norm)


@cache
def capture(width: int = WIDTH) -> GraphModule:
    """The functional, decomposed ATen graph of `plain`, its rows symbolic."""
    return captured(_Plain(), inputs(7, "cpu", width=width), ROW_INPUTS)


def captured(module: torch.nn.Module, arguments: tuple[Tensor, ...], row_inputs: int | Sequence[int]) -> GraphModule:
    """The functional, decomposed ATen graph of `module`, the first dimension of its first arguments symbolic: of so
    many, or of one for each number, which says how many times the rows it has."""
    rows, times = torch.export.Dim("rows", min=2), [1] * row_inputs if isinstance(row_inputs, int) else row_inputs
    known = [{0: rows if each == 1 else each * rows} for each in times]
    return exported(module, arguments, (*known, *[None] * (len(arguments) - len(known))))


def exported(
    module: torch.nn.Module, arguments: tuple[Tensor, ...], dynamic: Any, table: Mapping[Any, Any] | None = None
) -> GraphModule:
    """The functional ATen graph of `module`, decomposed by `table` (None: torch's own), with what torch.export calls
    dynamic shapes."""
    with warnings.catch_warnings():  # torch's own, about its own: copying a tree of inputs asks for a deprecated type
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
        body = program.run_decompositions(None if table is None else dict(table)).graph_module
    for node in reversed(body.graph.nodes):
        if node.op == "call_function" and not node.users:  # assertions of dtype and device
            body.graph.erase_node(node)
    return flatten(body)  # the model's shared subgraph is one for all seams, and this is one seam


class InDouble(Interpreter):
    """Runs a body with fp64 wherever it says fp32. Its roundings to bf16 stay."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        wide = isinstance(result, Tensor) and result.dtype == torch.float32
        return result.double() if wide else result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.prims.convert_element_type.default and args[1] == torch.float32:
            return args[0].double()
        if kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return super().call_function(target, args, kwargs)


def oracle(body: GraphModule, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """The body's outputs, computed in fp64."""
    wide = [arg.double() if isinstance(arg, Tensor) and arg.dtype == torch.float32 else arg for arg in arguments]
    return tuple(InDouble(body).run(*wide))


def errors(results: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """RMS error of each output over the RMS of its true value."""
    return [
        ((result.double() - true.double()).square().mean().sqrt() / true.double().square().mean().sqrt()).item()
        for result, true in zip(results, truth, strict=True)
    ]
