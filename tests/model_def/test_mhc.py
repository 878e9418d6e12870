"""mHC against loops over the specification's equations in fp64: coefficients to 1e-6, mutants that must be seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from v41.model_def.config import V41Config
from v41.model_def.mhc import Mix, boundary, coefficients, collapse, entry_streams, expand, post, sinkhorn
from v41.model_def.model import Layer
from v41.model_def.norm import RMSNorm

EPS = 1e-6
Coefficients = tuple[list[float], list[float], list[list[float]]]


def reference(x: list[list[float]], mix: Mix, iters: int, eps: float) -> Coefficients:
    """A, C, B of one row, from x[j][channel], as spec/MODEL.md 2.1 words it. Python floats are fp64."""
    S, fn, base, (s_pre, s_post, s_comb) = len(x), mix.fn.tolist(), mix.base.tolist(), mix.scale.tolist()
    flat = [value for stream in x for value in stream]
    r = 1 / math.sqrt(sum(f * f for f in flat) / len(flat) + 1e-20)
    z = [sum(w * f for w, f in zip(row, flat, strict=True)) * r for row in fn]
    pre = [1 / (1 + math.exp(-(z[j] * s_pre + base[j]))) + eps for j in range(S)]
    out = [2 / (1 + math.exp(-(z[S + k] * s_post + base[S + k]))) for k in range(S)]
    logits = [[z[2 * S + j * S + k] * s_comb + base[2 * S + j * S + k] for k in range(S)] for j in range(S)]
    comb = [[math.exp(v - max(row)) / sum(math.exp(u - max(row)) for u in row) + eps for v in row] for row in logits]
    comb = over_columns(comb, eps)
    for _ in range(iters - 1):
        comb = over_columns([[v / (sum(row) + eps) for v in row] for row in comb], eps)
    return pre, out, comb


def over_columns(m: list[list[float]], eps: float) -> list[list[float]]:
    sums = [sum(row[k] for row in m) + eps for k in range(len(m))]
    return [[v / sums[k] for k, v in enumerate(row)] for row in m]


def golden_sites(data: Golden) -> Iterator[tuple[Tensor, Mix]]:
    """Streams in front of both sublayers' coefficients and their weights, all layers."""
    config = data.config
    for i in range(config.num_hidden_layers):
        for X, site in (("x_in", "attn"), ("x_out", "ffn")):
            weights = [data.weights[f"layers.{i}.hc_{site}_{name}"] for name in ("fn", "base", "scale")]
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            mix = Mix(*weights, norm, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
            yield data(f"prefill.L{i}.{X}")[:3], mix


@torch.no_grad()
def distance(ours: Mix, X: Tensor, theirs: list[Coefficients]) -> float:
    """Largest deviation of any coefficient of any row."""
    return max(
        float((mine - torch.tensor([row[n] for row in theirs], dtype=torch.float64)).abs().max())
        for n, mine in enumerate(coefficients(X, ours))
    )


def test_coefficients_and_their_mutants_on_golden_weights(golden: Golden) -> None:  # noqa: F811
    """With comb's own scale, and with six times that: there the last iteration still moves what fp32 resolves."""
    seen: dict[str, float] = {}
    for X, mix in golden_sites(golden):
        assert (mix.iters, mix.eps) == (20, EPS)
        for sharper in (1.0, 6.0):
            site = replace(mix, scale=mix.scale * torch.tensor([1.0, 1.0, sharper]))
            theirs = [reference(row.tolist(), site, 20, EPS) for row in X]
            assert distance(site, X, theirs) <= 1e-6 * sharper
            for name, mutant in mutants(site).items():
                seen[name] = max(seen.get(name, 0.0), distance(mutant, X, theirs))
    assert min(seen.values()) > 5e-5, seen


def mutants(mix: Mix) -> dict[str, Mix]:
    """Models that a tolerance of a percent would take for right."""
    S = math.isqrt(len(mix.base) + 1) - 1
    transposed = torch.arange(S * S).unflatten(0, (S, S)).T.flatten() + 2 * S
    swapped = torch.cat((torch.arange(2 * S), transposed))
    return {
        "19 iterations": replace(mix, iters=19),
        "21 iterations": replace(mix, iters=21),
        "10 iterations": replace(mix, iters=10),
        "eps 0": replace(mix, eps=0.0),
        "comb axes swapped": replace(mix, fn=mix.fn[swapped], base=mix.base[swapped]),
        "pre and post swapped": replace(mix, fn=mix.fn.roll(S, 0), base=mix.base.roll(S, 0)),
    }


@st.composite
def mixes(draw: st.DrawFn) -> tuple[Tensor, Mix]:
    """Streams and weights of a site; the logits reach as far as Sinkhorn still converges slowly."""
    S, D, T = draw(st.integers(1, 4)), draw(st.sampled_from((1, 3, 8))), draw(st.integers(0, 4))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    fn, base = torch.randn(S * S + 2 * S, S * D) * (S * D) ** -0.5, torch.randn(S * S + 2 * S)
    scale = torch.tensor([1.0, 1.0, draw(st.sampled_from((0.0, 1.0, 4.0)))])
    mix = Mix(fn, base, scale, RMSNorm(D, 1e-20), draw(st.integers(1, 24)), draw(st.sampled_from((EPS, 1e-3))), 1e-20)
    return torch.randn(T, S, D).bfloat16(), mix


@given(mixes())
def test_coefficients_of_any_site(site: tuple[Tensor, Mix]) -> None:
    X, mix = site
    theirs = [reference(row.tolist(), mix, mix.iters, mix.eps) for row in X]
    assert [tuple(t.shape) for t in coefficients(X, mix)] == [X.shape[:2], X.shape[:2], (*X.shape[:2], X.shape[1])]
    assert not theirs or distance(mix, X, theirs) <= 4e-6


@given(mixes())
def test_sinkhorn_ends_with_columns_that_sum_to_one(site: tuple[Tensor, Mix]) -> None:
    """But for eps, which takes eps / s of a column that had the sum s before: 2e-5 where one iteration leaves 0.05."""
    X, mix = site
    comb = coefficients(X, replace(mix, eps=1e-30))[2]
    assert (comb.sum(-2) - 1).abs().le(1e-6).all() and (comb >= 0).all()


def test_sinkhorn_of_a_permutation_far_from_uniform() -> None:
    comb = sinkhorn(torch.eye(4).roll(1, 0)[None] * 50, 20, EPS)
    assert torch.allclose(comb[0], torch.eye(4).roll(1, 0), atol=1e-4)


@given(mixes())
def test_expand_and_collapse(site: tuple[Tensor, Mix]) -> None:
    """Against fp64, within half a unit of the bf16 result."""
    X, mix = site
    A, C, B = coefficients(X, mix)
    y = torch.randn_like(X[:, 0])
    expanded = C[..., None] * y[:, None].double() + torch.einsum("tjd,tjk->tkd", X.double(), B.double())
    assert within_rounding(expand(X, y, C, B), expanded)
    assert within_rounding(collapse(X, A), torch.einsum("tjd,tj->td", X.double(), A.double()))


def within_rounding(bf16: Tensor, fp64: Tensor) -> bool:
    assert bf16.dtype == torch.bfloat16 and bf16.shape == fp64.shape
    return bool(((bf16.double() - fp64).abs() <= 2**-8 * fp64.abs() + 1e-6).all())


def test_the_sum_over_streams_comes_before_y() -> None:
    """1 + 2^-24 - 1: in fp32 only the sum first keeps what is small."""
    X = torch.tensor([1.0, -1.0, 2**-24, 0.0], dtype=torch.bfloat16).view(1, 4, 1)
    y, ones = torch.tensor([[2.0**-24]], dtype=torch.bfloat16), torch.ones(1, 4)
    assert (expand(X, y, ones, torch.ones(1, 4, 4)) == 2**-23).all()


@given(mixes())
def test_boundary_is_its_parts_and_collapses_with_the_mix_it_was_given(site: tuple[Tensor, Mix]) -> None:
    X, mix = site
    carried, (_, C, B), y = torch.rand(X.shape[:2]), coefficients(X, mix), torch.randn_like(X[:, 0])
    new, x, *predicted = boundary(X, y, C, B, carried, mix)
    assert torch.equal(new, expand(X, y, C, B)) and torch.equal(new, post(X, y, C, B))
    assert torch.equal(x, mix.norm(collapse(new, carried)))
    assert all(map(torch.equal, predicted, coefficients(new, mix)))
    at_entry = boundary(X, None, None, None, carried, mix)
    assert at_entry[0] is X and torch.equal(at_entry[1], mix.norm(collapse(X, carried)))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_at_entry_all_streams_are_the_embedding_and_the_first_is_read(rows: int) -> None:
    embedded = torch.randn(rows, 8).bfloat16()
    X, A = entry_streams(embedded, 4)
    assert X.shape == (rows, 4, 8) and torch.equal(X[:, 2], embedded) and torch.equal(collapse(X, A), embedded)
    assert A.tolist() == [[1, 0, 0, 0]] * rows


def test_a_model_has_the_coefficients_its_config_names() -> None:
    config = V41Config.preset("tiny").replace(hc_sinkhorn_iters=7, hc_eps=1e-3)
    mix = Layer(config, config.roles[0]).ffn_mix
    assert (mix.iters, mix.eps, mix.norm_eps) == (7, 1e-3, config.rms_norm_eps)
    assert mix.fn.shape == (config.n_coefficients, config.hc_mult * config.hidden_size)
