"""RoPE: the last channels of a head turned by its row's position, adjacent pairs as complex numbers, in fp32.

    (x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos)        angle = position * frequency_i

Two tables: theta alone where a layer sees its window only, another theta with YaRN where it reads compressed entries too.
The inverse turn is the same with -sin. Nothing scales the logits (no mscale).
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
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn(plain: Tensor, theta: float, factor: float, beta_fast: float, beta_slow: float, original: int) -> Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between: fast is beta_fast turns in `original` positions."""
    dim = 2 * plain.shape[0]
    low, high = (dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (beta_fast, beta_slow))
    first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    width = last - first or 0.001  # a step where the ramp has no width
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep


def both_tables(config: V41Config) -> tuple[Tensor, Tensor]:
    """Frequencies of the layers that see the window only, and of those with a compressed branch."""
    dim, theta, s = config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling
    fast = frequencies(dim, theta)
    stretched = yarn(fast, theta, s.factor, s.beta_fast, s.beta_slow, s.original_max_position_embeddings)
    return frequencies(dim, config.rope_theta), stretched


def turn(positions: Tensor, freqs: Tensor) -> Turn:
    """The rotation of rows at `positions` [T]."""
    angles = positions.float().unsqueeze(-1) * freqs  # [T, P]
    return Turn(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Turn, *, inverse: bool = False) -> Tensor:
    """x [T, D] or [T, H, D] with its last 2P channels turned, forward or back; rounded once to x's dtype."""
    cos, sin = (t if x.ndim == 2 else t.unsqueeze(1) for t in by)  # [T, P] or [T, 1, P]
    sin = -sin if inverse else sin
    pairs = 2 * cos.shape[-1]
    kept, turned = x[..., :-pairs], x[..., -pairs:].float()
    even, odd = turned[..., ::2], turned[..., 1::2]
    both = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((kept, both.to(x.dtype)), -1)
