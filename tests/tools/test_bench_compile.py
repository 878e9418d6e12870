"""What capturing a model costs is told by phase; the phases are the whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from v41.tools.bench.compile import Phases
from v41.tools.cli import main


def test_a_phase_ends_where_the_next_begins_and_one_that_comes_again_adds_up() -> None:
    before = time.process_time()
    phases = Phases("imports")
    for name in ("a", "b", "a", "end"):
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        phases.begin(name)
    assert list(phases.seconds) == ["imports", "a", "b"]
    assert phases.seconds["imports"] >= before + 0.01  # from the start of the process
    assert phases.seconds["a"] >= 0.03 and 0.01 <= phases.seconds["b"] < phases.seconds["a"]


@pytest.mark.slow
def test_each_count_of_layers_is_captured_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "compile.json"
    assert main(["bench", "compile", "--preset", "tiny", "--layers", "1", "2", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    one, two = told["records"]
    assert (told["preset"], told["codegen"], one["layers"], two["layers"]) == ("tiny", "triton", 1, 2)
    for record in (one, two):
        assert {"imports", "model", "Dynamo", "report"} <= record["phases"].keys()
        assert record["cpu_seconds"] == pytest.approx(sum(record["phases"].values()), abs=0.3)
        assert record["failures"] == [] and record["peak_mib"] > 100
    assert one["nodes"][0] < two["nodes"][0] and one["phases"]["imports"] > 0.5
