"""RoPE: the last channels of a head turned by its row's position, adjacent pairs as complex numbers, in fp32.

    (x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos)        angle = position * frequency_i

Two sets of frequencies: theta alone where a layer sees its window only; another theta, with YaRN, where it reads
compressed entries too. The inverse turn has -sin. Nothing scales the logits (no mscale).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from v41.model_def.config import V41Config


class Turn(NamedTuple):
    """The rotation of each row: cos and sin [T, P], P pairs of channels."""

    cos: Tensor
    sin: Tensor


def frequencies(dim: int, theta: float) -> Tensor:
    """theta ** (-2i / dim), [dim / 2] fp32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def yarn(plain: Tensor, theta: float, factor: float, beta_fast: float, beta_slow: float, original: int) -> Tensor:
    """Fast frequencies kept, slow ones divided by `factor`, a ramp between.

    Fast turns `beta_fast` times within `original` positions or more often, slow `beta_slow` times or fewer.
    """
    dim = 2 * plain.shape[0]
    turns = (original / (2 * math.pi * beta) for beta in (beta_fast, beta_slow))
    fast, slow = (dim * math.log(t) / (2 * math.log(theta)) for t in turns)  # index of the pair that turns so often
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    width = max(last - first, 0.001)  # a step, where the ramp has no width, or begins behind the last pair
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep


def both_frequencies(config: V41Config) -> tuple[Tensor, Tensor]:
    """Of the layers that see the window only, and of those with a compressed branch."""
    dim, theta, scaling = config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling
    stretched = yarn(
        frequencies(dim, theta),
        theta,
        scaling.factor,
        scaling.beta_fast,
        scaling.beta_slow,
        scaling.original_max_position_embeddings,
    )
    return frequencies(dim, config.rope_theta), stretched


def turn(positions: Tensor, freqs: Tensor) -> Turn:
    """The rotation of rows at `positions` [T]."""
    angles = positions.float().unsqueeze(-1) * freqs  # [T, P]
    return Turn(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Turn, *, inverse: bool = False) -> Tensor:
    """x [T, D] or [T, H, D] with its last 2P channels turned, forward or back; rounded once to the type of x."""
    cos, sin = (t if x.ndim == 2 else t.unsqueeze(1) for t in by)  # [T, P] or [T, 1, P]
    sin = -sin if inverse else sin
    kept, turned = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    a, b = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((kept, both.to(x.dtype)), -1)
