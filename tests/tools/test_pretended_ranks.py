"""Kernels that add over ranks are listed, printed and compiled like any other, where there is no second rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.tools.small_models import run_of_balanced, run_of_summed
from v41.tools.cli import main
from v41.tools.kernels import ARCHS, ROWS, KernelFacts, compiled
from v41.tools.run_folder import save
from v41.tools.sources import model_named


def kernel() -> KernelFacts:
    (found,) = run_of_summed().kernels
    assert found.refusal is None and found.regions[0].startswith("all_reduce_boundary")
    return found


def test_a_sum_is_told_as_it_would_be_launched_and_nothing_of_its_group_stays() -> None:
    """One launch of few rows; of many, who scatters, who gathers, and what reads the sum. Ranks share the memory."""
    found = kernel()
    assert not dist.is_initialized()
    for arch in ARCHS:
        told = {rows: [each.function for each in found.launches if (each.rows, each.arch) == (rows, arch)]
                for rows in ROWS}  # fmt: skip
        assert told[1] == [found.name]
        assert told[4096][:2] == [f"{found.name}_scatter", f"{found.name}_gather"]
        assert {*told[4096][2:]} == {found.name}
    one = next(each for each in found.launches if each.rows == 1)
    assert one.signature["limit"] == "i64"  # nanoseconds, more than 32 bits hold
    assert sum(kind in ("*i32", "*i64") for kind in one.signature.values()) >= 2  # mail of each rank


def test_with_the_librarys_sum_there_is_no_such_kernel() -> None:
    run = run_of_summed("library")
    assert run.kernels == [] and any("all_reduce" in node.text for node in run.nodes)
    assert run.report.options["all_reduce"] == ("library", "options")
    assert run_of_summed().report.options["all_reduce"][0] == "fused"  # as "auto" does on GPUs
    assert "all_reduce" not in run_of_balanced().report.options  # which adds up nothing over ranks


def test_it_compiles_and_a_saved_run_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(compiled([kernel()], "sm_90", [1]))
    assert [each.function for each in found] == [kernel().name]
    assert all(each.facts is not None and each.facts.registers > 0 and each.facts.spill_bytes == 0 for each in found)
    save(run_of_summed(), tmp_path / "run")
    assert main(["kernels", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert f"{kernel().name}" in told and "untold" not in told
    assert main(["kernels", str(tmp_path / "run"), "--rows", "4096"]) == 0
    told = capsys.readouterr().out
    assert told.count(kernel().name) == 1 and " scatter " in told and " gather " in told  # the name is not said again
    assert main(["kernels", str(tmp_path / "run"), "--show", "all_reduce", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["kernels"]
    assert shown["source"] == kernel().source and "_scatter" in shown["source"]


@pytest.mark.parametrize(("more", "why"), [
    (["--ranks", "1"], "only ranks add up"), ([], "only ranks add up"),
    (["--ranks", "2", "--codegen", "inductor"], "codegen inductor generates no kernels"),
])  # fmt: skip
def test_who_adds_up_is_asked_where_somebody_does(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "tiny", "--all-reduce", "fused", *more]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_whose_sums_a_run_has_is_told_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = model_named("tiny", 1, 2, "library").name
    assert name == "preset tiny, 1 layer, one of 2 ranks, sums by the library"
    save(replace(run_of_summed("library"), source=name), tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.endswith("v41 verify tiny --layers 1 --ranks 2 --all-reduce library")


@pytest.mark.slow
def test_a_preset_of_ranks_is_told_with_its_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["capture", "tiny", "--layers", "1", "--ranks", "2", "-o", run]) == 0
    capsys.readouterr()
    assert main(["kernels", run, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["kernels"]
    sums = [each for each in made if each["name"].startswith("all_reduce")]
    assert sums and all(each["refusal"] is None and each["launches"] for each in sums)
    assert main(["verify", run]) == 2
    assert "v41 verify tiny --layers 1 --ranks 2" in " ".join(capsys.readouterr().err.split())
