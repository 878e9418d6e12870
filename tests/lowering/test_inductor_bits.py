"""On a CPU a compiled piece equals the ATen graph it was made from, bit for bit, operator by operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.strategies.tracing import trace
from v41.lowering.inductor import compile_piece, supported

CPU = torch.device("cpu")
bf16 = torch.bfloat16


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def sinkhorn(x: Tensor) -> Tensor:
    m = x[:, :16].unflatten(-1, (4, 4)).softmax(-1) + 1e-6
    for axis in (-2, -1, -2):
        m = m / (m.sum(axis, keepdim=True) + 1e-6)
    return m


def attention(x: Tensor) -> Tensor:
    q, k = x.unflatten(-1, (4, 32)), x[:, :64].unflatten(-1, (2, 32))
    scores = torch.einsum("thd,tsd->ths", q, k)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return torch.einsum("ths,tsd->thd", (p / p.sum(-1, keepdim=True)).to(bf16).float(), k).to(bf16)


# In groups of one piece each, so that the whole list is a few compiles.
GROUPS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "functions": [
        torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.exp2, F.silu, F.softplus, torch.square,
        lambda x: x.abs().sqrt(), lambda x: (x.abs() + 1e-6).rsqrt(), lambda x: (x.abs() + 0.1).log(),
        lambda x: (x.abs() + 0.1).log2().ceil().exp2(), lambda x: x.abs().log1p(), lambda x: F.silu(x.to(bf16)),
    ],
    "arithmetic": [
        lambda x: x * 1.37 + x, lambda x: x / (x + 3), lambda x: x.clamp(-1, 1) * 3, lambda x: x.pow(2).reciprocal(),
        lambda x: x.to(torch.float8_e4m3fn).float() * 1.37, lambda x: x.flip(-1) * x, lambda x: torch.addcmul(x, x, x),
        lambda x: x.to(bf16) * x.to(bf16) + x.to(bf16),
    ],
    "reductions": [
        lambda x: x.sum(-1), lambda x: x.mean(-1), lambda x: x.amax(-1), lambda x: x.softmax(-1),
        lambda x: x.to(bf16).sum(-1), lambda x: x.unflatten(-1, (4, -1)).sum(1), lambda x: x.sum(0),
        lambda x: x.logsumexp(-1), lambda x: x.cumsum(-1), lambda x: x.topk(5).values,
    ],
    "products": [
        lambda x: x @ x[:1].T, lambda x: F.linear(x.to(bf16), x[:5].to(bf16)), lambda x: F.linear(x, x[:5]) + 1,
        lambda x: torch.einsum("tjd,tj->td", x.unflatten(-1, (4, 32)).to(bf16).float(), x[:, :4]).to(bf16),
        lambda x: torch.einsum("tjd,tjk->tkd", x.unflatten(-1, (4, 32)), x[:, :16].unflatten(-1, (4, 4))).to(bf16),
    ],
    "parts of the model": [norm, sinkhorn, attention],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _keeps_rounding_points() -> None:
    if reason := supported(CPU):
        pytest.skip(reason)


@pytest.mark.parametrize("group", GROUPS)
def test_equals_its_graph(group: str) -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    gm = trace(lambda x: tuple(function(x) for function in GROUPS[group]), static=[x])
    for index, (found, expected) in enumerate(zip(compile_piece(gm)(x), gm(x), strict=True)):
        assert torch.equal(found, expected), f"{group}[{index}]: {(found != expected).sum()} of {found.numel()} differ"
