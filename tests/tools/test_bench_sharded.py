"""`v41 bench sharded`: ranks run alike, the slowest one's time counts, and steps that drift are seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from v41.errors import BenchNeedsRanks
from v41.tools.bench.sharded import of_all, ratios, stressed, without_lists
from v41.tools.cli import main


def test_the_slowest_rank_counts_and_an_error_of_any() -> None:
    ours = {"case": "decode 1", "us": 3.0, "host_us": 2.0, "floor_us": 1.0, "agreement": {"rows": 1}}
    theirs = {**ours, "us": 2.0, "host_us": 5.0}
    ranks = [without_lists(each) for each in (ours, theirs)]
    assert "agreement" not in ranks[0]
    assert of_all(ours, ranks) == {**ours, "us": 3.0, "host_us": 5.0, "us of ranks": [3.0, 2.0]}
    assert of_all(ours, [ranks[0], {"error": "it failed"}])["error"] == "rank 1: it failed"
    untimed = {"case": "decode 1", "floor_us": 1.0}
    assert of_all(untimed, [untimed, untimed]) == untimed


def test_fused_sums_are_held_against_each_other_way() -> None:
    def record(contender: str, case: str, **more: float) -> dict[str, object]:
        return {"contender": contender, "case": case, **more}

    records = [record("fused", "decode 1", us=2.0), record("library", "decode 1", us=4.0),
               record("reduce-overhead", "decode 1"), record("library", "decode 2", us=1.0)]  # fmt: skip
    assert ratios(records) == {"decode 1": {"over library": 0.5}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_another_bit_is_counted(dtype: torch.dtype) -> None:
    numbers = count()

    def step() -> torch.Tensor:
        return torch.tensor([float("nan"), -0.0 if next(numbers) == 2 else 0.0], dtype=dtype)

    assert stressed(step, 4, rank=0, timed=False) == 1


def test_a_process_alone_is_told_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sharded", "--device", "cpu"]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert "torchrun" in str(BenchNeedsRanks("v41 bench sharded", found="this process alone"))


@pytest.mark.slow
def test_two_processes_measure_one_model(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    command = [*torchrun, "-m", "v41.tools.cli", "bench", "sharded", "--preset", "tiny", "--cut", "--device", "cpu"]
    options = ["--context", "12", "--rows", "1", "3", "--contenders", "fused", "library", "--stress", "3"]
    out, env = tmp_path / "found.json", os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, *options, "--out", str(out)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert [(r["contender"], r["case"], r["alike"]) for r in found["records"]] == [
        (name, case, True) for name in ("fused", "library") for case in ("decode 3", "decode 1")
    ]
    assert [each["differ"] for each in found["stress"]] == [[0, 0], [0, 0]]
