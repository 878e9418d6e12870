"""On a CPU a compiled piece equals the ATen graph it was made from, bit for bit, operator by operator.

Eager has two routines for a function: one for whole vectors and one for the last elements of a loop. So the sizes here
leave a rest, and leave none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.strategies.tracing import trace
from v41.lowering.inductor import EXACT_ON_CPU, compile_piece, supported

CPU = torch.device("cpu")
bf16 = torch.bfloat16
aten = torch.ops.aten


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
        F.gelu, F.elu, F.mish, F.hardswish, F.logsigmoid, lambda x: x.abs().pow(0.3), torch.erf, torch.atan,
    ],
    "arithmetic": [
        lambda x: x * 1.37 + x, lambda x: x / (x + 3), lambda x: x.clamp(-1, 1) * 3, lambda x: x.pow(2).reciprocal(),
        lambda x: x.to(torch.float8_e4m3fn).float() * 1.37, lambda x: x.flip(-1) * x, lambda x: torch.addcmul(x, x, x),
        lambda x: torch.add(x, x * 3, alpha=0.3), lambda x: torch.lerp(x, x * x, 0.3), lambda x: x.fmod(0.7),
        lambda x: torch.div(x, 0.3, rounding_mode="floor"), lambda x: x % 0.7,
        lambda x: x.to(bf16) * x.to(bf16) + x.to(bf16),
    ],
    "reductions": [
        lambda x: x.sum(-1), lambda x: x.mean(-1), lambda x: x.amax(-1), lambda x: x.softmax(-1),
        lambda x: x.to(bf16).sum(-1), lambda x: x.unflatten(-1, (4, -1)).sum(1), lambda x: x.sum(0),
        lambda x: x.logsumexp(-1), lambda x: x.cumsum(-1), lambda x: x.topk(5).values,
        lambda x: x.var(-1), lambda x: x.std(), lambda x: x.norm(dim=-1), lambda x: x.prod(-1), lambda x: x.max(-1)[0],
    ],
    "products": [
        lambda x: x @ x[:1].T, lambda x: F.linear(x.to(bf16), x[:2].to(bf16)), lambda x: F.linear(x, x[:2]) + 1,
        lambda x: torch.einsum("tjd,tj->td", x.unflatten(-1, (4, 32)).to(bf16).float(), x[:, :4]).to(bf16),
        lambda x: torch.einsum("tjd,tjk->tkd", x.unflatten(-1, (4, 32)), x[:, :16].unflatten(-1, (4, 4))).to(bf16),
    ],
    "parts of the model": [norm, sinkhorn, attention],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _keeps_rounding_points() -> None:
    if reason := supported(CPU):
        pytest.skip(reason)


WIDTHS = {"products": 128, "parts of the model": 128}  # the others: 20, so that 3 rows leave a rest and 8 do not

# One use of each operator that Inductor's own code computes.
EXACT: dict[object, Callable[[Tensor, Tensor], Tensor]] = {
    aten.add: torch.add, aten.sub: torch.sub, aten.mul: torch.mul, aten.div: torch.div, aten.neg: lambda x, y: -x,
    aten.abs: lambda x, y: x.abs(), aten.reciprocal: lambda x, y: x.reciprocal(), aten.rsqrt: lambda x, y: x.rsqrt(),
    aten.relu: lambda x, y: x.relu(), aten.sign: lambda x, y: x.sign(), aten.ceil: lambda x, y: x.ceil(),
    aten.floor: lambda x, y: x.floor(), aten.trunc: lambda x, y: x.trunc(), aten.round: lambda x, y: x.round(),
    aten.where: lambda x, y: torch.where(x > y, x, y), aten.clone: lambda x, y: x.T.contiguous(),
    torch.ops.prims.convert_element_type: lambda x, y: x.to(bf16),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_equals_its_graph(group: str) -> None:
    draw = torch.Generator().manual_seed(0)
    width = WIDTHS.get(group, 20)
    gm = trace(lambda x: tuple(function(x) for function in GROUPS[group]), torch.randn(8, width), backed=True)
    piece = compile_piece(gm)
    for rows in (8, 3):
        x = torch.randn(rows, width, generator=draw)
        for index, (found, expected) in enumerate(zip(piece(rows, x), gm(rows, x), strict=True)):
            wrong = (found != expected).sum()
            assert torch.equal(found, expected), f"{group}[{index}], {rows} rows: {wrong} of {found.numel()} differ"


def test_what_its_own_code_computes_is_exact_for_any_bits() -> None:
    assert EXACT.keys() == EXACT_ON_CPU
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2, 63, 65), generator=draw).int().view(torch.float32)
    values = [0.0, -0.0, 1, -1, 0.5, 1.5, -2.5, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, 448, 464, 500]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).T.unflatten(-1, (16, 16))
    casts = [lambda x, y, to=to: x.to(to).float() for to in (torch.half, torch.float8_e4m3fn, torch.float8_e5m2)]
    narrow = [lambda x, y, op=op: op(x.to(bf16), y.to(bf16)) for op in (torch.add, torch.div, torch.maximum)]
    chosen = [torch.maximum, torch.minimum, torch.clamp, lambda x, y: x.clamp(0.0, 1.0), lambda x, y: (x * 0).amax(-1)]
    uses = {**EXACT, **dict(enumerate([*casts, *narrow, *chosen]))}
    for x, y in (bits, pairs):
        gm = trace(lambda x, y: tuple(use(x, y) for use in uses.values()), static=[x, y])
        for name, found, expected in zip(uses, compile_piece(gm)(x, y), gm(x, y), strict=True):
            same = (found == expected) & (found.signbit() == expected.signbit())
            assert (same | (found.isnan() & expected.isnan())).all(), name
