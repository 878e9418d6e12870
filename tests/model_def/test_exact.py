"""The exact mode itself: every GEMM is fp64 rounded once, long reductions too, and fixed lengths stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model_def.exact import TAILED, exact, fixed_lengths
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.exact import SUMS, computes

TINY = V41Config.preset("tiny")

torch.manual_seed(0)
X, W, BATCH = torch.randn(37, 300).bfloat16(), torch.randn(20, 300).bfloat16(), torch.randn(3, 300, 20).bfloat16()
ENDS = torch.tensor([5, 5, 30], dtype=torch.int32)


def groups(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_zeros(37, 20)
    out[:5], out[5:30] = x[:5] @ w[0], x[5:30] @ w[2]
    return out


GEMMS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "linear": (lambda: F.linear(X, W), lambda: X.double() @ W.double().T),
    "matmul of 3 dimensions": (lambda: X.expand(3, -1, -1) @ BATCH, lambda: X.double() @ BATCH.double()),
    "einsum": (lambda: torch.einsum("td,edo->teo", X, BATCH),
               lambda: (X.double() @ BATCH.double()).transpose(0, 1)),
    "fp32": (lambda: X.float() @ W.float().T, lambda: X.double() @ W.double().T),
    "addmm": (lambda: torch.addmm(W[:, 0], X, W.T), lambda: W[:, 0].double() + X.double() @ W.double().T),
    "grouped_mm": (lambda: F.grouped_mm(X[:, :296], BATCH[:, :296, :16].contiguous(), offs=ENDS),
                   lambda: groups(X[:, :296].double(), BATCH[:, :296].double())[:, :16]),
}


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", GEMMS)
def test_gemms_are_fp64_rounded_once(name: str, guard: Callable[[], torch.no_grad]) -> None:
    ours, exactly = GEMMS[name]
    with guard(), exact() as mode:
        result = ours()
    assert torch.equal(result, exactly().to(result.dtype)) and mode.counts["gemm"] == 1


def test_reductions_over_the_layout_are_fp64_and_others_are_left_alone() -> None:
    x = torch.randn(4, 5000) * torch.logspace(-4, 4, 5000)
    for reduce in (lambda v: v.sum(-1), lambda v: v.softmax(-1), lambda v: v.mean(-1), lambda v: v.logsumexp(-1)):
        with exact() as mode:
            varying = reduce(x)
        assert torch.equal(varying, reduce(x.double()).float()) and mode.counts["reduction"] == 1
        with exact(fixed={5000}) as mode:
            assert torch.equal(reduce(x), reduce(x)) and mode.counts["reduction"] == 0
        plain = reduce(x)
        with exact(fixed={5000}):
            assert torch.equal(reduce(x), plain)


class Unary(TorchDispatchMode):
    """Keeps the functions of one floating tensor that are called, with their other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, *others = args or (None,)
        alone = not any(isinstance(other, Tensor) for other in others)
        if alone and isinstance(x, Tensor) and x.dtype == torch.float32 and computes(func) and func not in SUMS:
            self.found[func] = (tuple(others), kwargs or {})
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_no_element_hangs_on_how_many_there_are() -> None:
    """Every pointwise function that a forward calls, by every length: those with a tail of their own are in TAILED."""
    model, ids = V41ForCausalLM.random(TINY), list(range(20))
    cache = Cache.zeros(TINY, 1, 20)
    with Unary() as calls:
        model(build_batch(TINY, cache, [Chunk(ids, 0, 0)]), cache)
    assert calls.found.keys() >= TAILED and len(calls.found) > 10
    x = 4 * torch.randn(2048)
    for func, (others, options) in calls.found.items():
        with exact():
            whole = func(x, *others, **options)
            for n in range(1, 80):
                part = func(x[n : 2 * n].clone(), *others, **options)
                assert torch.equal(part.nan_to_num(), whole[n : 2 * n].nan_to_num()), (func, n)


def test_the_widths_of_a_model_are_fixed_and_its_keys_are_not() -> None:
    fixed = fixed_lengths(TINY)
    assert {TINY.hidden_size, TINY.hc_mult, TINY.num_experts_per_tok} <= fixed
    assert TINY.sliding_window + TINY.index_topk not in fixed
