"""RMSNorms with what follows them (RoPE, quantisation, records) in many spellings, and near misses, as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tests.strategies.mhc import DIVISIONS, MEANS, SQUARES, drawn_like
from v41.model_def.quantization import (
    FP4_RECORD,
    FP8_RECORD,
    GROUP,
    MXFP4_RECORD,
    dequantize_fp8,
    fake_quant_fp4,
    fake_quant_fp8,
    fake_quant_mxfp4,
    grouped,
    quantize_fp4,
    quantize_fp8,
    quantize_mxfp4,
    unpack_pairs,
)
from v41.model_def.rope import Turn, rotate

ROTARY = 16  # channels


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers spells it, over the whole row: tables with a value a channel."""
    a, b = x.float().chunk(2, -1)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return (x.float() * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def _strided(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first channels, by strided slices."""
    a, b = x[:, :ROTARY:2].float(), x[:, 1:ROTARY:2].float()
    turned = torch.stack((cos * a - sin * b, cos * b + sin * a), 2).flatten(1).to(x.dtype)
    return torch.cat((turned, x[:, ROTARY:]), dim=1)


ROPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the model's": lambda x, cos, sin: rotate(x, Turn(cos, sin)),
    "backwards": lambda x, cos, sin: rotate(x, Turn(cos, sin), inverse=True),
    "strided": _strided,
    "halves": _halves,
}


def _by_logarithm(x: Tensor) -> Tensor:
    g = grouped(x, GROUP)
    scale = ((g.abs().amax(-1, keepdim=True).clamp(min=1e-4)) / 448).log2().ceil().exp2()
    return ((g / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(1).to(x.dtype)


def _by_sums(x: Tensor) -> Tensor:
    """The record of mxfp4 with its bytes written as sums."""
    data, byte = quantize_mxfp4(x)
    low, high = unpack_pairs(data).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([(low + 16 * high).to(torch.uint8), byte], dim=1)


def _by_exponents(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of fp8 apart, values and scales in e8m0 viewed as bytes, which lie in groups."""
    g = grouped(x, GROUP)
    scale = (g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil().exp2()
    values = (g * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def _by_quotients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups under fp32 scales, which come first."""
    g = grouped(x, GROUP)
    scale = g.abs().amax(-1) / 448
    return scale, (g / scale[..., None]).flatten(1).to(torch.float8_e4m3fn)


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows under an fp32 scale each, by products."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-6) * (1 / 448)
    return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


Made = Tensor | tuple[Tensor, Tensor]
FORMATS: dict[str, tuple[str, Callable[[Tensor], Made], int | None]] = {  # spelling -> format, how, group or the row
    "fp8": ("fp8", fake_quant_fp8, 32),
    "fp8 by logarithm": ("fp8", _by_logarithm, 32),
    "fp4": ("fp4", fake_quant_fp4, 16),
    "mxfp4": ("mxfp4", fake_quant_mxfp4, 32),
    "fp8 record": ("fp8_record", FP8_RECORD.encode, 32),
    "fp4 record": ("fp4_record", FP4_RECORD.encode, 16),
    "mxfp4 record": ("mxfp4_record", MXFP4_RECORD.encode, 32),
    "mxfp4 record by sums": ("mxfp4_record", _by_sums, 32),
    "fp8 apart": ("fp8_apart", quantize_fp8, 32),
    "fp8 apart by logarithm": ("fp8_apart", _by_exponents, 32),
    "fp4 apart": ("fp4_apart", quantize_fp4, 16),
    "mxfp4 apart": ("mxfp4_apart", quantize_mxfp4, 32),
    "fp32 scales": ("fp8_fp32_apart", _by_quotients, 32),
    "an fp32 scale": ("fp8_fp32_apart", _by_row, None),
}


def _other_order(x: Tensor) -> Tensor:
    """Nearly the record of fp4: the odd channel is in the low nibble."""
    return torch.cat(quantize_fp4(x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)), -1)


NEARLY: dict[str, Callable[[Tensor], Tensor]] = {  # no format: it stays outside, and the norm is a region of its own
    "the odd channel low": _other_order,
    "a scale of its own": lambda x: fake_quant_fp8(x * 3) / 3,
    "a smaller range": lambda x: x.clamp(-1, 1),
    "nothing rounded": lambda x: (x.float() * 2).to(x.dtype),
    "one number for a scale": lambda x: (x.float() * 0.25).clamp(-448, 448).to(torch.float8_e4m3fn),
}


def _scaled_by(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What x is divided by, and the values in fp8."""
    return scale, (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True) / 448


OWN = "the row is divided by its own root mean square"
READ = "only the row when normed, turned or quantised is read outside"
SCALES = "bytes of the row have scales of its own, one for each group or for all of it"
FLAWS = {  # what is wrong -> the rule it breaks
    "the RMS of another row": OWN,
    "scales of another row": SCALES,
    "scales in bf16": SCALES,
    "a scale for all rows": SCALES,
    "the RMS is returned": READ,
    "quotients are returned": READ,
    "scales before they are rounded": READ,
    "scales are returned": READ,
    "a draw in between": "nothing is written in between, and no effect reads it there",
}


def _and_quotients(x: Tensor) -> tuple[Tensor, ...]:
    scale = _largest(x.float())
    quotients = x.float() / scale
    return quotients, quotients.to(torch.float8_e4m3fn), scale


def _and_unrounded(x: Tensor) -> tuple[Tensor, ...]:
    """The scales before they are powers of two are returned."""
    scale = _largest(x.float())
    return scale, *_scaled_by(scale.log2().ceil().exp2(), x)


SPOILT: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {  # flaws of what is done to x, beside another row
    "scales of another row": lambda x, other: _scaled_by(_largest(other.float()), x),
    "scales in bf16": lambda x, other: _scaled_by(_largest(x), x),
    "a scale for all rows": lambda x, other: _scaled_by(x.float().abs().amax() / 448, x),
    "quotients are returned": lambda x, other: _and_quotients(x),
    "scales before they are rounded": lambda x, other: _and_unrounded(x),
    "scales are returned": lambda x, other: (dequantize_fp8(*(made := quantize_fp8(x))), made[1]),
}


@dataclass(frozen=True)
class Row:
    """How one row is normed and what follows. A flaw that is not drawn is none."""

    square: str = "square"
    mean: str = "mean"
    division: str = "rsqrt"
    weight: str = "in fp32"  # "behind a rounding", "none"
    rope: str | None = None  # of ROPES
    format: str | None = None  # of FORMATS or NEARLY
    also: str = "nothing"  # who else reads the row: "normed", "turned"
    width: int = 64
    eps: float = 1e-20
    flaw: str = ""

    @property
    def then(self) -> tuple[str, ...]:
        """The steps that are to be found."""
        rope = () if self.rope is None else ("rope",)
        return rope + ((FORMATS[self.format][0],) if self.format in FORMATS else ())

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What has rows: x, another row, cos and sin. What has none: a weight, a matrix."""
        pairs = self.width // 2 if self.rope == "halves" else ROTARY // 2
        angles = torch.randn(5, pairs)
        x = torch.randn(2, 5, self.width).bfloat16()
        weight, matrix = torch.rand(self.width).bfloat16() + 0.5, torch.randn(self.width, 8).bfloat16()
        return [*x, angles.cos(), angles.sin()], [weight, matrix]

    def run(self, x: Tensor, other: Tensor, cos: Tensor, sin: Tensor, w: Tensor, matrix: Tensor) -> list[Tensor]:
        f = x.float()
        square = SQUARES[self.square](other.float() if self.flaw == "the RMS of another row" else f)
        mean = MEANS[self.mean](square) + self.eps
        scaled = DIVISIONS[self.division](f, mean)
        normed = self.weigh(scaled, w, x.dtype)
        out = [mean] if self.flaw == "the RMS is returned" else []
        turned = normed if self.rope is None else ROPES[self.rope](normed, cos, sin)
        if self.flaw in SPOILT:
            return [*SPOILT[self.flaw](turned, other)]
        if self.flaw == "a draw in between":
            out.append(drawn_like(normed))
        made = {**NEARLY, **{name: made for name, (_, made, _) in FORMATS.items()}}
        result = turned if self.format is None else made[self.format](turned)
        results = result if isinstance(result, tuple) else (result,)
        out += [normed @ matrix] * (self.also == "normed") + [turned @ matrix] * (self.also == "turned")
        return [*out, *(results if self.format else [turned @ matrix])]

    def weigh(self, scaled: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        if self.weight == "behind a rounding":
            return w * scaled.to(dtype)
        return (w.float() * scaled if self.weight == "in fp32" else scaled).to(dtype)


legal = st.builds(
    Row,
    st.sampled_from(sorted(SQUARES)),
    st.sampled_from(sorted(MEANS)),
    st.sampled_from(sorted(DIVISIONS)),
    st.sampled_from(["in fp32", "behind a rounding", "none"]),
    st.sampled_from([None, *sorted(ROPES)]),
    st.sampled_from([None, *sorted(FORMATS), *sorted(NEARLY)]),
    st.sampled_from(["nothing", "normed", "turned"]),
    st.sampled_from([64, 32, 128]),
    st.sampled_from([1e-20, 1e-6]),
)
flawed = st.builds(
    lambda row, flaw: replace(row, flaw=flaw, format=row.format if row.format in FORMATS else "fp8"),
    legal,
    st.sampled_from(sorted(FLAWS)),
)


def trace_as_is(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    """The graph of fn(*tensors), which writes nothing, for sizes as they are: in a fifth of the time of `trace`."""
    with torch.no_grad():
        gm = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*tensors)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def together(rows: Sequence[Any]) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[Tensor]]:
    """One function of all `rows` (each with `tensors` and `run`), what it takes that has rows, and what has none."""
    tensors = [row.tensors() for row in rows]

    def run(*given: Tensor) -> list[Tensor]:
        moving, still = given[: 4 * len(rows)], given[4 * len(rows) :]
        parts = [row.run(*moving[4 * i : 4 * i + 4], *still[2 * i : 2 * i + 2]) for i, row in enumerate(rows)]
        return [result for part in parts for result in part]

    return run, [x for moving, _ in tensors for x in moving], [w for _, still in tensors for w in still]
