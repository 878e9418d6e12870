"""The kernel of the boundary at released widths (presets bench and flash) compiles for Hopper and Blackwell.

Hardly a register is spilled; what each launch takes stands at the end of the tests' output.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.rowwise import GeneratedKernel, pass_over
from v41.lowering.rowwise.schedule import LATER
from v41.tools.bench import seam

POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}


def requests(kernel: GeneratedKernel, inputs: tuple[torch.Tensor, ...], rows: list[int], arch: str) -> list[Request]:
    """One request for the schedule of each of `rows`."""
    found = []
    names = kernel.function.arg_names
    for count in rows:
        given = [arg.new_empty(count, *arg.shape[1:]) if i < seam.ROW_INPUTS else arg for i, arg in enumerate(inputs)]
        call = kernel.prepare(given)
        types = ["i32" if isinstance(arg, int) else POINTER[arg.dtype] for arg in call.arguments]
        signature = dict(zip(names, types, strict=False))
        for _, constants in call.launches:
            found.append(Request(str(kernel.path), kernel.name, signature, constants, arch, (), call.options))
    return found


@pytest.fixture(scope="module")
def kernel() -> GeneratedKernel:
    return pass_over(seam.capture(), "boundary")


def test_boundary_compiles_with_hardly_a_spill(
    kernel: GeneratedKernel, record_property: Callable[[str, object], None]
) -> None:
    inputs, rows = seam.inputs(2, "cpu"), [1, 16, 64, 256, 1024, 4096]
    asked = requests(kernel, inputs, rows, "sm_90") + requests(kernel, inputs, [1, 4096], "sm_100")
    facts: list[Facts] = compile_for(asked)
    for request, fact in zip(asked, facts, strict=True):
        label = f"{fact.arch} " + " ".join(f"{name}={request.constants[name]}" for name in ("ROWS", "GROUP", "STEP"))
        facts_found = f"{fact.registers} registers, {fact.spill_bytes} bytes spilled, {fact.shared_bytes} shared"
        record_property(label, facts_found)
        assert fact.spill_bytes <= 192, label
        assert re.search(r"ld\.global[\w.:]*\.v[24]|cp\.async", fact.ptx), f"{label}: narrow loads"
        products = request.constants["STEP"] != LATER
        assert ("mma.sync" in fact.ptx) == products and "wgmma" not in fact.ptx, f"{label}: another order of sums"
