"""Gate and experts: bit for bit on golden data, against a slow fp64 loop, and one row never meets another."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.model_def.exact import exact
from tests.model_def.released import filled
from v41.model_def import moe as moe_file
from v41.model_def.config import V41Config
from v41.model_def.moe import Experts, Fp4ExpertLinear, Gate, MoE, expert_ends, swiglu
from v41.model_def.quantization import dequantize_mxfp4, fake_quant_fp8

TINY = V41Config.preset("tiny")
QUANTISED = TINY.replace(weight_dtype="fp8", expert_dtype="fp4")
RUNS = ("prefill", "decode0", "decode3")


def golden_moe(golden: Golden, layer: int) -> MoE:  # noqa: F811
    return filled(MoE(golden.config), golden.weights, f"layers.{layer}.ffn.")


@torch.no_grad()
def differing(golden: Golden, run: str, layer: int, *, own: bool = False) -> int:  # noqa: F811
    """Elements of ffn.out that differ, in the exact mode or in the model's own."""
    moe, x = golden_moe(golden, layer), golden(f"{run}.L{layer}.ffn.in").view(-1, golden.config.hidden_size)
    if own:
        y = moe(x)
    else:
        with exact():
            y = moe(x)
    return int((y != golden(f"{run}.L{layer}.ffn.out").view_as(y)).sum())


@pytest.mark.parametrize("run", RUNS)
def test_golden_outputs(golden: Golden, run: str) -> None:  # noqa: F811
    for layer in range(golden.config.num_hidden_layers):
        assert differing(golden, run, layer) == 0, layer
        assert differing(golden, run, layer, own=True) <= 20, layer


@pytest.mark.parametrize("run", RUNS)
@torch.no_grad()
def test_golden_gates(golden: Golden, run: str) -> None:  # noqa: F811
    for layer in range(golden.config.num_hidden_layers):
        gate = golden_moe(golden, layer).gate
        with exact():
            weights, experts = gate(golden(f"{run}.L{layer}.ffn.in").view(-1, golden.config.hidden_size))
        theirs = golden.reference[f"{run}.L{layer}.gate.idx"].sort(-1)
        ours = experts.sort(-1)  # the order within a token is not defined
        assert torch.equal(ours.values, theirs.values), layer
        their_weights = golden.reference[f"{run}.L{layer}.gate.w"].gather(-1, theirs.indices)
        torch.testing.assert_close(weights.gather(-1, ours.indices), their_weights, rtol=0, atol=2.5e-7)


def weight_after_w2(self: Experts, x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    a = swiglu(self.w1(x, ends), self.w3(x, ends), self.limit)
    return (self.w2(a.to(x.dtype), ends).float() * weights.unsqueeze(-1)).to(x.dtype)


def biased_weights(self: Gate, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt() + self.bias
    best = scores.topk(self.k)
    return best.values / best.values.sum(-1, keepdim=True) * self.scaling, best.indices


def ties_to_the_next_expert(ascending: Tensor, experts: int) -> Tensor:
    ends = torch.arange(experts, device=ascending.device)
    return torch.searchsorted(ascending, ends, right=False, out_int32=True)


MUTANTS: dict[str, tuple[object, str, object]] = {
    "the weight after W2": (Experts, "forward", weight_after_w2),
    "weights from biased scores": (Gate, "forward", biased_weights),
    "gate and up swapped": (moe_file, "swiglu", lambda g, u, limit: swiglu(u, g, limit)),
    "inputs of experts not rounded": (moe_file, "fake_quant_fp8", lambda x: x),
    "rows of the expert before": (moe_file, "expert_ends", ties_to_the_next_expert),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_golden_outputs_see(golden: Golden, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(*MUTANTS[mutant])
    assert differing(golden, "prefill", 2) > 20


def slow_moe(moe: MoE, config: V41Config, x: Tensor) -> Tensor:
    """fp64, a token at a time, an expert at a time; bf16 weights. Rounds what linears return and what W2 reads, as the
    model does."""
    in_bf16 = lambda v: v.bfloat16().double()

    def expert(v: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: float) -> Tensor:
        g, u = in_bf16(w1.double() @ v), in_bf16(w3.double() @ v)
        g, u = g.clamp(max=config.swiglu_limit), u.clamp(-config.swiglu_limit, config.swiglu_limit)
        return in_bf16(w2.double() @ in_bf16(g * torch.sigmoid(g) * u * weight))

    out = []
    routed, shared = moe.experts, moe.shared_experts
    for v in x.double():
        s = torch.log1p(torch.exp(moe.gate.weight.double() @ v)).sqrt()
        order = sorted(range(len(s)), key=lambda e: -(s[e] + moe.gate.bias[e].double()).item())
        picked = order[: config.num_experts_per_tok]
        total = sum(s[e] for e in picked) + 1e-20  # as the model: where no expert wants a row, it is not small beside s
        y = expert(v, shared.w1.weight, shared.w3.weight, shared.w2.weight, 1.0)
        for e in picked:
            weight = float(s[e] / total * config.routed_scaling_factor)
            y = y + expert(v, routed.w1.weight[e], routed.w3.weight[e], routed.w2.weight[e], weight)
        out.append(y)
    return torch.stack(out)


@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(0.5, 100.0))
@settings(max_examples=15)
@torch.no_grad()
def test_matches_a_slow_loop(seed: int, k: int, size: float) -> None:
    """Large inputs reach the clamps, which golden data does not."""
    torch.manual_seed(seed)
    config = TINY.replace(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=k)
    moe = MoE(config)
    moe.gate.bias.copy_(torch.randn(4))
    x = (torch.randn(6, 64) * size).bfloat16()
    exactly = slow_moe(moe, config, x)
    assert (moe(x).double() - exactly).norm() <= 0.003 * exactly.norm()


def test_the_clamps_are_where_the_model_has_them() -> None:
    g, u = torch.tensor([50.0, -50.0, 1.0, 1.0]).bfloat16(), torch.tensor([1.0, 1.0, 50.0, -50.0]).bfloat16()
    silu = lambda v: v * torch.sigmoid(torch.tensor(v)).item()
    expected = torch.tensor([silu(10.0), silu(-50.0), silu(1.0) * 10, silu(1.0) * -10])
    torch.testing.assert_close(swiglu(g, u, 10.0), expected)


@torch.no_grad()
def test_ties_go_to_the_lower_expert_and_bias_moves_only_the_choice() -> None:
    gate = Gate(TINY)
    gate.weight.zero_()
    x = torch.randn(3, TINY.hidden_size).bfloat16()
    weights, experts = gate(x)
    assert experts.tolist() == [[0, 1]] * 3
    gate.bias[5] = 100.0
    moved, experts = gate(x)
    assert experts.tolist() == [[5, 0]] * 3
    assert torch.equal(moved, weights) and torch.allclose(weights.sum(-1), torch.tensor(TINY.routed_scaling_factor))


@given(st.lists(st.integers(0, 7), max_size=20).map(sorted))
def test_expert_ends_count_rows(numbers: list[int]) -> None:
    ends = expert_ends(torch.tensor(numbers, dtype=torch.int64), 8)
    assert ends.tolist() == [sum(n <= e for n in numbers) for e in range(8)] and ends.dtype == torch.int32


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 2**32))
@torch.no_grad()
def test_packed_experts_are_decoded_one_at_a_time_and_only_those_that_have_rows(counts: list[int], seed: int) -> None:
    """With the bits of one grouped product over all of them, which is what a compiler gets."""
    torch.manual_seed(seed)
    linear, x = Fp4ExpertLinear(4, 64, 96), torch.randn(sum(counts), 64).bfloat16()
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    weights = dequantize_mxfp4(linear.weight, linear.scale).transpose(1, 2)
    with patch.object(moe_file, "dequantize_mxfp4", wraps=dequantize_mxfp4) as decoded:
        y = linear(x, ends)
    assert torch.equal(y, F.grouped_mm(fake_quant_fp8(x), weights, offs=ends))
    held = [linear.weight[e].data_ptr() for e, rows in enumerate(counts) if rows]
    assert [call.args[0].data_ptr() for call in decoded.call_args_list] == held
    assert all(call.args[0].shape == (96, 32) for call in decoded.call_args_list)


@pytest.mark.parametrize("config", [TINY, QUANTISED], ids=["bf16", "quantised"])
@given(st.integers(0, 2**32), st.data())
@settings(max_examples=10)
@torch.no_grad()
def test_a_row_does_not_see_its_batch(config: V41Config, seed: int, data: st.DataObject) -> None:
    """Others may hold NaN; bit for bit in the exact mode, where no library tiles by rows."""
    torch.manual_seed(seed)
    moe, x = MoE(config), torch.randn(9, config.hidden_size).bfloat16()
    spoiled = torch.tensor(data.draw(st.lists(st.booleans(), min_size=9, max_size=9)))
    batch = torch.where(spoiled[:, None], torch.nan, x)
    order = torch.tensor(data.draw(st.permutations(range(9))))
    with exact():
        alone = torch.cat([moe(row[None]) for row in x])
        together = moe(batch[order])
    keep = ~spoiled[order]
    assert torch.equal(together[keep], alone[order][keep])


@pytest.mark.parametrize("config", [TINY, QUANTISED], ids=["bf16", "quantised"])
@torch.no_grad()
def test_traces_with_unbacked_rows_and_does_not_recompile(config: V41Config) -> None:
    moe: Callable[[Tensor], Tensor] = MoE(config).requires_grad_(False)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 0, 1, 2, 33):
            x = torch.randn(rows, config.hidden_size).bfloat16()
            mark_unbacked(x, 0)
            assert torch.equal(compiled(x), moe(x))
    torch._dynamo.reset()
