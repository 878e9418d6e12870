"""RoPE is a complex multiplication by the row's angle; YaRN is its ramp; what is turned forward comes back."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41.model_def.config import RopeScaling, V41Config
from v41.model_def.rope import both_frequencies, frequencies, rotate, turn, yarn

dims = st.sampled_from((2, 8, 64))


@given(st.integers(0, 2**32 - 1), dims, st.integers(0, 16), st.integers(0, 2**20 - 1), st.booleans())
def test_adjacent_pairs_are_multiplied_by_the_angle(seed: int, dim: int, kept: int, at: int, inverse: bool) -> None:
    torch.manual_seed(seed)
    freqs = frequencies(dim, 10000.0)
    x = torch.randn(1, kept + dim, dtype=torch.float32).bfloat16()
    ours = rotate(x, turn(torch.tensor([at]), freqs), inverse=inverse)[0].tolist()
    assert ours[:kept] == x[0, :kept].tolist()
    pairs = x[0, kept:].tolist()
    for i in range(dim // 2):
        angle = float(torch.tensor(float(at)) * freqs[i])  # the angle is fp32 in the model
        z = complex(pairs[2 * i], pairs[2 * i + 1]) * cmath.exp(1j * (-angle if inverse else angle))
        size = 2**-8 * abs(z) + 1e-6
        assert abs(ours[kept + 2 * i] - z.real) <= size and abs(ours[kept + 2 * i + 1] - z.imag) <= size


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_heads_turn_as_rows_do_and_back_again(seed: int, heads: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, heads, 24)
    by = turn(torch.tensor([0, 1, 7, 128, 65537]), frequencies(16, 10000.0))
    turned = rotate(x, by)
    assert all(torch.equal(turned[:, h], rotate(x[:, h], by)) for h in range(heads))
    assert torch.equal(turned[0], x[0])  # position 0
    assert torch.allclose(rotate(turned, by, inverse=True), x, atol=1e-5)


def test_a_product_of_turned_vectors_hangs_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k, freqs = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64), frequencies(64, 10000.0)

    def product(p: int, j: int) -> float:
        (a, b) = (rotate(x.float()[None], turn(torch.tensor([at]), freqs))[0] for x, at in ((q, p), (k, j)))
        return float(a @ b)

    assert product(100, 60) == pytest.approx(product(40, 0), abs=1e-3)
    assert abs(product(100, 60) - product(100, 61)) > 1e-2


def test_released_frequencies() -> None:
    """The ramp runs from pair 15 to pair 25 of 32: kept below, a sixteenth above, both at theta 160000."""
    window, compressed = both_frequencies(V41Config.preset("flash"))
    plain = [160000 ** (-2 * i / 64) for i in range(32)]
    expected = [f / 16 * ramp + f * (1 - ramp) for f, ramp in zip(plain, ramps(15, 25), strict=True)]
    assert compressed.tolist() == pytest.approx(expected, rel=1e-6)
    assert window.tolist() == pytest.approx([10000 ** (-2 * i / 64) for i in range(32)], rel=1e-6)


def ramps(first: int, last: int) -> list[float]:
    return [min(max((i - first) / (last - first), 0), 1) for i in range(32)]


@given(dims, st.sampled_from((10.0, 1e3, 160000.0)), st.sampled_from((1, 4, 16)), st.sampled_from((1024, 65536)))
def test_yarn_keeps_fast_pairs_and_slows_slow_ones(dim: int, theta: float, factor: int, original: int) -> None:
    plain = frequencies(dim, theta)
    slowed = yarn(plain, theta, factor, 32, 1, original)
    assert (slowed <= plain * 1.000001).all() and (slowed >= plain / factor * 0.999999).all()
    for f, s in zip(plain.tolist(), slowed.tolist(), strict=True):
        turns = f * original / (2 * math.pi)
        grain = theta ** (2 / dim)  # from one pair to the next: the ramp begins and ends at a pair
        assert turns < 32 * grain or s == pytest.approx(f)
        assert turns > 1 / grain or s == pytest.approx(f / factor)


def test_where_even_the_last_pair_is_fast_none_is_slowed() -> None:
    """The slowest of 4 turns 1,855 times: the ramp would begin at pair 10, behind the highest at which it may end."""
    plain = frequencies(8, 10.0)
    assert torch.equal(yarn(plain, 10.0, 16, 32, 1, 65536), plain)


def test_a_config_says_which_layers_stretch() -> None:
    config = V41Config.preset("tiny").replace(rope_scaling=RopeScaling(factor=1))
    window, compressed = both_frequencies(config)
    assert torch.equal(compressed, frequencies(config.qk_rope_head_dim, config.compress_rope_theta))
    assert torch.equal(window, frequencies(config.qk_rope_head_dim, config.rope_theta))
