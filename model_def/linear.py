"""Linear layers without bias, three ways to hold and multiply weights: bf16, fp8 as stored, and fp32 arithmetic.

    Linear       bf16 weights, bf16 in and out
    Fp8Linear    e4m3 weights and one power of two a 32 x 32 block; inputs are rounded to e4m3 a group of 32 first
    Fp32Linear   bf16 or fp32 weights, fp32 product and result: head, gate and the ratio-2 compressor

Both sides of an Fp8Linear are exact in bf16 once dequantised, so one bf16 GEMM with fp32 sums is the quantised product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from v41.model_def.config import V41Config
from v41.model_def.quantization import GROUP, dequantize_fp8_weight, fake_quant_fp8, quantize_fp8_weight


class Linear(nn.Module):
    """y = x W^T. Weights start as N(0, gain^2 / in)."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.bfloat16))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(std=self.gain * self.in_features**-0.5)

    def decoded(self) -> Tensor:
        """The weight as it multiplies, bf16 [out, in]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return F.linear(x, self.weight)


class Fp32Linear(Linear):
    """Returns fp32. `weight` keeps the type of the file, bf16 or fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class Fp8Linear(nn.Module):
    """`weight` e4m3 [out, in], `scale` uint8 [ceil(out/32), ceil(in/32)]: the bytes of the file's e8m0."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
        blocks = [-(-n // GROUP) for n in shape]
        self.scale = nn.Parameter(torch.empty(blocks, dtype=torch.uint8), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        std = self.gain * self.in_features**-0.5
        random = torch.randn(self.weight.shape, device=self.weight.device) * std
        weight, scale = quantize_fp8_weight(random)
        self.weight.copy_(weight)
        self.scale.copy_(scale)

    def decoded(self) -> Tensor:
        """The weight as it multiplies, bf16 [out, in]: exact, for e4m3 has 4 significant bits."""
        return dequantize_fp8_weight(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(fake_quant_fp8(x), self.decoded())


def linear(config: V41Config, in_features: int, out_features: int, gain: float = 1.0) -> Linear | Fp8Linear:
    """The projection that a release stores in fp8, held as `config.weight_dtype` says."""
    kind = Fp8Linear if config.weight_dtype == "fp8" else Linear
    return kind(in_features, out_features, gain)


def into_streams(config: V41Config) -> float:
    """The gain of what writes into the residual streams of a random model: all layers together add about half of what
    the embedding, of RMS 1, holds.

    With a gain of 1 a random model is a chaotic judge of a compiler: one last bit flips an FP4 value, a top-k pick or
    an expert somewhere, that row differs from there on and flips more. At half a unit for all layers together, noise of
    one last bit in every norm breaks no row of `tiny`, and a fault still does. The routed experts take a quarter of
    this gain: a pick that flips swaps a whole expert.
    """
    return 0.5 * config.num_hidden_layers**-0.5
