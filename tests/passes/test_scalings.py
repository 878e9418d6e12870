"""A division by a root mean square is found in each spelling, and only where the mean is over all that a row has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.scalings import Scaling, find_scalings

EPS = 1e-6


def scalings(gm: GraphModule) -> list[Scaling]:
    return [found for node in gm.graph.nodes if node.op == "call_function" for found in find_scalings(node)]


def mean_of(x: Tensor, axes: list[int]) -> Tensor:
    return (x * x).mean(axes, keepdim=True) + EPS


def sum_of(x: Tensor, axes: list[int]) -> Tensor:
    return (x * x).sum(axes, keepdim=True) / 64 + EPS


SPELLINGS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "rsqrt of a mean": lambda x, axes: x * mean_of(x, axes).rsqrt(),
    "divided by a root": lambda x, axes: x / mean_of(x, axes).sqrt(),
    "a sum over its count": lambda x, axes: x * sum_of(x, axes).sqrt().reciprocal(),
    "1 over a root": lambda x, axes: x * (1 / mean_of(x, axes).sqrt()),
    "a power": lambda x, axes: x * mean_of(x, axes) ** -0.5,
    "divided by a power": lambda x, axes: x / mean_of(x, axes) ** 0.5,
    "a sum times 1 / count": lambda x, axes: x * ((x * x).sum(axes, keepdim=True) * (1 / 64) + EPS).rsqrt(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("sizes", "axes", "found"),
    [
        ((64,), [-1], True),
        ((1, 64), [-1], True),  # an axis of one element is no other part of the row
        ((1, 64, 1), [2], True),
        ((2, 32), [1, 2], True),
        ((2, 64), [-1], False),  # each half of a row by its own
        ((64, 1), [-1], False),
    ],
)
def test_the_mean_is_over_all_that_a_row_has(
    spelling: str, sizes: tuple[int, ...], axes: list[int], found: bool
) -> None:
    gm = trace(lambda x: SPELLINGS[spelling](x, axes), torch.rand(5, *sizes))
    assert [(scaling.eps, scaling.source.op) for scaling in scalings(gm)] == [(EPS, "placeholder")] * found


def test_another_count_is_no_mean() -> None:
    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * sum_of(x, [-1]).rsqrt(), x * ((x * x).sum(-1, keepdim=True) * (1 / 64) + EPS).rsqrt()

    assert scalings(trace(scaled, torch.rand(5, 32))) == []


def test_a_mean_of_what_is_no_square_scales_nothing() -> None:
    def scaled(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * (each.mean(-1, keepdim=True) + EPS).rsqrt() for each in (x + x, x * y, x.abs())]

    assert scalings(trace(scaled, torch.rand(5, 64), torch.rand(5, 64))) == []
