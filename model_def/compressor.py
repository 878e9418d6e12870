"""Compressor: one latent for every m tokens (m = 1 or 2), at the layers that own a global KV cache.

    m = 1   latent_t = norm(W_kv x_t)
    m = 2   latent_g = norm(sum_s softmax_s(W_gate x_s) W_kv x_s)      s the 2 tokens of group g, per channel, fp32

A group that a step leaves open is held in the cache (`tails`) until its second token comes. Each row computes the latent of
the group it would complete, so the rows stay rows; those that complete none are not stored.
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
        self.layer, self.ratio = layer, config.compress_ratios[layer]
        projection = Fp32Linear if self.ratio > 1 else Linear
        self.wkv = projection(config.hidden_size, config.head_dim)
        self.wgate = projection(config.hidden_size, config.head_dim) if self.ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [T, hidden] -> the latent of each row's group before RoPE [T, D], meant where the row completes it."""
        if self.wgate is None:
            return self.norm(self.wkv(x))
        members = self.members(x, step)  # [T, 2 tokens, 2, D]
        value, gate = members.unbind(2)
        return self.norm((gate.softmax(1) * value).sum(1).to(x.dtype))

    def members(self, x: Tensor, step: Step) -> Tensor:
        """Value and gate of the row before and of the row itself; the last row of each request stays in the cache."""
        assert self.wgate is not None
        batch, tails = step.batch, step.cache.tails[self.layer]
        own = torch.stack((self.wkv(x), self.wgate(x)), 1)  # [T, 2, D]
        first = (batch.positions == batch.starts)[:, None, None]
        before = torch.where(first, tails[batch.slots], own[step.row_before])
        last = batch.positions == batch.stops - 1
        tails[torch.where(last, batch.slots, step.cache.pad_slot)] = own
        return torch.stack((before, own), 1)


def completed_entry(step: Step, ratio: int, none: int) -> Tensor:
    """[T] the entry that each row's group is stored at; `none` where the row completes no group or a prefix hit has it."""
    at = step.batch.positions
    return torch.where(((at + 1) % ratio == 0) & (at >= step.batch.hits), at // ratio, none)
