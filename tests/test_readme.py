"""What the README says one can type works as it stands there."""

from __future__ import annotations

import re

import pytest
import torch

from tests.conftest import ROOT
from v41.tools.cli import parser

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_programs_of_the_readme_run_one_after_the_other() -> None:
    shapes, names = [], dict[str, object]()
    for program in re.findall(r"```python\n(.+?)```", README, re.DOTALL):
        exec(compile(program, "README.md", "exec"), names)
        logits = names["logits"]
        assert isinstance(logits, torch.Tensor)
        shapes.append(tuple(logits.shape))
    reports = names["reports"]
    assert shapes == [(2, 512), (1, 512), (1, 512)]  # the third program leaves them
    assert isinstance(reports, list) and len(reports) == 1 and reports[0].passes


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (?:\w+=\S+ )?([\w.-]+)", README))
    assert {"demo", "test"} <= named <= targets
    names = "generate|inspect|passes|why-not|diff"
    told = re.findall(rf"(?:`|\$ )v41 ((?:{names})[^`\n#]*)", README)
    lines = [line.split() for line in told]
    assert {line[0] for line in lines} == {*names.split("|")}
    for line in lines:
        if "--help" not in line:
            assert parser().parse_args(line).command == line[0]
