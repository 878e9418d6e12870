"""The tutorial says what happens: its programs run in order, its commands work, and both show what the text claims."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from v41.tools.cli import main

TEXT = (ROOT / "docs" / "tutorial.md").read_text()
PROGRAMS = re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^\$ v41 (.+)$", TEXT, re.MULTILINE)


def test_the_programs_run_and_print_what_the_text_says() -> None:
    torch._dynamo.reset()
    names: dict[str, object] = {"__name__": "tutorial"}
    printed, complaints = [], []
    for number, program in enumerate(PROGRAMS):
        file = f"tutorial_{number}.py"
        linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)  # so that lines are known
        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", FutureWarning)
            exec(compile(program, file, "exec"), names)
        printed.append(out.getvalue())
        complaints += [str(each.message) for each in heard if issubclass(each.category, FutureWarning)]
    assert complaints == []
    _, report, uneven, _, proof, wrong = printed
    for layer in (0, 1):
        assert re.search(rf"^{layer} +- +sinkhorn #1 +{1 - layer} +-$", report, re.MULTILINE)  # one piece
    assert re.search(r"fold_sinkhorn +2 +2 +0", report)
    assert "(1e-6 if turn != 3 else 2e-6)" in uneven and uneven.startswith("keeps one eps broken by")
    assert proof == "outline_relu_gate 2 applied, 0 refused, all rules hold\n"
    assert "wrong" in wrong and "computes the same values" in wrong and "torch.relu(self.gate(x))" in wrong


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    (tmp_path / "my_model.py").write_text(PROGRAMS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    assert [command.split()[0] for command in COMMANDS] == ["capture", "inspect", "cost", "explain", "diff", "inspect"]
    shown = {}
    for command in COMMANDS:
        assert main(shlex.split(command)) == 0, command
        shown[command.split()[0]] = capsys.readouterr().out
    assert "sinkhorn_0  region sinkhorn" in shown["explain"] and "> 18 nodes into sinkhorn_0" in shown["diff"]
    (loops,) = [line.split() for line in shown["cost"].splitlines() if line.startswith("sinkhorn")][:1]
    assert float(loops[-2]) > 3 * float(loops[3])  # MB apart, and MB
    assert (tmp_path / "report.html").exists()


def test_files_and_names_of_the_text_exist() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:tests|lowering|passes)/[\w/.]*)`", TEXT))
