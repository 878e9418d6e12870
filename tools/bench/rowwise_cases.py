"""rowwise_cases: what is done with rows between the products of the model, as functions to compile and to measure.

    case = CASES["norm_rope_record"]        case.inputs(rows, "cuda")       case.fn(*inputs)        case.body()

Written with the model's own functions; sizes are the released ones unless `scale` divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat_tools import decompositions
from v41.model_def import mhc
from v41.model_def.engram import SMALLEST
from v41.model_def.moe import swiglu
from v41.model_def.norm import inverse_rms, rms_norm
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD, fake_quant_fp8
from v41.model_def.topk import topk_lowest_index
from v41.tools.bench.seam import exported

EPS = 1e-20
Maker = Callable[..., Tensor]


@dataclass
class Case:
    """`make(normal, rows)` gives the arguments of `fn`, the first `per_row` of them with rows, from normal numbers."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[Maker, int], tuple[Tensor, ...]]
    per_row: int
    quantises: bool = False  # a last bit may tip a result into the next step

    def inputs(self, rows: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        return self.make(lambda *shape: torch.randn(shape, generator=generator, device=device), rows)

    @cached_property
    def _body(self) -> GraphModule:
        return captured(self.fn, self.inputs(7, "cpu"), self.per_row)

    def body(self) -> GraphModule:
        """The functional, decomposed ATen graph of `fn`, its rows symbolic."""
        return self._body


class _Module(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        found = self.fn(*args)
        return found if isinstance(found, tuple) else (found,)


def captured(fn: Callable[..., Any], arguments: tuple[Tensor, ...], per_row: int) -> GraphModule:
    """`fn` as functional, decomposed ATen, dimension 0 of the first `per_row` arguments symbolic."""
    rows = torch.export.Dim("rows", min=2)
    dynamic = (tuple({0: rows} if i < per_row else None for i in range(len(arguments))),)
    return exported(_Module(fn), arguments, dynamic, decompositions())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the last channels, adjacent pairs."""
    keep, turn = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    a, b = turn.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((keep, torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)), -1)


def cases(scale: int = 1) -> dict[str, Case]:
    """All cases by name, with widths divided by `scale`."""
    hidden, latent, rank, inner, key = 5120 // scale, 512 // min(scale, 4), 1280 // scale, 2304 // min(scale, 8), 128
    rope, experts, streams, k = 64 // min(scale, 4), 384 // min(scale, 8), 4, 6

    def row(normal: Maker, rows: int, *shape: int) -> Tensor:
        return normal(rows, *shape).bfloat16()

    def weight(normal: Maker, *shape: int) -> Tensor:
        return (1 + 0.1 * normal(*shape)).bfloat16()

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, w, EPS)

    def norm_quantise(x: Tensor, w: Tensor) -> Tensor:
        return fake_quant_fp8(rms_norm(x, w, EPS))

    def record(kind: Any) -> Callable[..., Tensor]:
        return lambda x, cos, sin, w: kind.encode(turned(rms_norm(x, w, EPS), cos, sin))

    def swiglu_quantise(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        return fake_quant_fp8((swiglu(gate, up, 10.0) * weights.unsqueeze(-1)).bfloat16())

    def stream_gate(X: Tensor, key: Tensor, value: Tensor, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x, key = X.float(), key.float()
        norms = inverse_rms(x, EPS) * inverse_rms(key, EPS)
        dot = (x * (q.float() * k.float()) * key).sum(-1) * norms.squeeze(-1) * x.shape[-1] ** -0.5
        gate = torch.where(mask > 0, torch.sigmoid(dot.sign() * dot.abs().clamp(min=SMALLEST).sqrt()), 0.0)
        return (x + gate.unsqueeze(-1) * value.float()).bfloat16()

    def collapse_norm(X: Tensor, A: Tensor, w: Tensor) -> Tensor:
        return rms_norm(torch.einsum("tjd,tj->td", X.float(), A).bfloat16(), w, EPS)

    def pooled(own: Tensor, before: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = torch.stack((before, own), 1).unbind(2)
        x = rms_norm((gate.softmax(1) * value).sum(1).bfloat16(), w, EPS)
        return x, FP4_RECORD.encode(turned(x, cos, sin))

    def router(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.nn.functional.softplus(torch.nn.functional.linear(x.float(), w.float())).sqrt()
        picks = topk_lowest_index(scores + bias, k)
        taken = scores.gather(-1, picks)
        return taken / (taken.sum(-1, keepdim=True) + 1e-20) * 1.5, picks

    def angles(normal: Maker, rows: int) -> tuple[Tensor, Tensor]:
        angle = normal(rows, rope // 2)
        return angle.cos(), angle.sin()

    found = (
        Case("norm", norm, lambda n, t: (row(n, t, hidden), weight(n, hidden)), 1),
        Case("norm_quantise", norm_quantise, lambda n, t: (row(n, t, rank), weight(n, rank)), 1, True),
        Case("norm_rope_fp8", record(FP8_RECORD),
             lambda n, t: (row(n, t, latent), *angles(n, t), weight(n, latent)), 3, True),
        Case("norm_rope_fp4", record(FP4_RECORD),
             lambda n, t: (row(n, t, latent), *angles(n, t), weight(n, latent)), 3, True),
        Case("norm_rope_mxfp4", record(MXFP4_RECORD),
             lambda n, t: (row(n, t, key), *angles(n, t), weight(n, key)), 3, True),
        Case("swiglu_quantise", swiglu_quantise,
             lambda n, t: (3 * row(n, t, inner), 3 * row(n, t, inner), n(t).abs()), 3, True),
        Case("stream_gate", stream_gate,
             lambda n, t: (row(n, t, streams, hidden), *row(n, t, streams + 1, hidden).split((streams, 1), 1),
                           n(t, 1) + 2, weight(n, streams, hidden), weight(n, streams, hidden)), 4),
        Case("collapse_norm", collapse_norm,
             lambda n, t: (row(n, t, streams, hidden), n(t, streams).sigmoid(), weight(n, hidden)), 2),
        Case("pooled", pooled,
             lambda n, t: (n(t, 2, latent), n(t, 2, latent), *angles(n, t), weight(n, latent)), 4, True),
        Case("router", router,
             lambda n, t: (row(n, t, hidden), (n(experts, hidden) * hidden**-0.5).bfloat16(), 0.1 * n(experts)),
             1, True),
    )  # fmt: skip
    return {case.name: case for case in found}


Norm = Callable[[Tensor, Tensor], Tensor]


def root_mean_square(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w, 1e-6)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], w.float()).to(x.dtype)


def seam_of(norm: Norm, iters: int, extra: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """The model's boundary from its parts, with another norm, iteration count or output."""

    def boundary(
        X: Tensor, y: Tensor, C: Tensor, B: Tensor, A: Tensor, fn: Tensor, base: Tensor, scale: Tensor, w: Tensor
    ) -> tuple[Tensor, ...]:
        X = mhc.expand(X, y, C, B)
        x = mhc.collapse(X, A)
        mixed = mhc.predict(X, fn, base, scale, iters, 1e-6, 1e-20)
        return X, norm(x, w), *mixed, *([x] if extra else [])

    return boundary


def seams(scale: int = 1) -> dict[str, Case]:
    """The boundary, and three like it that nobody tuned anything for."""
    hidden = 5120 // scale

    def case(name: str, fn: Callable[..., Any], streams: int = 4) -> Case:
        return Case(name, fn, lambda normal, rows: seam_inputs(normal, rows, streams, hidden), 5)

    found = (
        case("boundary", seam_of(root_mean_square, 20)),
        case("three_streams", seam_of(root_mean_square, 7), 3),
        case("layer_norm", seam_of(layer_norm, 20)),
        case("extra_output", seam_of(root_mean_square, 20, extra=True)),
    )
    return {each.name: each for each in found}


def seam_inputs(normal: Maker, rows: int, streams: int, width: int) -> tuple[Tensor, ...]:
    """Arguments of a boundary, at the scales a model has."""
    S, n = streams, streams * (streams + 2)
    return (
        normal(rows, S, width).bfloat16(), normal(rows, width).bfloat16(), 2 * normal(rows, S).sigmoid(),
        normal(rows, S, S).softmax(-1), normal(rows, S).sigmoid(), normal(n, S * width) / (S * width) ** 0.5,
        normal(n), 1 + 0.1 * normal(3), (1 + 0.1 * normal(width)).bfloat16(),
    )  # fmt: skip


CASES = cases() | seams()
