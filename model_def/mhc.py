"""mHC: residual streams mixed under a manifold constraint (arXiv:2512.24880), single-pass as in DeepSeek-V4.1.

    X'_k = C_k F(norm(sum_j A_j X_j)) + sum_j B_jk X_j        A pre [T, S], B comb [T, S, S], C post [T, S]

B and C are predicted from X, A from the X of the boundary before (V4.1's change): no sublayer waits for its own.
T rows, S = 4 streams, D channels. Streams bf16, coefficients and sums fp32; each function rounds where it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import nested_compile_region

from v41.model_def.norm import RMSNorm, inverse_rms


@dataclass(frozen=True)
class Mix:
    """What a model learns about the seam in front of a sublayer: how to predict the coefficients, and the norm."""

    fn: Tensor  # [S + S + S * S, S * D], rows in the order A, C, B
    base: Tensor  # [S + S + S * S]
    scale: Tensor  # [3]
    norm: RMSNorm  # of what the streams collapse to
    iters: int  # of Sinkhorn
    eps: float  # of Sinkhorn and of A
    norm_eps: float  # of the one RMS over all streams


def boundary(
    X: Tensor, y: Tensor | None, C: Tensor | None, B: Tensor | None, A: Tensor, mix: Mix
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The seam between two sublayers: streams X [T, S, D], output y [T, D] of the one before -> X, x, A, C, B.

    x [T, D] is what the next sublayer reads: the new X collapsed with the A carried here. The A returned is for the
    boundary after. y None: nothing is pending, at entry and after an Engram.
    """
    X = post(X, y, C, B)
    return X, mix.norm(collapse(X, A)), *coefficients(X, mix)


def coefficients(X: Tensor, mix: Mix) -> tuple[Tensor, Tensor, Tensor]:
    """A, C, B from X [T, S, D]."""
    return predict(X, mix.fn, mix.base, mix.scale, mix.iters, mix.eps, mix.norm_eps)


@nested_compile_region  # traced once for all boundaries
def predict(
    X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    S, x = X.shape[1], X.flatten(1).float()  # x [T, S * D], stream by stream
    z = (x @ fn.t()) * inverse_rms(x, norm_eps)  # eq. 14-16: project, divide by the RMS
    groups = zip(scale.unbind(), z.split((S, S, S * S), -1), base.split((S, S, S * S)), strict=True)
    a, c, b = (s * group + bias for s, group, bias in groups)
    return a.sigmoid() + eps, 2 * c.sigmoid(), sinkhorn(b.unflatten(-1, (S, S)), iters, eps)  # eq. 17-19


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[T, j, k] -> rows and columns that sum to about 1. The softmax is the first row step: 2 * iters - 1 follow."""
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def collapse(X: Tensor, A: Tensor) -> Tensor:
    """sum_j A_j X_j [T, D]."""
    return (A.unsqueeze(-1) * X.float()).sum(1).to(X.dtype)


def post(X: Tensor, y: Tensor | None, C: Tensor | None, B: Tensor | None) -> Tensor:
    """X with the output of the sublayer before mixed in, if one is pending."""
    return X if y is None or C is None or B is None else expand(X, y, C, B)


def expand(X: Tensor, y: Tensor, C: Tensor, B: Tensor) -> Tensor:
    """C_k y + sum_j B_jk X_j [T, S, D], the sum first. Stream j goes in, k comes out."""
    mixed = (B.unsqueeze(-1) * X.float().unsqueeze(2)).sum(1)  # [T, j, k, D] -> [T, k, D]
    return (C.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(X.dtype)


def entry_streams(embedded: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """X [T, S, D], every stream a copy of the embeddings [T, D], and the A [T, S] that reads stream 0 alone."""
    A = (torch.arange(streams, device=embedded.device) == 0).float()
    return embedded.unsqueeze(1).repeat(1, streams, 1), A.expand(embedded.shape[0], streams)
