"""The model's boundary from its parts, with another norm, iteration count or output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from v41.model_def import mhc


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    f = x.float()
    return (w.float() * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], w.float()).to(x.dtype)


def seam(norm: Callable[..., Tensor], iters: int, extra: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """The model's boundary from its parts, with another norm, iteration count or output."""

    def boundary(X, y, C, B, A, fn, base, scale, w):
        X = mhc.expand(X, y, C, B)
        mix = mhc.Mix(fn, base, scale, None, iters, 1e-6, 1e-20)
        x = mhc.collapse(X, A)
        return X, norm(x, w), *mhc.coefficients(X, mix), *([x] if extra else [])

    return boundary


def seam_inputs(streams: int, width: int, rows: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    S, n = streams, streams * (streams + 2)
    per_row = [torch.randn(rows, S, width).bfloat16(), torch.randn(rows, width).bfloat16(), torch.rand(rows, S),
               torch.rand(rows, S, S), torch.rand(rows, S)]  # fmt: skip
    return per_row, [torch.randn(n, S * width), torch.randn(n), torch.rand(3), torch.randn(width).bfloat16()]
