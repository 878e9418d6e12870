"""The library says what the commands say: of a call that is not run, of what was compiled last, in torch's trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import v41
from tests.tools.small_models import Balanced, Cut, balanced
from v41.errors import GraphNotWhole, ModelFails, UnknownNode
from v41.plan import Plan
from v41.report import CompileReport, Decision, PassRun, last_report, publish, text_of
from v41.tools.run_folder import load


def test_a_call_is_explained_and_not_run(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, inputs = balanced()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it ran") if not torch.compiler.is_compiling() else None)
    told = v41.explain(model, *inputs)
    assert "sinkhorn #1" in str(told) and "fold_sinkhorn" in str(told) and "by the config" not in str(told)
    assert told.node("sinkhorn_0").startswith("sinkhorn_0  region sinkhorn\n  made by  fold_sinkhorn, at ")
    with pytest.raises(UnknownNode):
        told.node("no such node")
    told.save(tmp_path / "run")
    assert load(tmp_path / "run").source == "Balanced"


def test_a_call_that_is_no_one_graph_is_refused() -> None:
    torch._dynamo.reset()
    with pytest.raises(GraphNotWhole):
        v41.explain(Cut(), torch.rand(3))


def test_a_function_is_told_like_a_model() -> None:
    def twice(x: Tensor) -> Tensor:
        return x + x

    torch._dynamo.reset()
    assert v41.explain(twice, torch.rand(3)).run.plan.pieces  # type: ignore[arg-type]
    with pytest.raises(ModelFails, match=r"missing 1 required positional argument.*\n.*test_explanation.py"):
        v41.explain(twice)  # type: ignore[arg-type]


def test_the_last_report_is_the_last_and_holds_no_graph() -> None:
    torch._dynamo.reset()
    model = torch.compile(Balanced(1), backend="v41", options={"codegen": "eager"})
    with torch.no_grad(), v41.collect() as reports:
        model(torch.rand(5, 8))
    last = v41.last_report()
    assert last is not None and last.passes == reports[0].passes and last.captures is reports[0].captures
    assert last.plan is not None and last.plan.pieces and last.plan.to_json() == reports[0].plan.to_json()  # type: ignore[union-attr]
    assert not isinstance(last.plan.pieces[0].body, torch.fx.GraphModule)
    publish(CompileReport(pieces=7))
    assert last_report() is not None and last_report().pieces == 7  # type: ignore[union-attr]
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(last_report()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_report_is_text_whatever_it_holds() -> None:
    refusal = Decision(False, "div_7", "m.py:1", "keeps one eps", "add_9")
    report = CompileReport(passes=[PassRun("fold", [refusal], 9, 9, 1.0)], options={"x": (object, "me")})
    told = json.loads(text_of(report))
    assert told["passes"][0]["decisions"][0]["culprit"] == "add_9" and "plan" not in told


def test_the_trace_of_torch_holds_report_and_plan(tmp_path: Path) -> None:
    """TORCH_TRACE is read when torch is imported, hence another process."""
    code = """
        import torch, v41
        def balance(m):
            for turn in range(6):
                m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6)
            return m
        with torch.no_grad():
            torch.compile(balance, backend="v41", options={"codegen": "eager", "cache": False})(torch.rand(5, 4, 4))
    """
    folder = tmp_path / "trace"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TORCH_TRACE": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (log,) = folder.iterdir()
    found, name = dict[str, list[str]](), None
    for line in log.read_text().splitlines():
        if line.startswith("\t") and name is not None:
            found[name].append(line)
        elif '{"artifact": {"name": "v41_' in line:
            name = json.loads(line[line.index("{") :])["artifact"]["name"]
            found[name] = []
        else:
            name = None
    passes = json.loads("\n".join(found["v41_report"]))["passes"]
    assert [run["name"] for run in passes if run["decisions"]] == ["fold_sinkhorn"]
    assert Plan.from_json("\n".join(found["v41_plan"])).pieces
