"""Poolings of a few tokens with a norm and a tail behind them, in many spellings, and near misses, as functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.mhc import drawn_like
from tests.strategies.norms import FORMATS, ROPES, ROTARY
from v41.model_def.norm import rms_norm


def _by_hand(gates: Tensor) -> Tensor:
    e = (gates - gates.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def _without_maximum(gates: Tensor) -> Tensor:
    e = gates.exp()
    return e * e.sum(dim=1).unsqueeze(1).reciprocal()


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda gates: gates.softmax(1),
    "by hand": _by_hand,
    "without a maximum": _without_maximum,
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda p, v: (p * v).sum(1),
    "sum of the swapped": lambda p, v: (v * p).sum(dim=-2),
    "einsum": lambda p, v: torch.einsum("tmd,tmd->td", p, v),
    "loop": lambda p, v: sum(p[:, i] * v[:, i] for i in range(p.shape[1])),  # type: ignore[dict-item]
}
CUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {  # both [T, m, 2, D] -> values, gates [T, m, D]
    "unbind": lambda before, own: torch.cat((before, own), 1).unbind(2),  # type: ignore[dict-item]
    "select": lambda before, own: (torch.cat((before, own), 1)[:, :, 0], torch.cat((before, own), 1)[:, :, 1]),
    "apart": lambda before, own: tuple(torch.cat((before[:, :, i], own[:, :, i]), 1) for i in (0, 1)),  # type: ignore[dict-item]
}
POOLED = "the row is the sum of values by the softmax of gates over the group"
READ = "only the row when normed, turned or quantised is read outside"
FLAWS = {  # what is wrong -> the rule it breaks
    "twice as much": POOLED,
    "squared weights": POOLED,
    "rounded weights": "gates and values are pooled in fp32",
    "weights are returned": READ,
    "a draw in between": "nothing is written in between, and no effect reads it there",
}


@dataclass(frozen=True)
class Pooling:
    """How one compressor is written."""

    softmax: str = "softmax"
    sum: str = "sum"
    cut: str = "unbind"
    ratio: int = 2
    normed: bool = True
    rope: str | None = None
    format: str | None = None
    eps: float = 1e-20
    width: int = 32
    flaw: str = ""

    @property
    def then(self) -> tuple[str, ...]:
        return ("rope",) * (self.rope is not None) + ((FORMATS[self.format][0],) if self.format else ())

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens before [T, m - 1, 2, D] and own [T, 1, 2, D], cos, sin; a weight and a matrix."""
        angles = torch.randn(5, self.width // 2 if self.rope == "halves" else ROTARY // 2)
        before, own = torch.randn(5, self.ratio - 1, 2, self.width), torch.randn(5, 1, 2, self.width)
        still = [torch.rand(self.width).bfloat16(), torch.randn(self.width, 4).bfloat16()]
        return [before, own, angles.cos(), angles.sin()], still

    def run(self, before: Tensor, own: Tensor, cos: Tensor, sin: Tensor, w: Tensor, matrix: Tensor) -> list[Tensor]:
        values, gates = CUTS[self.cut](before, own)
        p = SOFTMAXES[self.softmax](gates)
        out = [p] if self.flaw == "weights are returned" else []
        match self.flaw:
            case "rounded weights":
                p = p.bfloat16().float()
            case "squared weights":
                p = p * p
            case "twice as much":
                p = 2 * p
        pooled = SUMS[self.sum](p, values)
        row = pooled.bfloat16()
        if self.normed:
            row = rms_norm(row, w, self.eps)
        out += [drawn_like(row)] if self.flaw == "a draw in between" else []
        end = row if self.rope is None else ROPES[self.rope](row, cos, sin)
        end = end if self.format is None else FORMATS[self.format][1](end)
        return [*out, row @ matrix, end]


legal = st.builds(
    Pooling,
    st.sampled_from(sorted(SOFTMAXES)),
    st.sampled_from(sorted(SUMS)),
    st.sampled_from(sorted(CUTS)),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.sampled_from([None, "the model's"]),
    st.sampled_from([None, "fp4 record"]),
    st.sampled_from([1e-20, 1e-6]),
    st.sampled_from([32, 64]),
).map(lambda pooling: pooling if pooling.normed else replace(pooling, rope=None, format=None))
flawed = st.builds(
    lambda pooling, flaw: replace(pooling, flaw=flaw, normed=True, format="fp4 record"),
    legal,
    st.sampled_from(sorted(FLAWS)),
)
