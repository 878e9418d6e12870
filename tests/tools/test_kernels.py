"""Kernels are those that the backend would generate, with the launches it would make; compiled, figures are real."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.lowering.rowwise import boundaries
from tests.lowering.rowwise.boundaries import rms_norm, seam_inputs
from tests.lowering.templates.test_index_scores import Case
from tests.strategies.tracing import trace
from tests.tools.printed import printed
from tests.tools.small_models import run_of_balanced
from v41.errors import UnknownKernel
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT, run_pipeline
from v41.plan import Plan
from v41.report import CompileReport
from v41.tools.cli import main
from v41.tools.kernels import KernelFacts, compiled, kernels_of, launches_of
from v41.tools.kernels_command import compiled_table, kernel_named, launches_table
from v41.tools.run import Run
from v41.tools.run_folder import load, save


@cache
def plan() -> Plan:
    """One mHC boundary, four streams of 64."""
    per_row, weights = seam_inputs(4, 64)
    gm, _ = run_pipeline(trace(boundaries.seam(rms_norm, 3, False), *per_row, static=weights))
    return partition(gm, cut_at=CUT_AT, along=ALONG)


@cache
def kernels() -> list[KernelFacts]:
    return kernels_of(plan(), "triton")


def run_with_kernels() -> Run:
    report = CompileReport(plan=plan(), passes=run_of_balanced().report.passes)
    parts = {**run_of_balanced().parts, "kernels": kernels}
    return replace(run_of_balanced(), report=report, layers=[], parts=parts)


def test_the_kernel_is_the_one_that_the_backend_generates() -> None:
    (kernel,) = kernels()
    (piece,) = [piece for piece in plan().pieces if piece.name in kernel.pieces]
    made = generate_piece(piece.body, "mhc_boundary", piece.name)
    assert isinstance(made, GeneratedPiece)
    assert (kernel.name, kernel.source) == (made.kernel.name, made.kernel.source)
    assert kernel.regions[0].startswith("mhc_boundary")


def test_a_kernel_of_several_functions_is_listed_without_launches() -> None:
    kernel = Case(keep=3).kernel
    facts = KernelFacts(kernel.name, ("index_scores",), ("piece_0",), kernel.source, tuple(launches_of(kernel)))
    assert facts.launches == ()
    (line,) = [line for line in printed(launches_table([facts], (1,))) if kernel.name in str(line)]
    assert "untold" in str(line)


def test_launches_are_those_of_a_step_of_real_tensors() -> None:
    """The same grids, constants and options as with tensors that are there."""
    (kernel,) = kernels()
    (piece,) = [piece for piece in plan().pieces if piece.name in kernel.pieces]
    made = generate_piece(piece.body, "mhc_boundary", piece.name)
    assert isinstance(made, GeneratedPiece)
    for rows in (1, 64):
        given = [None if what is None else torch.empty([rows if n is None else n for n in what.shape], dtype=what.dtype)
                 for what in made.kernel.inputs]  # fmt: skip
        call = made.kernel.prepare(given)
        told = [launch for launch in kernel.launches if launch.rows == rows]
        assert [(each.grid, each.constants, each.options) for each in told] == call.steps()
        types = [value for each in told for value in each.signature.values()]
        assert types.count("i32") == sum(isinstance(arg, int) for arg in call.arguments) * len(told) > 0


def test_a_region_that_gets_none_is_told_with_the_reason() -> None:
    refused = KernelFacts("moe_gate", ("moe_gate",), ("piece_5",), "", (), "mm (aten.mm) is of dtype torch.int64")
    report = run_with_kernels()
    assert [kernel.refusal for kernel in report.kernels] == [None]
    with pytest.raises(UnknownKernel, match="there is none"):
        kernel_named([refused], "moe")


def test_a_kernel_goes_by_the_beginning_of_its_name() -> None:
    (kernel,) = kernels()
    assert kernel_named(kernels(), "mhc") is kernel
    with pytest.raises(UnknownKernel, match="the nearest"):
        kernel_named(kernels(), kernel.name + "0")
    twice = [kernel, replace(kernel, name=kernel.name + "_2")]
    assert kernel_named(twice, kernel.name) is kernel
    with pytest.raises(UnknownKernel):
        kernel_named(twice, "mhc")


def test_the_command_lists_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_with_kernels(), tmp_path / "run")
    assert load(tmp_path / "run").kernels == kernels()
    assert main(["kernels", str(tmp_path / "run"), "--show", "mhc"]) == 0
    assert capsys.readouterr().out == kernels()[0].source
    assert main(["kernels", str(tmp_path / "run"), "--rows", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[: len(printed(launches_table(kernels(), [64])))] == printed(launches_table(kernels(), [64]))
    assert out[0].split() == ["kernel", "regions", "pieces", "lines", "rows", "launch", "grid", "warps"]
    assert main(["kernels", str(tmp_path / "run"), "--json", "--strict"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["name"] == kernels()[0].name
    save(run_of_balanced(), tmp_path / "none")
    assert main(["kernels", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "no region of this program gets a kernel of its own\n"


@pytest.mark.slow
def test_compiled_kernels_have_figures() -> None:
    heard: list[str] = []
    found = list(compiled(kernels(), "sm_90", [1, 64], heard.append))
    assert heard == [kernels()[0].name] and {each.rows for each in found} <= {1, 64}
    for each in found:
        facts = each.facts
        assert facts.arch == "sm_90" and f".target {facts.arch}a" in facts.ptx
        assert 16 < facts.registers <= 255 and facts.cubin_bytes > 1000
    assert len(printed(compiled_table(found))) == 1 + len(found)
