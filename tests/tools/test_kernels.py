"""Kernels are those that the backend would generate, with the launches it would make; compiled, figures are real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.lowering.rowwise import boundaries
from tests.lowering.rowwise.boundaries import rms_norm, seam_inputs
from tests.lowering.templates.indexers import OPERANDS, Case
from tests.lowering.templates.regions import kernel_of
from tests.lowering.templates.test_compiles import spelling
from tests.strategies.tracing import trace
from tests.tools.printed import printed
from tests.tools.small_models import run_of_balanced
from v41.errors import KernelDoesNotCompile, KernelsNotWritten, UnknownKernel
from v41.lowering.cross_compile import Facts, Request
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.lowering.gpu import as_on
from v41.lowering.templates.index_scores import Form
from v41.lowering.templates.index_scores import kernel_of as index_kernel_of
from v41.model_def.config import V41Config
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT, run_pipeline
from v41.plan import Plan
from v41.tools.cli import main
from v41.tools.kernels import ARCHS, KernelFacts, compiled, kernels_of, launches_of
from v41.tools.kernels_command import compiled_table, kernels_named, launches_table
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
    report = replace(run_of_balanced().report, plan=plan())
    parts = {**run_of_balanced().parts, "kernels": kernels}
    return replace(run_of_balanced(), report=report, layers=[], parameters={}, parts=parts)


def test_the_kernel_is_the_one_that_the_backend_generates() -> None:
    (kernel,) = kernels()
    (piece,) = [piece for piece in plan().pieces if piece.name in kernel.pieces]
    made = generate_piece(piece.body, "mhc_boundary", piece.name)
    assert isinstance(made, GeneratedPiece)
    assert (kernel.name, kernel.source) == (made.kernel.name, made.kernel.source)
    assert kernel.regions[0].startswith("mhc_boundary")


@pytest.mark.parametrize("case", [Case(keep=3), Case(given="candidate_blocks", keep=4, k=6)])
def test_an_indexer_is_told_function_by_function(case: Case) -> None:
    """Scores and selections, as with tensors that are there."""
    kernel, given = case.kernel, case.inputs([(40, 1), (3, 1)])
    values = given.arguments
    found = list(launches_of(kernel, values, {2: {}}))
    assert {launch.arch for launch in found} == set(ARCHS)
    for arch in ARCHS:
        with as_on(arch):
            steps, _ = kernel.steps(values)
        told = [launch for launch in found if launch.arch == arch]
        assert [(each.function, each.grid) for each in told] == [(step.kernel, step.grid) for step in steps]
        assert told[0].function == "scores_1" and {each.function for each in told[1:]} == {"select"}
        assert [(each.constants, each.options) for each in told] == [(step.constants, step.options) for step in steps]
        assert told[0].constants["PACKED"] == (arch != "sm_80"), "decoded in pairs from Hopper on"
        assert told[1].options.get("launch_pdl", False) == told[0].constants["LEADS"] == (arch != "sm_80")
    facts = KernelFacts(kernel.name, ("index_scores",), ("piece_0",), kernel.source, tuple(found))
    assert [line.split()[-5:-2] for line in map(str, printed(launches_table([facts], (2,)))) if "select" in line]


def test_launches_are_those_of_a_step_of_real_tensors() -> None:
    """The same grids, constants and options as with tensors that are there."""
    (kernel,) = kernels()
    (piece,) = [piece for piece in plan().pieces if piece.name in kernel.pieces]
    made = generate_piece(piece.body, "mhc_boundary", piece.name)
    assert isinstance(made, GeneratedPiece)
    for rows in (1, 64):
        given = [None if what is None else torch.empty([rows if n is None else n for n in what.shape], dtype=what.dtype)
                 for what in made.kernel.inputs]  # fmt: skip
        for arch in ARCHS:
            with as_on(arch):
                call = made.kernel.prepare(given)
            told = [launch for launch in kernel.launches if (launch.rows, launch.arch) == (rows, arch)]
            assert [(each.grid, each.constants, each.options) for each in told] == call.steps()
            types = [value for each in told for value in each.signature.values()]
            assert types.count("i32") == sum(isinstance(arg, int) for arg in call.arguments) * len(told) > 0
    early = {launch.arch for launch in kernel.launches if launch.options.get("launch_pdl")}
    assert early == {"sm_90", "sm_100"}  # what comes up early does so from Hopper on


def test_what_is_told_of_attention_is_what_the_gpu_can_hold() -> None:
    """On Blackwell a long prompt takes two launches: Triton makes a trap of one."""
    kernel = kernel_of(spelling("flash", 1, 1))
    values = [torch.empty([4096 if n is None else n for n in what.shape], dtype=what.dtype) if what else 1
              for what in kernel.inputs]  # fmt: skip
    found = list(launches_of(kernel, values, {4096: {}}))
    assert [sum(launch.arch == arch for launch in found) for arch in ("sm_90", "sm_100")] == [1, 2]


def test_where_kernels_cannot_be_kept_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(KernelsNotWritten, match="XDG_CACHE_HOME"):
        kernels_of(plan(), "triton")


def test_rows_of_which_nothing_is_told_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "tiny", "--rows", "1,7"]) == 2
    assert "--rows cannot be '7'" in capsys.readouterr().err


def test_a_region_that_gets_none_is_told_with_the_reason() -> None:
    refused = KernelFacts("moe_gate", ("moe_gate",), ("piece_5",), "", (), "mm (aten.mm) is of dtype torch.int64")
    report = run_with_kernels()
    assert [kernel.refusal for kernel in report.kernels] == [None]
    with pytest.raises(UnknownKernel, match="there is none"):
        kernels_named([refused], "moe")


def test_a_kernel_goes_by_the_beginning_of_its_name() -> None:
    (kernel,) = kernels()
    assert kernels_named(kernels(), "mhc") == [kernel]
    with pytest.raises(UnknownKernel, match="the nearest"):
        kernels_named(kernels(), kernel.name + "0")
    twice = [kernel, replace(kernel, name=kernel.name + "_2")]
    assert kernels_named(twice, kernel.name) == [kernel]
    with pytest.raises(UnknownKernel):
        kernels_named(twice, "mhc")
    alike = [kernel, replace(kernel, pieces=("piece_99",))]  # the text of two artifacts whose inputs differ in size
    assert kernels_named(alike, kernel.name) == kernels_named(alike, "mhc") == alike


def test_the_command_lists_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_with_kernels(), tmp_path / "run")
    assert load(tmp_path / "run").kernels == kernels()
    assert main(["kernels", str(tmp_path / "run"), "--show", "mhc"]) == 0
    assert capsys.readouterr().out == kernels()[0].source
    assert main(["kernels", str(tmp_path / "run"), "--show", "mhc", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["kernels"]
    assert shown["source"] == kernels()[0].source
    assert main(["kernels", str(tmp_path / "run"), "--rows", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[: len(printed(launches_table(kernels(), [64])))] == printed(launches_table(kernels(), [64]))
    assert out[0].split() == ["kernel", "regions", "pieces", "lines", "rows", "launch", "grid", "warps"]
    assert main(["kernels", str(tmp_path / "run"), "--json", "--strict"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["name"] == kernels()[0].name
    save(run_of_balanced(), tmp_path / "none")
    assert main(["kernels", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "no region of this program gets a kernel of its own\n"


def test_a_kernel_that_does_not_compile_is_one_line_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told all the same."""
    (kernel,) = kernels()
    run, good = run_with_kernels(), Facts("sm_80", 32, 0, 128, 4, ".target sm_80", 2000)
    both = [replace(kernel, name="bad"), kernel]
    save(replace(run, parts={**run.parts, "kernels": lambda: both}), tmp_path / "run")

    def compile_for(requests: Sequence[Request]) -> list[Facts]:
        if "bad" in requests[0].path:
            error = "CompilationError: at 26:27:\n    y = 1\n    x = tl.dot(q, k)\n        ^"
            raise KernelDoesNotCompile(requests[0].path, kernel="bad", arch="sm_80", error=error)
        return [good for _ in requests]

    monkeypatch.setattr("v41.tools.kernels.compile_for", compile_for)
    assert main(["kernels", str(tmp_path / "run"), "--arch", "sm_80", "--rows", "1"]) == 1
    told = capsys.readouterr().out
    assert "bad does not compile for sm_80: CompilationError: at 26:27: x = tl.dot(q, k)" in " ".join(told.split())
    assert [line.split()[:2] for line in told.splitlines() if line.startswith(kernel.name)][-1] == [kernel.name, "-"]
    assert main(["kernels", str(tmp_path / "run"), "--arch", "sm_80", "--rows", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["compiled"]
    assert found[0]["facts"] is None and found[1]["facts"]["registers"] == 32


@pytest.mark.slow
def test_compiled_kernels_have_figures() -> None:
    heard: list[str] = []
    found = list(compiled(kernels(), "sm_90", [1, 64], heard.append))
    assert heard == [kernels()[0].name] and {each.rows for each in found} <= {1, 64}
    for each in found:
        facts = each.facts
        assert facts is not None
        assert facts.arch == "sm_90" and f".target {facts.arch}a" in facts.ptx
        assert 16 < facts.registers <= 255 and facts.cubin_bytes > 1000
    assert len(printed(compiled_table(found))) == 1 + len(found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_indexer_of_a_preset_compiles_as_it_is_listed(arch: str) -> None:
    """Every function of its text: scores, and a selection."""
    config = V41Config.preset("tiny")
    heads, width, int64 = config.index_n_heads, config.index_head_dim, torch.int64
    form = Form(heads, width, 0.1, config.index_topk, 1, config.candidate_block_size, 1023, "", 0, 0,
                ("picks",))  # fmt: skip
    kernel = index_kernel_of(form, OPERANDS)
    values = [torch.empty(5, heads, width, dtype=torch.bfloat16), torch.empty(5, heads, dtype=torch.bfloat16),
              torch.empty(2, 1024, width // 32 * 17, dtype=torch.uint8), *torch.empty(3, 5, dtype=int64),
              torch.empty(2, 4, dtype=int64), torch.empty(2, dtype=int64), torch.empty(128, dtype=int64)]  # fmt: skip
    facts = KernelFacts(kernel.name, ("index_scores",), (), kernel.source, tuple(launches_of(kernel, values, {5: {}})))
    found = list(compiled([facts], arch, [5]))
    assert {each.function.partition("_")[0] for each in found} == {"scores", "select"}
    assert all(each.facts and each.facts.arch == arch and 16 < each.facts.registers <= 255 for each in found)
    table = [line.split() for line in map(str, printed(compiled_table(found)))]
    assert [line[:2] for line in table[1:]] == [[kernel.name, each.function] for each in found]
