"""The FFN: a gate sends each token to a few experts, one shared expert takes all; SwiGLU with clamps inside.

    s = sqrt(softplus(W_g x))            picks: the top k of s + bias       w_e = s_e / sum of picked s * scaling
    y = sum_e W2_e (silu(min(W1_e x, c)) * clamp(W3_e x, -c, c) * w_e)  +  the same for the shared expert, weight 1

The weight enters before W2. Rows are sorted by expert, so each expert is one slice of a grouped GEMM, and gathered back
for the sum: no row meets another, in whatever batch it comes. T tokens, k picks, E experts, D and I channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from v41.model_def.config import V41Config
from v41.model_def.constant import Constant
from v41.model_def.linear import into_streams, linear
from v41.model_def.quantization import GROUP, dequantize_mxfp4, fake_quant_fp8, quantize_mxfp4
from v41.model_def.topk import topk_lowest_index


class Gate(nn.Module):
    """fp32 throughout. `bias` balances the load: it moves the choice and never the weight."""

    scaling = Constant()

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        width = config.hidden_size
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, width, dtype=torch.bfloat16) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> weights fp32 [T, k] and experts int64 [T, k]."""
        scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        experts = topk_lowest_index(scores + self.bias, self.k)
        weights = scores.gather(-1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling, experts


class ExpertLinear(nn.Module):
    """One linear of every expert, bf16 [E, out, in]. Row r of x belongs to the first expert whose end is beyond r."""

    def __init__(self, experts: int, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=torch.bfloat16))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(std=self.gain * self.weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # [rows, in], [E] -> [rows, out]
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class Fp4ExpertLinear(nn.Module):
    """As released: e2m1 pairs [E, out, in/2] and a power of two a 32 inputs [E, out, in/32]. x is rounded to e4m3."""

    def __init__(self, experts: int, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        rows = (experts, out_features)
        self.weight = nn.Parameter(torch.empty(*rows, in_features // 2, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(*rows, in_features // GROUP, dtype=torch.uint8), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        experts, rows, pairs = self.weight.shape
        std = self.gain * (2 * pairs) ** -0.5
        random = torch.randn(experts, rows, 2 * pairs, device=self.weight.device) * std
        weight, scale = quantize_mxfp4(random)
        self.weight.copy_(weight)
        self.scale.copy_(scale)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        x = fake_quant_fp8(x)
        if torch.compiler.is_compiling():  # one product: what is decoded when and where is for the compiler to say
            return F.grouped_mm(x, dequantize_mxfp4(self.weight, self.scale).transpose(1, 2), offs=ends)
        y, begin = x.new_empty(x.shape[0], self.weight.shape[1]), 0
        for e, end in enumerate(ends.tolist()):  # the same, of one expert at a time: all in bf16 would be 9 GB
            if begin < end:
                y[begin:end] = F.linear(x[begin:end], dequantize_mxfp4(self.weight[e], self.scale[e]))
            begin = end
        return y


class Experts(nn.Module):
    """The routed experts on rows sorted by expert."""

    limit = Constant()

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        kind = Fp4ExpertLinear if config.expert_dtype == "fp4" else ExpertLinear
        experts, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1, self.w3 = kind(experts, width, inner), kind(experts, width, inner)
        self.w2 = kind(experts, inner, width, into_streams(config) / 4)

    def forward(self, x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """x [rows, D], ends [E] where each expert's rows end, weights [rows] -> [rows, D]."""
        a = swiglu(self.w1(x, ends), self.w3(x, ends), self.limit) * weights.unsqueeze(-1)
        return self.w2(a.to(x.dtype), ends)


class SharedExpert(nn.Module):
    limit = Constant()

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1, self.w3 = linear(config, width, inner), linear(config, width, inner)
        self.w2 = linear(config, inner, width, into_streams(config))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = Gate(config), Experts(config), SharedExpert(config)

    @nested_compile_region  # traced once for all layers
    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], after its norm -> [T, D]."""
        weights, experts = self.gate(x)  # [T, k]
        rows, k = experts.shape
        by_expert = experts.flatten().argsort(stable=True)  # a row is (token, pick)
        ends = expert_ends(experts.flatten()[by_expert], len(self.gate.bias))
        y = self.experts(x[by_expert // k], ends, weights.flatten()[by_expert])
        y = y[by_expert.argsort()].view(rows, k, x.shape[1])  # back in the order of tokens and picks
        return (y.float().sum(1) + self.shared_experts(x).float()).to(x.dtype)


def expert_ends(ascending: Tensor, experts: int) -> Tensor:
    """int32 [E]: how many of the ascending expert numbers are at most e."""
    return torch.searchsorted(ascending, torch.arange(experts, device=ascending.device), right=True, out_int32=True)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up in fp32, the gate clamped above and `up` on both sides."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
