"""`v41 bench agreement` judges every codegen by the same eager run, keeps the fp64 run beside it, and its code is the
verdict; `v41 bench capacity` needs a GPU and compares like with like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from v41.tools.bench.capacity import ratios_of
from v41.tools.cli import main

READ = ["--seeds", "2", "--tokens", "2", "--prompt", "Rain.", "--prompt", "A"]
COMMAND = ["bench", "agreement", "--device", "cpu", *READ]


@pytest.mark.parametrize("damaged", [False, True])
def test_each_codegen_is_judged_by_one_eager_run(damaged: bool, tmp_path: Path, monkeypatch) -> None:
    def compiled(model, options, **_):
        shift = int(damaged and options["codegen"] == "inductor")
        return lambda batch, cache: model(batch, cache).roll(shift, 0)  # another request's logits

    monkeypatch.setattr(torch, "compile", compiled)
    out = tmp_path / "agreement.json"
    code = main([*COMMAND, "--codegen", "eager", "inductor", "--out", str(out)])
    found = json.loads(out.read_text())
    assert code == int(damaged)
    assert {"commit", "device", "torch", "date", "model", "seconds"} <= found.keys()
    rows = {name: (values["rows"], values["bit_equal"]) for name, values in found["codegens"].items()}
    assert rows["eager"] == (8, 8) and rows["inductor"] == (8, 0 if damaged else 8)
    assert found["codegens"]["fp64"]["failed"] == 0 < found["codegens"]["fp64"]["max_kl"]
    assert [seed["rows"] for seed in found["codegens"]["eager"]["by_seed"]] == [4, 4]
    assert (found["codegens"]["inductor"]["failed"] > 0) == damaged


def test_a_codegen_without_a_device_is_refused_before_there_is_a_model(monkeypatch, capsys) -> None:
    monkeypatch.setattr("v41.tools.bench.agreement.build_model", None)
    assert main(COMMAND) == 2
    assert "codegen triton cannot run" in capsys.readouterr().err


def test_a_ratio_is_the_larger_capacity_over_the_smaller() -> None:
    assert ratios_of({64: {"us": 3.0, "bytes": 10}, 1: {"us": 2.0, "bytes": 10}}) == {"us": 1.5, "bytes": 1.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_capacity_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "capacity"]) == 2
    assert "a benchmark measures a GPU" in capsys.readouterr().err
