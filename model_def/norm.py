"""RMSNorm: x / rms(x) * weight, in fp32, rounded once to the type of x."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41.model_def.constant import Constant


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept. x is fp32."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] of any type, weight [width]."""
    f = x.float()
    return (weight.float() * (f * inverse_rms(f, eps))).to(x.dtype)


class RMSNorm(nn.Module):
    """Weights are bf16, as stored; V4.1 sets eps to 1e-20 everywhere."""

    eps = Constant()

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
