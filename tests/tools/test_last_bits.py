"""Nudged moves every fp32 sum by one unit in the last place, up or down by its seed, and nothing else."""

from __future__ import annotations

import torch

from v41.tools.last_bits import Nudged

X, W = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64, 7)


@torch.no_grad()
def test_sums_move_one_unit_and_the_seed_says_which_way() -> None:
    def nudged(seed: int) -> torch.Tensor:
        with Nudged(seed):
            return X @ W

    plain, found = X @ W, nudged(1)
    assert torch.equal(found, nudged(1)) and not torch.equal(found, nudged(2))
    up, down = (torch.nextafter(plain, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    assert ((found == up) | (found == down)).all()
    assert 0 < (found == up).sum() < found.numel()


@torch.no_grad()
def test_what_is_no_fp32_sum_stays() -> None:
    with Nudged(0):
        same = X * 3, X.relu(), X[:3], X.bfloat16() @ W.bfloat16(), (X > 0).sum()
    expected = X * 3, X.relu(), X[:3], X.bfloat16() @ W.bfloat16(), (X > 0).sum()
    assert all(map(torch.equal, same, expected))
