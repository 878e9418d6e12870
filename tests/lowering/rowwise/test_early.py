"""A second launch that comes up early: asked of devices that can, and behind its wait in the text."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.rowwise.boundaries import rms_norm, seam, seam_inputs
from tests.lowering.rowwise.running import generated
from v41.gpu_facts import Gpu
from v41.lowering.rowwise import Kernel, Schedule, generate, launch
from v41.lowering.rowwise.held import launch as held_launch
from v41.lowering.rowwise.held.launch import Spread
from v41.lowering.rowwise.schedule import FIRST, LATER
from v41.passes.same_values import random_inputs
from v41.tools.bench.rowwise_cases import cases


def two_launches() -> list[tuple[Kernel, list[torch.Tensor], Schedule | Spread, Schedule | Spread]]:
    """Of each kind a kernel, inputs, a schedule of two launches and one of one."""
    case = cases(20)["router"]
    gate = generate(case.body(), case.name)
    assert isinstance(gate, Kernel)
    body, long = generated(seam(rms_norm, 4), *seam_inputs(2, 128))
    split, whole = Spread(1, 4, split=True, late=2), Spread(1, 4)
    return [(gate, list(case.inputs(5, "cpu")), split, whole),
            (long, random_inputs(body, 5), Schedule(2, 1, 4, 64, shares=2), Schedule(2, 1, 4, 64))]  # fmt: skip


TWO = two_launches()


@pytest.mark.parametrize(("kernel", "inputs", "split", "whole"), TWO, ids=["held", "passes"])
def test_only_the_second_of_two_is_asked_to_come_up_early(
    kernel: Kernel, inputs: list[torch.Tensor], split: object, whole: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for can in (True, False):
        for module in (launch, held_launch):
            monkeypatch.setattr(module, "comes_up_early", lambda device, can=can: can)
        steps = kernel.prepare(inputs, split).steps()
        assert [constants["STEP"] for _, constants, _ in steps] == [FIRST, LATER]
        assert [constants["PDL"] for _, constants, _ in steps] == [int(can)] * 2
        assert ["launch_pdl" in options for _, _, options in steps] == [False, can]
        ((_, constants, options),) = kernel.prepare(inputs, whole).steps()
        assert constants["PDL"] == 0 and "launch_pdl" not in options


@pytest.mark.parametrize("kernel", [each[0] for each in TWO], ids=["held", "passes"])
def test_what_the_first_stores_is_touched_behind_the_wait(kernel: Kernel) -> None:
    lines = kernel.source[kernel.source.rindex("@triton.jit") :].splitlines()
    wait = next(i for i, line in enumerate(lines) if "gdc_wait()" in line)
    (first,) = (i for i, line in enumerate(lines) if line == f"    if STEP != {LATER}:")
    end = next(i for i, line in enumerate(lines) if i > first and line[:5].strip())  # of what the first does alone
    begin = next(i for i, line in enumerate(lines) if line.startswith("    tile ="))
    ahead, behind = "\n".join(lines[begin:first] + lines[end:wait]), "\n".join(lines[wait:])
    stored = ("partials +", "totals +", "scratch_", "out_", "store(")
    assert not [name for name in stored if name in ahead] and "partials +" in behind and "store(" in behind
    assert "return" not in ahead and lines[wait].startswith(" " * 12 + "tl")  # in no branch but those of STEP and PDL


@pytest.mark.parametrize(
    ("device", "capability", "hip", "can"),
    [("cpu", (9, 0), None, False), ("cuda", (8, 9), None, False), ("cuda", (9, 0), None, True),
     ("cuda", (10, 0), None, True), ("cuda", (9, 4), "6.4", False)],
    ids=["cpu", "ada", "hopper", "blackwell", "rocm"],
)  # fmt: skip
def test_devices_that_cannot_are_not_asked(
    device: str, capability: tuple[int, int], hip: str | None, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(capability, 0, 0, hip is not None) if device == "cuda" else None
    monkeypatch.setattr(launch, "gpu_of", lambda _: gpu)
    assert launch.comes_up_early(torch.device(device)) is can
