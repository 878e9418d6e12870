"""What the README says one can type works as it stands there."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch

from tests.conftest import ROOT
from v41.options import Options
from v41.passes.pipeline import PIPELINE
from v41.tools.cli import COMMANDS, parser
from v41.tools.completion import commands
from v41.tools.report_view import BETWEEN

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
    names = "|".join(COMMANDS)
    told = re.findall(rf"(?:`|\$ |^)v41 ((?:{names})\b[^`\n#]*)", README, re.MULTILINE)
    lines = [line.split() for line in told]
    assert {line[0] for line in lines} == {*names.split("|")} - {"completion"}
    for line in lines:
        if "--help" not in line:
            assert parser().parse_args(line).command == line[0]


def test_the_readme_says_what_each_case_of_bench_is_for() -> None:
    cases = {word for word in commands(parser())["bench",] if not word.startswith("-")}
    assert {*re.findall(r"`v41 bench (\w+)", README)} == cases


def test_the_options_of_the_readme_are_those_there_are() -> None:
    told = re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE)
    assert [name for name, _ in told] == [field.name for field in fields(Options)]
    for (_, values), field in zip(told, fields(Options), strict=True):
        default = re.search(r"`(\S+)` \(default\)", values)
        assert (default[1].strip('"') if default else "None") == str(field.default)


def test_the_tables_of_the_readme_show_the_passes_there_are() -> None:
    tables = re.findall(r"^pass  .+\n((?:.+\n)+)", README, re.MULTILINE)
    assert len(tables) == 2  # of the demo, and of `v41 passes`
    for rows in tables:
        *passes, between = [row.split("  ")[0] for row in rows.splitlines()]
        assert (passes, between) == ([each.name for each in PIPELINE], BETWEEN)
