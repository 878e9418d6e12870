"""The accuracy helper accepts eager and what is as good, and finds a lost rounding, an added one and a bad sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fp64 import assert_accurate, rms, run_fp64
from tests.strategies.tracing import trace
from v41.regions import outline

bf16 = torch.bfloat16


def weigh(x: Tensor, y: Tensor) -> Tensor:
    """Probabilities rounded to bf16, a scale rounded up to a power of two, the five largest rows' sum."""
    p = x.softmax(-1).to(bf16).float()
    scale = y.abs().amax(-1, keepdim=True).log2().ceil().exp2()
    return (p * y / scale).topk(5).values.sum(-1)


def inputs() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    return x, y


def unrounded(x: Tensor, y: Tensor) -> Tensor:
    scale = y.abs().amax(-1, keepdim=True).log2().ceil().exp2()
    return (x.softmax(-1) * y / scale).topk(5).values.sum(-1)


def rounded_twice(x: Tensor, y: Tensor) -> Tensor:
    return weigh(x, y.to(bf16).float())


def summed_badly(x: Tensor, y: Tensor) -> Tensor:
    return weigh(x, y) * (1 + 1e-5)


def test_eager_and_exact_arithmetic_pass() -> None:
    gm = trace(weigh, static=inputs())
    assert_accurate(weigh(*inputs()), gm, *inputs())
    (truth,) = run_fp64(gm, *inputs())
    assert truth.dtype == torch.float64 and rms(weigh(*inputs()) - truth) < 1e-7
    assert_accurate(truth.float(), gm, *inputs())


@pytest.mark.parametrize("wrong", [unrounded, rounded_twice, summed_badly])
def test_a_wrong_lowering_fails(wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = trace(weigh, static=inputs())
    with pytest.raises(AssertionError, match="RMS error"):
        assert_accurate(wrong(*inputs()), gm, *inputs())


def test_without_rounding_it_tells_what_rounding_costs() -> None:
    gm = trace(weigh, static=inputs())
    (kept,), (dropped,) = run_fp64(gm, *inputs()), run_fp64(gm, *inputs(), rounding=False)
    assert 1e-5 < rms(kept - dropped) / rms(kept) < 1e-2
    assert rms(unrounded(*inputs()) - dropped) < 1e-7


def test_regions_are_seen_through() -> None:
    gm = trace(weigh, static=inputs())
    (plain,) = run_fp64(gm, *inputs())
    outline(gm, [node for node in gm.graph.nodes if node.op == "call_function"][:4], kind="part")
    (outlined,) = run_fp64(gm, *inputs())
    assert torch.equal(plain, outlined)


def test_inputs_that_a_graph_writes_stay_as_they_were() -> None:
    def write(cache: Tensor, rows: Tensor) -> Tensor:
        cache.index_put_((torch.arange(2),), rows)
        return cache.sum()

    cache, rows = torch.zeros(4, 8), torch.ones(2, 8)
    (total,) = run_fp64(trace(write, static=[cache.clone(), rows]), cache, rows)
    assert total == 16 and not cache.any()
