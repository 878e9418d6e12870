"""Exact rounds once where the model rounds, keeps types, moves and writes, and is nearer the truth than eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from v41.tools.exact import Exact

torch.manual_seed(0)
X, W = torch.randn(9, 4096), torch.randn(4096, 7)
GROUPS = torch.tensor([2, 2, 9], dtype=torch.int32)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w,
        lambda x, w: F.linear(x, w.T),
        lambda x, w: torch.einsum("tk,kn->nt", x, w),
        lambda x, w: x.sum(-1, keepdim=True),
        lambda x, w: x.square().mean(-1),
        lambda x, w: x.softmax(-1),
        lambda x, w: x.exp() * 3,
        lambda x, w: F.silu(x),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_an_operation_is_done_in_fp64_and_rounded_once(function, dtype: torch.dtype, inference: bool) -> None:
    x, w = X.to(dtype), W.to(dtype)
    with torch.inference_mode(inference), Exact():
        found = function(x, w)
    true = function(x.double(), w.double())
    assert found.dtype == dtype
    tight = 2**-23 if dtype == torch.float32 else 2**-8  # one step of each operation of the function
    assert (found.double() - true).abs().max() <= 3 * tight * true.abs().max()
    torch.testing.assert_close(found.double(), true, rtol=3 * tight, atol=3 * tight * true.abs().max().item())


@torch.no_grad()
def test_it_is_nearer_the_truth_than_eager() -> None:
    true = X.double() @ W.double()
    with Exact():
        found = X @ W
    assert (found - true).abs().max() < (X @ W - true).abs().max()
    assert torch.equal(found, true.float())


@torch.no_grad()
def test_the_rounding_points_of_the_model_stay() -> None:
    def model(x: Tensor) -> Tensor:
        return (x.bfloat16().float() + 1).to(torch.float8_e4m3fn).float()

    with Exact():
        found = model(X)
    assert torch.equal(found, model(X))


@torch.no_grad()
def test_grouped_products_agree_with_the_plain_ones() -> None:
    rows, weights = X[:, :64].bfloat16().contiguous(), torch.randn(3, 64, 16).bfloat16()
    with Exact():
        found = F.grouped_mm(rows, weights, offs=GROUPS)
    plain = torch.cat([rows[:2].double() @ weights[0].double(), rows[2:].double() @ weights[2].double()])
    assert found.dtype == torch.bfloat16 and torch.equal(found, plain.bfloat16())


@torch.no_grad()
def test_writes_and_views_reach_their_tensor() -> None:
    cache = torch.zeros(4, 3)
    with Exact():
        cache[1:3].copy_(torch.ones(2, 3))
        cache.view(-1)[0] = 5
        cache.mul_(2)
    assert torch.equal(cache, torch.tensor([[10.0, 0, 0], [2, 2, 2], [2, 2, 2], [0, 0, 0]]))
