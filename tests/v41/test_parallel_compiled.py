"""Several processes run the compiled model: eager's bits on every rank; ranks whose programs differ hear it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.model_def.rows import QUICK
from tests.model_def.test_parallel import FOUR, logits_of
from tests.strategies.ranks import ranks
from tests.v41.rank_processes import run_ranks
from tests.v41.test_artifact_key import key
from v41 import backend
from v41.model_def.checkpoint import save_checkpoint
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import Share
from v41.regions import REDUCED
from v41.report import CompileReport, collect
from v41.tools.inspect import first_layers

c10d = torch.ops._c10d_functional
slow = pytest.mark.slow


def compiled_logits(folder: Path, options: dict[str, Any], own: bool = False) -> dict[str, Any]:
    """own: fused sums are pieces of their own, as where a kernel adds up, and run their nodes."""
    if own:
        backend.CUT_AT = (*backend.CUT_AT, REDUCED)
    model = V41ForCausalLM.from_checkpoint(folder, share=Share.of_group(dist.group.WORLD))
    expected = logits_of(model)
    with collect() as reports:
        found = logits_of(model, torch.compile(model, backend="v41", fullgraph=True, options=options))
    return {"expected": expected, "found": found, "told": told(reports)}


def told(reports: list[CompileReport]) -> dict[str, Any]:
    (report,) = reports
    (run,) = (run for run in report.passes if run.name == "fuse_all_reduce")
    assert report.plan is not None and all(each.failure is None for each in report.passes)
    return {
        "all-reduce": report.options.get("all-reduce"),
        "ranks": report.options["ranks"],
        "made": run.made,
        "refused": run.refused,
        "taken in": sum(each.applied for each in report.passes if each.name == "take_in_combine"),
        "trimmed": sum(each.applied for each in report.passes if each.name == "trim_replay"),
        "collectives": report.plan.collectives,
        "borders": [piece.border for piece in report.plan.pieces],
        "fallbacks": report.fallbacks,
    }


def check_ranks(made: list[Any], layers: int) -> None:
    """Eager's bits, the same on every rank; every sum is fused where it can be, and each rank says so."""
    for each in made:
        if isinstance(each, RuntimeError):
            raise each
        assert torch.equal(each["found"], each["expected"])
        assert torch.equal(each["found"], made[0]["found"])
        assert each["told"] == made[0]["told"]
    facts = made[0]["told"]
    assert sum(facts["made"].values()) == 2 * layers and facts["refused"] == 0 and facts["fallbacks"] == []
    assert facts["all-reduce"][0].startswith(f"{2 * layers} as they are")
    assert facts["ranks"][0] == f"{2 * layers + 2} collectives, the same on all ranks"
    lines = facts["collectives"]
    gather = ["all_gather_into_tensor"]  # of the embedding, and of the logits
    assert [line.split()[0] for line in lines] == gather + ["all_reduce"] * 2 * layers + gather
    rows = [line.partition("[")[2].partition("(")[0] for line in lines]  # of all tokens, then of those that are kept
    assert lines[1].startswith(f"all_reduce sum over group 0 of {len(made)}: torch.bfloat16 [k")
    assert facts["trimmed"] >= 1 and rows[0] == "k0" != rows[-2]
    assert any(border == "region mhc_boundary" for border in facts["borders"])


def test_two_ranks_compile_to_eagers_bits(tmp_path: Path) -> None:
    config = first_layers(QUICK, 1)
    save_checkpoint(V41ForCausalLM.random(config, seed=1), tmp_path)
    check_ranks(run_ranks(compiled_logits, tmp_path, 2, tmp_path, {"codegen": "eager", "cache": False}), 1)


@slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_a_whole_model_compile_to_eagers_bits(world: int, tmp_path: Path) -> None:
    save_checkpoint(V41ForCausalLM.random(FOUR, seed=1), tmp_path)
    made = run_ranks(compiled_logits, tmp_path, world, tmp_path, {"codegen": "eager", "strict": True})
    check_ranks(made, FOUR.num_hidden_layers)


@slow
@pytest.mark.parametrize(("codegen", "own"), [("inductor", False), ("inductor", True), ("eager", True)])
def test_collectives_run_in_pieces_of_any_kind(codegen: str, own: bool, tmp_path: Path) -> None:
    """Each rank has the same bits, with codegen eager those of eager; a fused sum is told apart from a loose one."""
    config = first_layers(QUICK, 1)
    save_checkpoint(V41ForCausalLM.random(config, seed=1), tmp_path)
    made = run_ranks(compiled_logits, tmp_path, 2, tmp_path, {"codegen": codegen, "cache": False}, own)
    for each in made:
        if isinstance(each, RuntimeError):
            raise each
        assert torch.equal(each["found"], made[0]["found"]) and not each["told"]["fallbacks"]
        assert torch.allclose(each["found"], each["expected"], atol=1e-2)
        assert codegen != "eager" or torch.equal(each["found"], each["expected"])
        sums = [line for line in each["told"]["collectives"] if line.startswith("all_reduce")]
        assert [f", in {REDUCED}" in line for line in sums] == [own, own]
        assert each["told"]["borders"].count(f"region {REDUCED}") == 2 * own and each["told"]["taken in"] == own


# ---- ranks whose programs differ


def step_of(what: str) -> Any:
    """A program of one rank."""

    def fewer(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x * 2, "sum", "0")) + 1

    def more(x: Tensor) -> Tensor:
        y = fewer(x)
        return y * c10d.wait_tensor(c10d.all_reduce(x.exp(), "sum", "0"))

    def other_op(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x * 2, "max", "0")) + 1

    def other_type(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x.double() * 2, "sum", "0")) + 1

    def other_work(x: Tensor) -> Tensor:  # a rank's own constant, which is no matter
        return c10d.wait_tensor(c10d.all_reduce(x * 2 + dist.get_rank(), "sum", "0")) + 1

    return {"more": more, "other op": other_op, "other type": other_type, "other work": other_work}.get(what, fewer)


def run_step(of_rank_1: str) -> Tensor:
    fn = step_of(of_rank_1 if dist.get_rank() == 1 else "fewer")
    x = torch.ones(4, 8)
    with torch.no_grad():
        return torch.compile(fn, backend="v41", options={"codegen": "eager"})(x)


@pytest.mark.parametrize("what", ["more", pytest.param("other op", marks=slow), pytest.param("other type", marks=slow)])
def test_ranks_whose_programs_differ_hear_it_before_the_first_step(what: str, tmp_path: Path) -> None:
    made = run_ranks(run_step, tmp_path, 2, what, seconds=60)
    for rank, each in enumerate(made):
        assert isinstance(each, RuntimeError), each
        assert "RanksDisagree" in str(each) and f"ranks {rank} and {1 - rank} of group 0" in str(each)
        assert ("nothing more" in str(each)) is (what == "more")


@slow
def test_a_constant_of_a_rank_is_no_difference(tmp_path: Path) -> None:
    first, second = run_ranks(run_step, tmp_path, 2, "other work", seconds=60)
    assert torch.equal(first, torch.full((4, 8), 6.0)) and torch.equal(first, second)


def run_late() -> Tensor | str:
    if dist.get_rank() == 1:
        return "compiles nothing"
    return run_step("fewer")


def test_a_rank_that_compiles_nothing_is_named(tmp_path: Path) -> None:
    first, _ = run_ranks(run_late, tmp_path, 2, seconds=3)
    assert "RankMissing" in str(first) and "rank 1 of group 0 has not compiled program 1" in str(first)
    assert "within 3 s" in str(first)


def test_a_group_of_more_ranks_is_another_program() -> None:
    """Its name and the shapes may be the same: what is stored for two ranks must not be loaded by three."""
    keys = []
    for count in (2, 3, 2):
        with ranks(count):
            keys.append(key(step_of("fewer"), (torch.ones(4, 8),)))
    assert keys[0].digest == keys[2].digest
    assert keys[0].differences(keys[1].parts) == ["program: wiring"]
