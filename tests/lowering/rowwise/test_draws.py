"""Bodies nobody wrote: each becomes a kernel, in passes over chunks and with whole rows, that holds to the rounding
contract with every schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lowering.rowwise.running import check_everywhere
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import hold, pass_over

Step = Callable[[list[Tensor], list[Tensor]], Tensor]

UNARY = (torch.sigmoid, torch.tanh, torch.neg, torch.abs, lambda x: x.square(), lambda x: torch.rsqrt(x.square() + 1),
         lambda x: torch.exp(-x.abs()), torch.nn.functional.silu, lambda x: x.clamp(-0.5, 1.5), torch.relu)  # fmt: skip
BINARY = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a, b),
)
FOLDS = (
    lambda x, d: x.sum(d, keepdim=True),
    lambda x, d: x.mean(d, keepdim=True),
    lambda x, d: x.amax(d, keepdim=True),
    lambda x, d: x.float().softmax(d),
)
QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],  # an example costs seconds: no shrinking
}
CASTS = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
    """A function of row tensors [T, small, wide] and [T, small] and a weight [wide], drawn step by step."""
    wide, small = draw(st.sampled_from((64, 96, 160))), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(CASTS))
    plan = draw(
        st.lists(
            st.tuples(st.sampled_from("ubfcm"), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
            min_size=2,
            max_size=7,
        )
    )
    outputs = draw(st.integers(1, 3))

    def body(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        torch._check(x.shape[0] == a.shape[0])  # one number of rows, though nothing may combine them
        values = [x, a[:, :, None], (x.float() * w).to(dtype)]
        for kind, i, j, k in plan:
            value, other = values[i % len(values)], values[j % len(values)]
            if kind == "u":
                values.append(UNARY[k % len(UNARY)](value))
            elif kind == "b":
                values.append(BINARY[k % len(BINARY)](value.float(), other.float()))
            elif kind == "f":
                values.append(FOLDS[k % len(FOLDS)](value.float(), 1 + j % 2))
            elif kind == "c":
                values.append(value.to(CASTS[k % len(CASTS)]))
            else:
                values.append(torch.einsum("tsd,tsk->tkd", value.float(), (a[:, :, None] * a[:, None]).float()))
        return tuple(value * 1 for value in values[-outputs:])

    return body, [torch.randn(7, small, wide).to(dtype), torch.randn(7, small)], [torch.randn(wide)]


def check_both(interpreter: Interpreter, drawn: tuple[Callable[..., Any], list[Tensor], list[Tensor]]) -> None:
    """These ops are all supported, in both ways."""
    fn, rows, weights = drawn
    body = trace(fn, *rows, static=weights, backed=True)
    check_everywhere(interpreter, body, pass_over(body), rows=3)
    check_everywhere(interpreter, body, hold(body), rows=3)


@settings(max_examples=12, **QUIET)
@given(bodies())
def test_drawn_bodies(interpreter: Interpreter, drawn: Any) -> None:
    check_both(interpreter, drawn)


@pytest.mark.slow
@settings(max_examples=300, **QUIET)
@given(bodies())
def test_many_drawn_bodies(interpreter: Interpreter, drawn: Any) -> None:
    check_both(interpreter, drawn)
