"""Pieces keep every rounding point: compile_piece returns eager's bits, where Inductor left alone does not.

On a CPU all of it is equal (test_inductor_bits.py goes through single operators). On a GPU a sum's order, a fused
product and the library's exp differ in the last bits of fp32, so cases of casts and single roundings must be equal
there, the others accurate to the contract. One run on a machine with a GPU covers both devices.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fp64 import assert_accurate
from tests.strategies.tracing import trace
from v41._compat import inductor_compile
from v41.lowering.inductor import cast_chain, compile_piece, supported
from v41.regions import flatten

bf16, fp8, fp8_wide = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
ROWS, WIDTH = 7, 128


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    chosen = torch.device(request.param)
    if reason := supported(chosen):
        pytest.skip(reason)
    return chosen


def round_trip(x: Tensor, y: Tensor) -> Tensor:
    return ((x * 1.37).to(bf16).float() * 0.77).to(bf16).float() * y


def fp8_round_trip(x: Tensor, y: Tensor) -> Tensor:
    return (x.to(fp8).float() * 1.37).to(fp8_wide).float() * y


def fp8_of_bf16(x: Tensor, y: Tensor) -> Tensor:
    return (x.to(bf16) * 3).to(fp8).to(bf16) * y.to(bf16)


def bf16_sums(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.to(bf16), y.to(bf16)
    return ((a + b) + a * b - b) * 3 + a


def quantised(x: Tensor, y: Tensor) -> Tensor:
    """Scale by the largest, to fp8 and back, to bf16: an activation before a quantised product."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return ((x / scale).to(fp8).float() * scale).to(bf16).float() + y


def rope(x: Tensor, y: Tensor) -> Tensor:
    """Turned in fp32, rounded, turned back, rounded."""
    half = x.shape[-1] // 2
    cos, sin = y[:, :half].to(bf16).float(), y[:, half:].to(bf16).float()

    def turn(v: Tensor, sign: int) -> Tensor:
        a, b = v.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin * sign, a * sin * sign + b * cos], -1).to(bf16)

    return turn(turn(x.to(bf16), 1), -1)


def collapse_then_norm(x: Tensor, y: Tensor) -> Tensor:
    """Streams to bf16, collapsed to bf16, then normalised: each reads what was rounded."""
    streams = torch.stack([x, y, x - y, x + y], 1).to(bf16)
    h = (streams.float() * y[:, :4, None]).sum(1).to(bf16)
    wide = h.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(bf16)


def rounded_probabilities(x: Tensor, y: Tensor) -> Tensor:
    """P is rounded to bf16 before it meets the values."""
    scores = x - x.amax(-1, keepdim=True)
    p = scores.exp()
    return (p / p.sum(-1, keepdim=True)).to(bf16).float() * y


# function -> whether a GPU must return eager's bits, too
CASES: dict[Callable[[Tensor, Tensor], Tensor], bool] = {
    round_trip: True,
    fp8_round_trip: True,
    fp8_of_bf16: True,
    bf16_sums: True,
    quantised: False,
    rope: False,
    collapse_then_norm: False,
    rounded_probabilities: False,
}


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return x.to(device), y.to(device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_piece_rounds_where_eager_does(device: torch.device, case: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = inputs(device)
    gm = trace(case, x, y)
    args = (ROWS, x, y)  # the rows are a symbol, and an input of the graph
    (found,) = compile_piece(gm)(*args)
    (expected,) = gm(*args)
    if device.type == "cpu" or CASES[case]:
        assert torch.equal(found, expected), f"{(found != expected).sum()} of {found.numel()} differ"
    assert_accurate(found, gm, *args)


def test_inductor_left_alone_drops_roundings(device: torch.device) -> None:
    """So the tests above can fail: under Inductor's own settings the chain that `supported` probes is not eager's."""
    chain = cast_chain(device)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device, bf16)
    example = [next(iter(chain.graph.nodes)).meta["val"]]
    (plain,) = inductor_compile(flatten(chain), example, {}, lambda graph: None)([x])
    (kept,) = compile_piece(chain)(x)
    (expected,) = chain(x)
    assert torch.equal(kept, expected) and not torch.equal(plain, expected)
