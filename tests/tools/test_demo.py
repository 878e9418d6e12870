"""`make demo` in small, with the real compiler: five random models agree with eager, every pass says what it did."""

from __future__ import annotations

import json

import pytest

from v41.model_def.config import V41Config
from v41.tools.cli import main


def test_five_models_agree_with_eager(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("Rain.", "Wind and rain, and then more wind than rain.")
    command = ["generate", "--compare-eager", "--tokens", "4", "--chunk", "16", "--json"]
    code = main([*command, *(word for prompt in prompts for word in ("--prompt", prompt))])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0 and facts["holds"]
    assert len(facts["agreement"]) == 5
    steps = 3 + 4 - 1  # the longer prompt in three chunks, then all but the last token
    rows = (1 + 3) + steps  # the shorter is read at once, and ends with its fourth token
    assert [(found["rows"], found["failed"]) for found in facts["agreement"].values()] == [(rows, 0)] * 5

    (graph,) = facts["graphs"]  # chunks and decode, ragged or not: one program
    assert graph["graph_break"] is None and graph["recompiles"] == 0
    runs = {run["name"]: run for run in graph["passes"]}
    assert not [run["failure"] for run in runs.values() if run["failure"]]
    assert [run["refused"] for run in runs.values()] == [0] * len(runs)
    assert facts["regions"]["found"] == facts["regions"]["by_config"]
    layers = V41Config.preset("tiny").num_hidden_layers
    assert (facts["regions"]["found"]["sinkhorn"], facts["regions"]["found"]["moe_gate"]) == (2 * layers, layers)
