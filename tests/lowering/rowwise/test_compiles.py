"""Kernels at released widths (presets bench and flash) compile for Hopper and Blackwell, as they are launched there.

Hardly a register is spilled in passes over long rows, none where rows are held; what each launch takes stands at the
end of the tests' output. A second launch comes up early and waits before it reads or stores what the first stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch

from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.rowwise import GeneratedKernel, HeldKernel, Kernel, generate, launch, pass_over
from v41.lowering.rowwise.held import launch as held_launch
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER
from v41.tools.bench import seam
from v41.tools.bench.rowwise_cases import CASES

POINTER = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
QUICK = ("norm_rope_fp8", "router", "stream_gate")  # rows alone, a product in front, parts of a row
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]


def requests(
    kernel: Kernel, inputs: Callable[[int], Sequence[torch.Tensor]], rows: list[int], arch: str
) -> list[Request]:
    """One request for each launch of the schedule of each of `rows`, with inputs of so many, on such a device."""
    found = []
    names = kernel.function.arg_names
    can = lambda device: arch in ("sm_90", "sm_100")
    for count in rows:
        with patch.object(launch, "comes_up_early", can), patch.object(held_launch, "comes_up_early", can):
            call = kernel.prepare(inputs(count))
        types = ["i32" if isinstance(arg, int) else POINTER[arg.dtype] for arg in call.arguments]
        signature = dict(zip(names, types, strict=False))
        for _, constants, options in call.steps():
            found.append(Request(str(kernel.path), kernel.name, signature, constants, arch, (), options))
    return found


def told(request: Request, fact: Facts) -> tuple[str, str]:
    """Which launch it is, and what it takes."""
    label = f"{fact.arch} " + " ".join(f"{name}={value}" for name, value in request.constants.items())
    return label, f"{fact.registers} registers, {fact.spill_bytes} bytes spilled, {fact.shared_bytes} shared"


def check_waits(request: Request, fact: Facts) -> None:
    """The first of two launches lets the second come up; that one waits before it reads or stores anything that the
    first stores. A lone launch does neither."""
    step, label = request.constants.get("STEP", ALL), told(request, fact)[0]
    assert ("griddepcontrol.launch_dependents" in fact.ptx) == (step == FIRST), label
    assert ("griddepcontrol.wait" in fact.ptx) == (step == LATER) == bool(request.options.get("launch_pdl")), label
    if step == LATER:
        ahead, _, behind = fact.ptx.partition("griddepcontrol.wait")
        assert "st.global" not in ahead and "ld.global.cg" not in ahead, f"{label}: does not wait"
        assert "st.global" in behind and "ld.global.cg" in behind, label  # .cg: as all that the first stored is read


@pytest.fixture(scope="module")
def kernel() -> GeneratedKernel:
    return pass_over(seam.capture(), "boundary")


def test_boundary_compiles_with_hardly_a_spill(
    kernel: GeneratedKernel, record_property: Callable[[str, object], None]
) -> None:
    inputs, rows = partial(seam.inputs, device="cpu"), [1, 16, 64, 256, 1024, 4096]
    asked = requests(kernel, inputs, rows, "sm_90") + requests(kernel, inputs, [1, 4096], "sm_100")
    facts: list[Facts] = compile_for(asked)
    for request, fact in zip(asked, facts, strict=True):
        label, facts_found = told(request, fact)
        record_property(label, facts_found)
        assert fact.spill_bytes <= 192, label
        check_waits(request, fact)
        assert re.search(r"ld\.global[\w.:]*\.v[24]|cp\.async", fact.ptx), f"{label}: narrow loads"
        products = request.constants["STEP"] != LATER
        assert ("mma.sync" in fact.ptx) == products and "wgmma" not in fact.ptx, f"{label}: another order of sums"


@pytest.mark.parametrize("name", NAMES)
def test_the_work_between_products_compiles_with_hardly_a_spill(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    kernel = generate(case.body(), name)
    assert isinstance(kernel, Kernel)
    inputs, quick = partial(case.inputs, device="cpu"), name in QUICK
    asked = requests(kernel, inputs, [1] if quick else [1, 64, 4096], "sm_90")
    asked += [] if quick else requests(kernel, inputs, [1, 4096], "sm_100")
    facts = compile_for(asked)
    for request, fact in zip(asked, facts, strict=True):
        label, found = told(request, fact)
        record_property(label, found)
        check_waits(request, fact)
        assert fact.spill_bytes <= (0 if isinstance(kernel, HeldKernel) else 256), label
    if isinstance(kernel, HeldKernel) and kernel.front is not None:
        products = [fact for request, fact in zip(asked, facts, strict=True)
                    if fact.arch == "sm_90" and request.constants["STEP"] != LATER]  # fmt: skip
        assert all("wgmma" in fact.ptx and "mma.sync" not in fact.ptx for fact in products), "another order of sums"


def test_a_gate_compiles_without_a_spill_for_any_rows(record_property: Callable[[str, object], None]) -> None:
    case = CASES["router"]
    rows = [most for most, _ in held_launch.FRONTS[:-1]] + [4096]
    asked = requests(generate(case.body(), "router"), partial(case.inputs, device="cpu"), rows, "sm_90")  # type: ignore[arg-type]
    assert len({str(sorted(request.constants.items())) for request in asked}) == 2 * len(held_launch.FRONTS)
    for request, fact in zip(asked, compile_for(asked), strict=True):
        label, found = told(request, fact)
        record_property(label, found)
        check_waits(request, fact)
        assert fact.spill_bytes == 0, label
