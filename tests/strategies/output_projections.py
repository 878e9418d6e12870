"""Output projections of attention in many spellings, and near misses of them, as plain functions to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from v41.model_def.quantization import dequantize_fp8_weight, fake_quant_fp4, fake_quant_fp8, quantize_fp8_weight

ROWS, HEADS, HIDDEN = 5, 4, 64
DOWNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # o [T, G, d], A [G, r, d] -> [T, G, r]
    "einsum": lambda o, a: torch.einsum("tgd,grd->tgr", o, a),
    "matmul": lambda o, a: (o.transpose(0, 1) @ a.mT).transpose(0, 1),
    "bmm of the transposed": lambda o, a: torch.bmm(a, o.permute(1, 2, 0)).permute(2, 0, 1),
}
UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # z [T, G r], B [hidden, G r]
    "linear": F.linear,
    "matmul": lambda z, b: z @ b.T,
    "einsum": lambda z, b: torch.einsum("tr,or->to", z, b),
}
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "fp8": fake_quant_fp8, "fp4": fake_quant_fp4}
GROUPS = {"none": None, "fp8": ("fp8", 32), "fp4": ("fp4", 16)}
BETWEEN = "between the products stand views, one cast and one rounding to groups at most"
MEETS = "each group of heads meets its own A, and all meet B"
FLAWS = {  # the rule it breaks
    "an activation": BETWEEN,
    "rounded to eighths": BETWEEN,
    "a cast to fp16": "the grouped product is rounded once",
    "heads taken in turn": MEETS,
    "groups laid in turn": MEETS,
    "the middle is returned": "only its output is read outside",
}


@dataclass(frozen=True)
class Projection:
    """How one is written. The rest is what the region must say."""

    down: str = "einsum"
    up: str = "linear"
    stored: str = "in last"  # A [G, r, d], or "in first": [G, d, r]
    before: str = "none"  # of ROUNDINGS, in front of the grouped product
    middle: str = "none"  # in front of the joint one
    packed: bool = False  # B in fp8
    groups: int = 2
    rank: int = 32
    fp32: bool = False  # the grouped product
    head: int = 32  # channels of one
    flaw: str = ""

    def to_trace(self) -> tuple[Callable[..., Any], Tensor, list[Tensor]]:
        """The function, its rows, its weights."""
        width = HEADS * self.head // self.groups
        a = torch.randn(self.groups, *((self.rank, width) if self.stored == "in last" else (width, self.rank)))
        b = torch.randn(HIDDEN, self.groups * self.rank)
        weights = [a.bfloat16(), *(quantize_fp8_weight(b) if self.packed else [b.bfloat16()])]
        return self.project, torch.randn(ROWS, HEADS, self.head).bfloat16(), weights

    def project(self, o: Tensor, a: Tensor, b: Tensor, *scales: Tensor) -> Any:
        b = dequantize_fp8_weight(b, *scales) if scales else b
        z = self.grouped(ROUNDINGS[self.before](o), a if self.stored == "in last" else a.mT).flatten(1)
        z = z.bfloat16() if self.fp32 else z
        match self.flaw:
            case "an activation":
                z = z.tanh()
            case "rounded to eighths":
                z = (z * 8).round() / 8
            case "a cast to fp16":
                z = z.half().bfloat16()
        y = UPS[self.up](ROUNDINGS[self.middle](z), b)
        return (y, z) if self.flaw == "the middle is returned" else y

    def grouped(self, o: Tensor, a: Tensor) -> Tensor:
        taken = o.flatten(1).unflatten(-1, (self.groups, -1))
        if self.flaw == "heads taken in turn":
            taken = o.unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(2)
        if self.fp32:
            taken, a = taken.float(), a.float()
        z = DOWNS[self.down](taken, a)
        return z.mT if self.flaw == "groups laid in turn" else z

    def wanted(self) -> dict[str, Any]:
        """What the region must say."""
        return {
            "groups": self.groups,
            "rank": self.rank,
            "width": HEADS * self.head // self.groups,
            "hidden": HIDDEN,
            "axes": ("grd" if self.stored == "in last" else "gdr", "or"),
            "formats": ("bfloat16", "fp8/32x32" if self.packed else "bfloat16"),
            "quantised": (GROUPS[self.before], GROUPS[self.middle]),
            "types": ("bfloat16",) * 3,
        }


legal = st.builds(
    Projection,
    st.sampled_from(sorted(DOWNS)),
    st.sampled_from(sorted(UPS)),
    st.sampled_from(("in last", "in first")),
    st.sampled_from(sorted(ROUNDINGS)),
    st.sampled_from(sorted(ROUNDINGS)),
    st.booleans(),
    st.sampled_from((2, 4)),
    st.sampled_from((32, 64)),
    st.booleans(),
    st.sampled_from((32, 64)),
)
flawed = st.sampled_from(sorted(FLAWS)).map(lambda flaw: replace(Projection(), flaw=flaw))
