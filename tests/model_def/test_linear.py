"""Linear layers, norm and top-k: against fp64, against golden rings, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.model_def.exact import exact
from tests.model_def.released import filled
from v41.model_def import linear as linear_file
from v41.model_def.config import V41Config
from v41.model_def.linear import Fp8Linear, Fp32Linear, Linear, linear
from v41.model_def.norm import RMSNorm, rms_norm
from v41.model_def.quantization import fake_quant_fp8
from v41.model_def.topk import topk_lowest_index


def weights_by_block(layer: Fp8Linear) -> Tensor:
    """The stored weights in fp64, one 32 x 32 block after another."""
    weight = layer.weight.double()
    for i in range(layer.scale.shape[0]):
        for j in range(layer.scale.shape[1]):
            weight[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] *= 2.0 ** (int(layer.scale[i, j]) - 127)
    return weight


@pytest.mark.parametrize(("width", "out", "rows"), [(64, 96, 5), (32, 33, 1), (96, 31, 2), (64, 64, 0)])
def test_fp8_is_the_product_of_the_rounded_sides(width: int, out: int, rows: int) -> None:
    torch.manual_seed(width)
    layer = Fp8Linear(width, out)
    layer.scale.add_(torch.randint(-3, 4, layer.scale.shape).to(torch.uint8))  # blocks of very different size
    x = torch.randn(rows, width).bfloat16() * torch.logspace(-3, 3, width).bfloat16()
    exactly = (fake_quant_fp8(x).double() @ weights_by_block(layer).T).bfloat16()
    with exact() as mode:
        assert torch.equal(layer(x), exactly)
    assert mode.counts["gemm"] == 1
    torch.testing.assert_close(layer(x), exactly, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_multiplies_and_returns_fp32(dtype: torch.dtype) -> None:
    layer = Fp32Linear(64, 8)
    layer.weight = torch.nn.Parameter(torch.randn(8, 64, dtype=dtype))
    x = torch.randn(3, 64).bfloat16()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x).double(), x.double() @ layer.weight.double().T, rtol=1e-5, atol=1e-5)


def test_the_config_decides_how_weights_are_held() -> None:
    config = V41Config.preset("tiny")
    assert type(linear(config, 64, 64)) is Linear
    assert type(linear(config.replace(weight_dtype="fp8"), 64, 64)) is Fp8Linear


@given(st.integers(0, 2**32), st.sampled_from([1e-20, 1e-6]), st.integers(-40, 40))
def test_norm_is_that_of_fp64_rounded_once(seed: int, eps: float, exponent: int) -> None:
    torch.manual_seed(seed)
    x, weight = (torch.randn(3, 64) * 2.0**exponent).bfloat16(), torch.randn(64).bfloat16()
    exactly = x.double() * weight.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), exactly, rtol=2**-8, atol=0)


def test_norm_of_nothing_is_nothing() -> None:
    norm = RMSNorm(32, 1e-20)
    assert torch.equal(norm(torch.zeros(2, 32).bfloat16()), torch.zeros(2, 32).bfloat16())
    assert norm(torch.zeros(0, 32)).shape == (0, 32)


def ring_part(golden: Golden, layer: int) -> tuple[Tensor, Tensor]:  # noqa: F811
    """The channels of a golden ring that RoPE leaves alone: as stored, and as our linear, norm and format make them."""
    config, prefix = golden.config, f"layers.{layer}.attn."
    wkv = filled(Fp8Linear(config.hidden_size, config.head_dim), golden.weights, prefix + "wkv.")
    norm = filled(RMSNorm(config.head_dim, config.rms_norm_eps), golden.weights, prefix + "kv_norm.")
    with exact(), torch.no_grad():
        ours = fake_quant_fp8(norm(wkv(golden(f"prefill.L{layer}.attn.in"))))
    length, window, plain = len(ours), config.sliding_window, (config.head_dim - config.qk_rope_head_dim) // 32 * 32
    slots = [position % window for position in range(length - window, length)]
    return golden(f"prefill.L{layer}.ring")[slots, :plain], ours[-window:, :plain]


def test_golden_rings(golden: Golden) -> None:  # noqa: F811
    for layer in range(golden.config.num_hidden_layers):
        stored, ours = ring_part(golden, layer)
        assert torch.equal(stored, ours), layer


def test_golden_rings_see_an_unrounded_input(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(linear_file, "fake_quant_fp8", lambda x: x)
    assert not torch.equal(*ring_part(golden, 1))


scores = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38]),
                  min_size=1, max_size=12)


@given(scores, st.data())
def test_topk_is_a_stable_sort(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(row)))
    rank = {i: (math.isnan(v), 0.0 if math.isnan(v) else -v, i) for i, v in enumerate(row)}
    expected = sorted(rank, key=rank.__getitem__)[:k]
    assert topk_lowest_index(torch.tensor([row, row]), k).tolist() == [expected, expected]


def test_both_zeros_are_one_number_and_nan_is_below_all() -> None:
    assert topk_lowest_index(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 4).tolist() == [0, 1, 2, 3]
    assert topk_lowest_index(torch.tensor([math.nan, -math.inf, -math.nan]), 3).tolist() == [1, 0, 2]
