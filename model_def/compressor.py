"""Compressor: one latent for every m tokens (m = 1 or 2), at the layers that own a compressed KV cache.

    m = 1   latent_t = norm(W_kv x_t)
    m = 2   latent_g = norm(sum_s softmax_s(W_gate x_s) W_kv x_s)      s the 2 tokens of group g, per channel, fp32

A group that a step leaves open is held in the cache (`tails`) until its second token comes. Each row computes a latent,
that of the group it would complete, so rows stay rows; where a row completes none, its latent is not stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41.model_def.config import V41Config
from v41.model_def.linear import Fp32Linear, Linear
from v41.model_def.norm import RMSNorm
from v41.model_def.step import Step


class Compressor(nn.Module):
    def __init__(self, config: V41Config, layer: int) -> None:
        super().__init__()
        self.layer, pooled = layer, config.compress_ratios[layer] > 1
        projection = Fp32Linear if pooled else Linear
        self.wkv = projection(config.hidden_size, config.head_dim)
        self.wgate = projection(config.hidden_size, config.head_dim) if pooled else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [T, hidden] -> the latent of each row's group [T, D], before RoPE."""
        if self.wgate is None:
            return self.norm(self.wkv(x))
        own = torch.stack((self.wkv(x), self.wgate(x)), 1)  # [T, 2, D]
        value, gate = torch.stack((self.before(own, step), own), 1).unbind(2)  # [T, 2 tokens, D] each
        return self.norm((gate.softmax(1) * value).sum(1).to(x.dtype))

    def before(self, own: Tensor, step: Step) -> Tensor:
        """Value and gate of the token before each row [T, 2, D]; those of the last row of each request are held."""
        batch, tails = step.batch, step.cache.tails[self.layer]
        first, last = batch.positions == batch.starts, batch.positions == batch.stops - 1
        before = torch.where(first[:, None, None], tails[batch.slots], own[step.row_before])
        tails[torch.where(last, batch.slots, step.cache.pad_slot)] = own
        return before


def completed_entry(step: Step, ratio: int, none: int) -> Tensor:
    """[T] the entry that each row completes; `none` where it completes none, or one that a prefix hit has stored."""
    at = step.batch.positions
    return torch.where(((at + 1) % ratio == 0) & (at >= step.batch.hits), at // ratio, none)
