"""Sums over ranks at released widths compile for Hopper and Blackwell without a spill, and order memory as they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.lowering.rowwise.test_compiles import POINTER, told
from v41.channels import Workspace
from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.templates.all_reduce import SummingKernel
from v41.lowering.templates.all_reduce.launch import ONE_SHOT_BYTES, RESIDENT
from v41.tools.bench.sum_cases import CASES, Case

RANKS, H200 = 4, 132  # processors


def workspace(ranks: int = RANKS) -> Workspace:
    """One that only says where things would lie."""
    memory = tuple(torch.empty(1 << 26, dtype=torch.int32, device="meta") for _ in range(ranks))
    empty = torch.empty(1 << 16, dtype=torch.int32, device="meta")
    record = torch.zeros(1, dtype=torch.int64)
    return Workspace(1, memory, empty, record, record, 60.0, H200)


def requests(case: Case, kernel: SummingKernel, rows: list[int], arch: str) -> list[Request]:
    given = [(*case.own(count, "cpu", 1), *case.others(count, "cpu")) for count in rows]
    return [request for each in given for request in launches_of(kernel, each, arch)]


def launches_of(kernel: SummingKernel, given: Sequence[torch.Tensor], arch: str) -> list[Request]:
    """What compiles each launch of a call with the tensors `given`."""
    found = []
    for step in kernel.prepare(given).launches:
        names = getattr(kernel.module, step.function).arg_names  # type: ignore[attr-defined]
        types = {name: POINTER[arg.dtype] if isinstance(arg, torch.Tensor) else "i64" if name == "limit" else "i32"
                 for name, arg in zip(names, step.arguments, strict=False)}  # type: ignore[attr-defined] # fmt: skip
        found.append(Request(str(kernel.path), step.function, types, step.constants, arch, (), step.options))  # type: ignore[attr-defined]
    return found


def check_order(request: Request, fact: Facts, ranks: int = RANKS) -> None:
    """Words are read in one place before the loop and one in it, so none is read twice; flags are set and read as
    protocol.py says; nothing is multicast."""
    assert "multimem" not in fact.ptx
    one_shot, sends = request.constants.get("SHOTS") == 1, request.constants.get("STEP") != 2
    words = len(re.findall(r"ld\.volatile\.global", fact.ptx))
    stores = len(re.findall(r"st\.relaxed\.sys\.global", fact.ptx))
    per_thread = request.constants["ROWS"] * 64 // (32 * fact.warps)
    unrolled = {1, request.constants.get("GROUP", 1)}  # loops over the chunks of a program
    assert stores in ({times * ranks * per_thread for times in unrolled} if one_shot and sends else {0})
    assert (one_shot and sends) or not words
    read = {times * 2 * ranks * each for times in unrolled for each in (1, per_thread, per_thread / 4)}
    assert words in {0, *read}, words
    waits = request.kernel.endswith("_gather") or (request.constants.get("SHOTS") == 2 and sends)
    assert ("ld.acquire.sys" in fact.ptx) == waits
    sets = request.kernel.endswith(("_gather", "_scatter"))
    assert (
        re.search(r"bar\.sync.*?atom\.global\.(sys\.release|release\.sys)", fact.ptx, re.DOTALL) is not None
    ) == sets


@pytest.mark.parametrize(
    ("name", "rows"),
    [("critical", [1, 64])]
    + [pytest.param(name, [1, 5, 16, 64, 300, 4096], marks=pytest.mark.slow) for name in CASES],
    ids=["critical-few", *CASES],
)  # fmt: skip
def test_compiles_without_a_spill(name: str, rows: list[int], record_property: Callable[[str, object], None]) -> None:
    case = CASES[name]
    kernel = case.kernel(RANKS)
    kernel.bind(workspace())
    asked = requests(case, kernel, rows, "sm_90") + requests(case, kernel, rows[::3], "sm_100")
    for request, fact in zip(asked, compile_for(asked), strict=True):
        label, found = told(request, fact)
        record_property(f"{request.kernel} {label}", found)
        assert fact.spill_bytes <= (192 if name == "seam" else 0), label
        check_order(request, fact)


def test_one_shot_as_far_as_its_programs_fit_and_its_words_are_few() -> None:
    case = CASES["critical"]
    ways = {}
    for ranks in (2, RANKS):
        kernel = case.kernel(ranks)
        kernel.bind(workspace(ranks))
        for rows in range(1, 300):
            way = ways[ranks, rows] = kernel.way_for(rows)
            words = 2 * rows * case.width * 2 * (ranks - 1)
            assert way.units is not None or (words <= ONE_SHOT_BYTES and kernel._programs(
                rows, way.schedule.rows, way.schedule.group) <= RESIDENT * H200)  # fmt: skip
    assert [ways[2, rows].units is None for rows in (1, 48, 64, 80, 102, 256)] == [True] * 3 + [False] * 3
    assert [ways[RANKS, rows].units is None for rows in (1, 23, 24, 64)] == [True] * 2 + [False] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_chunks_a_program_compile_without_a_spill(name: str) -> None:
    kernel = CASES[name].kernel(2)
    kernel.bind(workspace(2))
    asked = requests(CASES[name], kernel, [64], "sm_90")
    assert {request.constants["GROUP"] for request in asked} == {2}
    for request, fact in zip(asked, compile_for(asked), strict=True):
        assert fact.spill_bytes <= (192 if name == "seam" else 0), told(request, fact)
        check_order(request, fact, 2)
