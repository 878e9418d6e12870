"""The costs of a step are the sum of its nodes' formulas; each part takes what the slower of two limits says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.tools.printed import printed
from tests.tools.small_models import WIDTH, run_of_balanced
from v41.errors import ContextBeyondModel, SizesMissing, StepTooLarge, UnknownGPU, UnknownSize, UnusedOption
from v41.model_def.batch import block_counts
from v41.model_def.buckets import Buckets
from v41.model_def.config import V41Config
from v41.passes.analysis.cost import Costs, total
from v41.plan import Plan
from v41.tools import cost_command
from v41.tools.cli import main
from v41.tools.cost_command import Total, costs_table, show, totals, unknown
from v41.tools.gpus import GPUS, gpu_named
from v41.tools.nodes import OTHERS, PRODUCTS, WorkFacts
from v41.tools.run_folder import save
from v41.tools.steps import MOST, Step, step_of_rows

H200 = GPUS["H200"]


def step(rows: int) -> Step:
    return step_of_rows(run_of_balanced().plan, None, rows)


@given(st.integers(0, 10**6))
def test_the_parts_are_all_that_the_step_does(rows: int) -> None:
    run = run_of_balanced()
    *parts, everything = totals(run.work, step(rows), H200)
    by_nodes = total(Costs().program(piece.body) for piece in run.plan.pieces).at(u0=rows)
    told = (everything.read, everything.written, everything.flops, everything.launches)
    assert told == (by_nodes.read, by_nodes.written, by_nodes.flops, by_nodes.launches)
    for name in ("count", "launches", "read", "written", "flops", "apart_bytes", "apart_launches"):
        assert getattr(everything, name) == sum(getattr(part, name) for part in parts)
    assert [part.part for part in parts] == ["sinkhorn", PRODUCTS, OTHERS]


@given(st.integers(1, 10**6))
def test_a_region_is_one_kernel_and_apart_it_is_its_nodes(rows: int) -> None:
    loops, products, _, _ = totals(run_of_balanced().work, step(rows), H200)
    matrix, row = 4 * rows * WIDTH * WIDTH, 4 * rows * WIDTH
    assert (loops.launches, loops.moved) == (2, 2 * 2 * matrix)
    assert (loops.apart_launches, loops.apart_bytes) == (18, 2 * 3 * ((matrix + row) + 2 * row + (2 * matrix + row)))
    assert products.flops == 2 * 2 * rows * WIDTH * WIDTH
    assert products.moved == 2 * (2 * row + 4 * WIDTH * WIDTH)


sizes = st.integers(0, 10**12)


@given(sizes, sizes, sizes)
def test_a_part_takes_what_the_slower_limit_says(read: int, written: int, flops: int) -> None:
    found = Total("part")
    found.add(WorkFacts("part", None, 3, 1, str(read), f"{written}*u0", str(flops), (), "0", 0, False), {"u0": 1}, H200)
    moved = read + written
    assert found.seconds == 3 * max(moved / 4.8e12, flops / 989e12)
    assert H200.bound(moved, flops) == ("bytes" if moved * 989 >= flops * 4.8 else "flops")


def test_operations_that_nobody_counts_are_named_and_left_out() -> None:
    work = [WorkFacts("part", None, 1, 1, "4", "4", None, ("aten.strange.default",), "8", 1, False)]
    assert unknown(work) == ("aten.strange.default",) and totals(work, step(2), H200)[-1].flops == 0


@pytest.mark.parametrize("preset", ["tiny", "flash"])
def test_a_step_has_the_sizes_of_a_batch(preset: str) -> None:
    """Decode up to 256 rows; beyond that as few prompts as positions allow."""
    config = V41Config.preset(preset)
    blocks = [f"blocks of ratio {m}" for m in {*config.compress_ratios} - {0}]
    names = ["rows", "requests", "longest", "logits", *blocks]
    plan = Plan((), (), {}, (), {f"u{i}": name for i, name in enumerate(names)})
    decode = step_of_rows(plan, config, 16, 512)
    assert decode.sizes == {"rows": 16, "requests": 16, "longest": 1, "logits": 16, **counted(config, 512)}
    assert decode.symbols == {u: decode.sizes[name] for u, name in plan.sizes.items()}
    most = config.max_position_embeddings
    length, requests = min(3000, most), -(-3000 // most)
    wanted = {"rows": 3000, "requests": requests, "longest": length, "logits": requests, **counted(config, length)}
    assert step_of_rows(plan, config, 3000).sizes == wanted


def test_decode_reads_what_the_model_can_and_no_more() -> None:
    """Unasked for, 4096 tokens or as many as there are positions; what is asked for is never cut in silence."""
    plan, config = Plan((), (), {}, (), {"u0": "rows"}), V41Config.preset("tiny")
    most = config.max_position_embeddings
    for context in (None, most):
        assert step_of_rows(plan, config, 2, context).label == f"decode of 2 at {most} tokens"
    assert step_of_rows(plan, V41Config.preset("flash"), 2).label == "decode of 2 at 4096 tokens"
    for rows in (2, 4096):
        with pytest.raises(ContextBeyondModel, match=f"at most {most} tokens"):
            step_of_rows(plan, config, rows, most + 1)
    with pytest.raises(UnusedOption, match="--context"):  # another model's sizes are rows
        step_of_rows(plan, None, 2, 64)


def counted(config: V41Config, context: int) -> dict[str, int]:
    return {f"blocks of ratio {m}": count for m, count in block_counts(config, context).items()}


def test_in_buckets_a_step_has_the_sizes_of_its_rung() -> None:
    plan = Plan((), (), {}, (), {"u0": "rows", "u1": "logits", "u2": "longest"})
    step = step_of_rows(plan, V41Config.preset("tiny"), 9, 64, buckets=Buckets())
    assert step.sizes == {"rows": 16, "logits": 16, "longest": 1}


def test_a_size_without_a_number_is_asked_for() -> None:
    config, plan = V41Config.preset("tiny"), Plan((), (), {}, (), {"u0": "rows", "u1": "images"})
    with pytest.raises(SizesMissing, match="images"):
        step_of_rows(plan, config, 4)
    assert step_of_rows(plan, config, 4, given={"images": 7}).symbols == {"u0": 4, "u1": 7}
    with pytest.raises(UnknownSize, match="images, the nearest; all: rows, images"):
        step_of_rows(plan, None, 4, given={"imags": 7})
    with pytest.raises(UnknownSize, match="there is none"):
        step_of_rows(replace(plan, sizes={}), None, 4, given={"rows": 7})


def test_a_gpu_of_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownGPU, match="H200, the nearest"):
        gpu_named("h20")
    assert all(gpu.source and gpu.seconds(gpu.bytes_per_s, 0) == 1 for gpu in GPUS.values())


def test_the_table() -> None:
    table = costs_table(totals(run_of_balanced().work, step(4096), H200), H200)
    assert printed(table) == """\
part         launches     MB    GFLOP  flop/B  us, least     by  MB apart  apart
sinkhorn ~          2   4.19  0.00334   0.797      0.874  bytes        22     18
products            2  0.525  0.00105       2      0.109  bytes     0.525      2
other nodes         6   9.18  0.00157   0.171       1.91  bytes      9.18      6
all                10   13.9  0.00596   0.429       2.89  bytes      31.7     26""".splitlines()


def test_the_command_says_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_of_balanced(), tmp_path / "run")
    command = ["cost", str(tmp_path / "run"), "--tokens", "1,4096", "--gpu", "B200"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "4096 rows: rows = 4096; on B200" in out and "estimated from shapes, not measured" in out
    assert "NVIDIA HGX B200 data sheet" in out and all(len(line) <= 100 for line in out.splitlines()[:7])
    assert main([*command, "--json", "--strict"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["estimate"], told["unknown"]) == ("v41.cost.2", True, [])
    assert [each["sizes"] for each in told["steps"]] == [{"rows": 1}, {"rows": 4096}]
    wanted = totals(run_of_balanced().work, step(4096), GPUS["B200"])
    assert [part["seconds"] for part in told["steps"][1]["parts"]] == [each.seconds for each in wanted]


def test_of_a_program_without_a_size_that_changes_one_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of_balanced()
    fixed = [WorkFacts("part", None, 1, 1, "4", "4", "8", (), "8", 1, False)]
    bare = replace(run, parts={**run.parts, "work": lambda: fixed})
    steps = [Step(f"{rows} rows", {}, {}) for rows in (1, 128, 4096)]
    show(Console(width=100), bare, steps, H200)
    out = capsys.readouterr().out
    assert out.count("us, least") == 1 and "every step, since no size of this program changes; on H200" in out
    show(Console(width=100), run, [step(1), step(4096), step(4096)], H200)
    assert capsys.readouterr().out.count("us, least") == 2


def test_a_size_that_follows_from_values_is_a_size_that_one_can_give(capsys: pytest.CaptureFixture[str]) -> None:
    """By itself it is as many as rows: no formula is left without a number, in cost and memory alike."""
    for command in ("cost", "memory"):
        torch._dynamo.reset()
        assert main([command, "tests.tools.small_models:picks", "--tokens", "3", "--json"]) == 0
        (step,) = json.loads(capsys.readouterr().out)["steps"]
        assert step["sizes"]["rows"] == 3 and len(step["sizes"]) > 1


@pytest.mark.parametrize("rows", [MOST + 1, 10**12, 2**63 - 1])
def test_a_step_beyond_all_batches_is_refused_at_once(rows: int) -> None:
    with pytest.raises(StepTooLarge, match=f"at most {MOST} rows"):
        step_of_rows(run_of_balanced().plan, V41Config.preset("tiny"), rows)
    assert step_of_rows(run_of_balanced().plan, None, rows).sizes["rows"] == rows  # another model's is a number alone


def test_rows_that_no_tensor_has_are_no_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for rows in (str(10**30), "2.5", "1,x", "-3"):
        with pytest.raises(SystemExit) as left:
            main(["cost", "tiny", "--tokens", rows])
        told = " ".join(capsys.readouterr().err.split())
        assert left.value.code == 2 and "is not a whole number from 1 to 2**63 - 1" in told


def test_nothing_is_printed_before_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_of_balanced(), tmp_path / "run")
    real, calls = cost_command.totals, list[int]()

    def second_fails(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise SizesMissing("--size", sizes="u7")
        return real(*given)

    monkeypatch.setattr(cost_command, "totals", second_fails)
    assert main(["cost", str(tmp_path / "run"), "--tokens", "1,2"]) == 2
    assert capsys.readouterr().out == ""
