"""A norm with what is quantised behind it, values and scales apart, becomes a kernel that holds to the contract."""

from __future__ import annotations

from functools import partial

import pytest
from torch.fx import GraphModule

from tests.invariants import apply
from tests.lowering.rowwise.running import check_everywhere
from tests.lowering.rowwise.test_compiles import requests
from tests.strategies.norms import Row
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.cross_compile import compile_for
from v41.lowering.rowwise import HeldKernel, generate
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_norm_quantise import KIND, outline_norm_quantise
from v41.passes.same_values import random_inputs
from v41.regions import regions

ROWS = {
    "powers of two": Row(rope="the model's", format="fp8 apart", also="normed", width=128),
    "an fp32 scale": Row(format="an fp32 scale", width=1280),
    "e8m0 outside": Row(format="fp8 apart by logarithm", width=128),
    "pairs": Row(format="mxfp4 apart", width=128),
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "pairs")) for name in ROWS]


def body_of(row: Row) -> GraphModule:
    moving, still = row.tensors()
    gm = trace(row.run, *moving, static=still, backed=True)
    apply(canonicalize, gm)
    (decision,) = apply(outline_norm_quantise, gm)
    assert decision.applied, decision
    (call,) = regions(gm, KIND)
    return getattr(gm, str(call.args[0].target))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_to_the_contract_and_compiles(name: str, interpreter: Interpreter) -> None:
    body = body_of(ROWS[name])
    kernel = generate(body)
    assert isinstance(kernel, HeldKernel), kernel
    results = check_everywhere(interpreter, body, kernel)
    assert len(results) == (3 if ROWS[name].also == "normed" else 2)
    inputs = partial(random_inputs, body)
    facts = compile_for([*requests(kernel, inputs, [1], "sm_90"), *requests(kernel, inputs, [64], "sm_100")])
    assert [fact.spill_bytes for fact in facts] == [0, 0]
