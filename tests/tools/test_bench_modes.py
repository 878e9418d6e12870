"""Benches of kernels: records are written as they come, and a check that does not hold is an exit code."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from v41.errors import BenchNeedsGPU
from v41.tools.bench import modes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def run(mode: str, out: Path, checks: dict[str, Any] | None = None, breaks: bool = False) -> int:
    def records(deadline: float) -> Iterator[dict[str, Any]]:
        yield {"rows": 1, "us": 2.0, "origin": {"generated": 1}}
        if breaks:
            raise RuntimeError("the GPU is gone")

    arguments = Namespace(mode=mode, budget=60.0, out=out)
    return modes.run(
        arguments, "thing", lambda: checks or {}, {"bench": records, "tune": records}, lambda r: f"{len(r)} line"
    )


def test_without_a_gpu_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchNeedsGPU, match="v41 bench thing"):
        run("bench", tmp_path / "r.json")


@pytest.mark.usefixtures("gpu")
def test_records_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert run("bench", out) == run("tune", out) == 0
    told = capsys.readouterr().out
    assert told.count('{"rows": 1, "us": 2.0}') == 2 and told.count("1 line") == 1  # tune has no table
    kept = json.loads(out.read_text())
    assert kept["case"] == "thing tune" and kept["records"][0]["origin"] == {"generated": 1} and kept["seconds"] >= 0


@pytest.mark.usefixtures("gpu")
def test_what_is_cut_short_keeps_its_records(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run("bench", tmp_path / "r.json", breaks=True)
    assert len(json.loads((tmp_path / "r.json").read_text())["records"]) == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("checks", "code"), [({"a": True, "error": 0.0}, 0), ({"a": {"b": False}}, 1)])
def test_a_check_is_an_exit_code(checks: dict[str, Any], code: int, tmp_path: Path) -> None:
    assert run("check", tmp_path / "r.json", checks) == code
    assert json.loads((tmp_path / "r.json").read_text())["checks"] == checks
