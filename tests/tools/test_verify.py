"""verify names the pass, the rule and the first node that differs; what could not be compared is not called equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import ops
from torch.fx import GraphModule

from tests.tools.printed import printed
from tests.tools.small_models import run_of_balanced
from v41.errors import NeedsModel
from v41.passes import pipeline
from v41.passes.pipeline import PIPELINE, Pass
from v41.report import Decision, PassRun
from v41.tools.cli import main
from v41.tools.run_folder import save
from v41.tools.sources import model_named
from v41.tools.verify_command import verdict, verdicts_table

MODEL = "tests.tools.small_models:balanced"


def halve(gm: GraphModule) -> list[Decision]:
    """A pass that is wrong: an exponential becomes a sine."""
    node = next(node for node in gm.graph.nodes if node.target is ops.aten.exp.default)
    node.target = ops.aten.sin.default
    return []


@pytest.fixture
def with_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(pipeline.run_pipeline, "__defaults__", ((*PIPELINE[:3], Pass(halve), *PIPELINE[3:]),))


def test_a_model_that_all_passes_leave_right(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["verify", MODEL, "--strict", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "v41.verify.1" and told["holds"]
    assert [each["name"] for each in told["passes"]] == [each.name for each in PIPELINE]
    fold = next(each for each in told["passes"] if each["name"] == "fold_sinkhorn")
    assert (fold["rules"], fold["values"], fold["applied"]) == (True, "equal", 2)


def test_a_pass_that_changes_values_is_named_with_the_first_node_that_differs(
    with_a_bug: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["verify", MODEL]) == 1
    out = capsys.readouterr().out
    assert "halve" in out and "computes the same values" in out and "exp" in out
    assert "m = (x.unsqueeze(-1) + layer(x).unsqueeze(-2)).exp()" in out
    count = len(PIPELINE)
    assert f"{count + 1} passes: {count} hold all rules" in out


def test_the_table() -> None:
    good = PassRun("fold", [], 9, 7, 1.0)
    runs = [good, replace(good, name="wrong", failure="InvariantBroken: it computes the same values; mul: differs"),
            replace(good, name="unsound", failure="InvariantBroken: it has fresh meta"),
            replace(good, name="large", warning="values not compared: the inputs take 9 GiB")]  # fmt: skip
    assert printed(verdicts_table(runs)) == """\
pass     rules   values  applied  nodes
fold     hold    equal         0      7
wrong    BROKEN  BROKEN        0      7
unsound  BROKEN  -             0      7
large    hold    -             0      7""".splitlines()
    assert verdict(runs[0]) == "equal"


def test_a_saved_run_has_no_graph_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it was captured from is named, as one types it."""
    run = replace(run_of_balanced(), source="preset tiny, 2 layers, one of 4 ranks")
    save(run, tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "not the graph, and verify runs it before and after each pass" in told
    assert told.endswith("v41 verify tiny --layers 2 --ranks 4")
    with pytest.raises(NeedsModel):
        model_named(str(tmp_path / "run"))
