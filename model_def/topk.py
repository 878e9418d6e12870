"""Top-k whose ties go to the lower index, on every device: a sort of unique integers."""

from __future__ import annotations

import torch
from torch import Tensor


def ranking_keys(scores: Tensor) -> Tensor:
    """int64 [..., N], unique in a row, ordered as (score, lower index first). -0 equals 0; NaN is below -inf."""
    scores = scores.float()
    bits = torch.where(scores == 0, torch.zeros_like(scores), scores).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # now integers compare as the floats do
    ordered = torch.where(scores.isnan(), torch.full_like(bits, -(2**31)), ordered)
    n = scores.shape[-1]
    return (ordered.to(torch.int64) << 32) + torch.arange(n - 1, -1, -1, device=scores.device)


def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices (int64 [..., k]) of the k largest of the last dimension, best first."""
    best = ranking_keys(scores).topk(k, dim=-1, sorted=True).values
    return scores.shape[-1] - 1 - (best & 0xFFFFFFFF)
