"""Routers of mixtures of experts in many spellings, and near misses of them, as plain functions to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.mhc import drawn_like
from v41.model_def.topk import ranking_keys, topk_lowest_index

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, W: F.linear(x.float(), W.float()),
    "einsum": lambda x, W: torch.einsum("td,ed->te", x.float(), W.float()),
    "matmul": lambda x, W: x.float() @ W.mT.float(),
    "sum of products": lambda x, W: (x.float()[:, None] * W.float()).sum(-1),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus, sqrt": lambda z: F.softplus(z).sqrt(),
    "softplus, power": lambda z: F.softplus(z) ** 0.5,
    "by hand": lambda z: torch.where(z > 20, z, z.exp().log1p()).sqrt(),
    "sigmoid": torch.sigmoid,
}
CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "unique keys": topk_lowest_index,
    "sort of keys": lambda s, k: s.shape[-1] - 1 - (ranking_keys(s).sort(-1, True).values[:, :k] & 0xFFFFFFFF),
    "stable argsort": lambda s, k: s.argsort(dim=-1, descending=True, stable=True)[..., :k],
    "topk": lambda s, k: s.topk(k, dim=-1).indices,
}  # fmt: skip
NORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sum kept": lambda w, eps: w / (w.sum(-1, keepdim=True) + eps),
    "axis put back": lambda w, eps: w / (w.sum(1)[:, None] + eps),
    "reciprocal": lambda w, eps: w * (eps + w.sum(-1, keepdim=True)).reciprocal(),
    "none": lambda w, eps: w,
}
OTHER_SCORES = "the scores are sqrt(softplus) or sigmoid of one product"
ROUNDED = "nothing is rounded between the product and the weights"
OTHER_CHOICE = "the picks are the best by score, or by score and bias, the best first"
FLAWS = {  # the rule it breaks
    "another activation": OTHER_SCORES,
    "a scaled score": OTHER_SCORES,
    "a softmax": OTHER_SCORES,
    "a bias in the product": OTHER_SCORES,
    "logits with bounds": OTHER_SCORES,
    "the worst": OTHER_CHOICE,
    "half the score": OTHER_CHOICE,
    "ranks with bounds": OTHER_CHOICE,
    "ties to the higher index": OTHER_CHOICE,
    "picks by rounded scores": ROUNDED,
    "weights of rounded scores": ROUNDED,
    "rounded scores": ROUNDED,
    "scores are returned": "only weights and picks are read outside",
    "a draw in between": "nothing is written in between, and no effect reads it there",
}


@dataclass(frozen=True)
class Router:
    """How one gate is written. eps, scaling, k and experts are what the region must say of itself."""

    product: str = "linear"
    activation: str = "softplus, sqrt"
    choice: str = "unique keys"
    norm: str = "sum kept"
    biased: bool = True
    experts: int = 8
    k: int = 2
    eps: float = 1e-20
    scaling: float = 1.5
    width: int = 6
    flaw: str = ""

    def to_trace(self) -> tuple[Callable[..., tuple[Tensor, ...]], Tensor, list[Tensor]]:
        """The function, its rows, its weights."""
        x = torch.randn(5, self.width).bfloat16()
        weights = [torch.randn(self.experts, self.width).bfloat16(), torch.randn(self.experts)]
        return self.route, x, weights

    def route(self, x: Tensor, W: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        scores = self.score(PRODUCTS[self.product](x, W), bias)
        weights, experts = self.pick(scores, bias)
        if self.flaw == "a draw in between":
            experts = experts + drawn_like(experts)
        weights = NORMS[self.norm](weights, self.eps)
        weights = weights * self.scaling if self.scaling != 1 else weights
        return (weights, experts, scores) if self.flaw == "scores are returned" else (weights, experts.flatten())

    def score(self, logits: Tensor, bias: Tensor) -> Tensor:
        logits = logits.clamp(-50, 50) if self.flaw == "logits with bounds" else logits
        scores = ACTIVATIONS[self.activation](logits + bias if self.flaw == "a bias in the product" else logits)
        match self.flaw:
            case "another activation":
                return F.softplus(scores)
            case "a scaled score":
                return scores * 1.001
            case "a softmax":
                return scores.softmax(-1)
            case "rounded scores":
                return scores.bfloat16().float()
        return scores

    def pick(self, scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        keys = scores
        if self.flaw == "picks by rounded scores":
            keys = scores.bfloat16().float()
        if self.flaw == "half the score":
            keys = 0.5 * scores + bias
        elif self.flaw == "ranks with bounds":
            keys = (scores + bias).clamp(max=50)
        elif self.biased:
            keys = keys + bias
        elif self.choice == "topk" and not self.flaw:
            return scores.topk(self.k)  # type: ignore[return-value]
        if self.flaw == "ties to the higher index":
            experts = keys.shape[-1] - 1 - topk_lowest_index(keys.flip(-1), self.k)
        else:
            experts = CHOICES[self.choice](-keys if self.flaw == "the worst" else keys, self.k)
        if self.flaw == "weights of rounded scores":
            scores = scores.bfloat16().float()
        return scores.gather(-1, experts), experts


legal = st.builds(
    Router,
    st.sampled_from(sorted(PRODUCTS)),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from(sorted(CHOICES)),
    st.sampled_from(sorted(NORMS)),
    st.booleans(),
    st.integers(5, 9),
    st.integers(1, 4),
    st.sampled_from([1e-20, 1e-6]),
    st.sampled_from([1.0, 1.5, 2.5]),
    st.sampled_from([6, 11]),
)
flawed = st.builds(lambda router, flaw: replace(router, flaw=flaw), legal, st.sampled_from(sorted(FLAWS)))
