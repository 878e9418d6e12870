"""Times of kernels: each alone on drawn numbers, at each number of rows, and none where such will not do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.tools.printed import printed
from tests.tools.test_kernels import kernels, plan
from v41 import overlap
from v41.errors import BodyNotKept
from v41.lowering.generated import GeneratedPiece
from v41.tools.cli import main
from v41.tools.kernel_times import Timed, timed
from v41.tools.kernels_command import times_table

CPU = torch.device("cpu")


def test_each_kernel_is_timed_at_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = kernels()

    def microseconds(run: Any, sets: Sequence[tuple[Any, ...]]) -> float:
        assert isinstance(run, GeneratedPiece) and run.kernel.name == kernel.name
        run.check(sets[0])  # as the piece wants its inputs
        return float(max(value.shape[0] for value in sets[0] if value.ndim == 3 and value.shape[1:] == (4, 64)))

    monkeypatch.setattr(overlap, "microseconds", microseconds)
    heard: list[str] = []
    found = timed(plan(), kernels(), (1, 64), CPU, heard.append)
    assert found == [Timed(kernel.name, 1, 1.0), Timed(kernel.name, 64, 64.0)] and heard == [kernel.name]
    monkeypatch.setattr(overlap, "runs_alone", lambda body, sizes: False)
    assert timed(plan(), kernels(), (64,), CPU) == [Timed(kernel.name, 64, None)]


def test_a_saved_run_has_nothing_to_time() -> None:
    with pytest.raises(BodyNotKept):
        timed(plan().without_bodies(), kernels(), (1,), CPU)


def test_times_are_a_table() -> None:
    made = times_table([Timed("a_1f", 1, 6.432), Timed("b", 64, None)])
    lines = [str(line).split() for line in printed(made)]
    assert lines[-2:] == [["a_1f", "1", "6.43"], ["b", "64", "-"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "flash", "--time"]) == 2
    assert "v41 kernels --time" in capsys.readouterr().err
