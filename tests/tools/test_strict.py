"""For CI: every command that tells of a model prints JSON, and with --strict its exit code says whether all is well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.small_models import run_of_balanced
from tests.tools.test_timeline import run_with, sided
from v41.tools.cli import COMMANDS, main, parser
from v41.tools.completion import SHELLS, commands
from v41.tools.json_output import VERSIONS
from v41.tools.run import Run
from v41.tools.run_folder import save

# what has no site to judge: a check's own exit code counts, rows that fail make generate exit with 1, a shell asks
WITHOUT = {"bisect", "generate", "completion", "bench"}  # and a bench exits with 1 where ours is wrong
TOLD = {"cost": [], "memory": [], "timeline": [], "partition": [], "inspect": [], "passes": [], "explain": ["piece_0"]}


def test_every_command_prints_json_and_every_one_that_judges_can_be_strict() -> None:
    """And every case of bench."""
    found = commands(parser())
    groups = {path[:-1] for path in found}
    words = {path: found[path] for path in found if path not in groups}
    assert {path[0] for path in words} == {*COMMANDS}
    assert [path for path in words if "--json" not in words[path]] == []
    assert {path[0] for path in words if "--strict" not in words[path]} == WITHOUT
    assert VERSIONS.keys() >= COMMANDS.keys()


def refusing(run: Run, rule: str = "keeps one eps") -> Run:
    """The same, but that fold_sinkhorn refused one site."""
    at = next(i for i, each in enumerate(run.report.passes) if each.name == "fold_sinkhorn")
    fold = run.report.passes[at]
    flawed = replace(fold.decisions[0], applied=False, rule=rule, culprit="add_1", region=None)
    passes = [*run.report.passes]
    passes[at] = replace(fold, decisions=[flawed, *fold.decisions[1:]])
    return replace(run, report=replace(run.report, passes=passes))


@pytest.mark.parametrize("command", TOLD)
def test_strict_is_an_exit_code_and_nothing_else(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run_of_balanced(), tmp_path / "good")
    save(refusing(run_of_balanced()), tmp_path / "refused")
    words = [command, *TOLD[command], "-m"]
    assert main([*words, str(tmp_path / "good"), "--strict"]) == 0
    assert main([*words, str(tmp_path / "refused")]) == 0
    capsys.readouterr()
    assert main([*words, str(tmp_path / "refused"), "--strict", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["schema"] == f"v41.{command}.{VERSIONS[command]}"


def test_what_no_spelling_would_spare_is_told_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the model that v41 is made for would fail: a layer that is cut in two reads records of more rows."""
    save(refusing(run_of_balanced(), "records of this step are those of its rows"), tmp_path / "run")
    assert main(["passes", str(tmp_path / "run"), "--strict"]) == 0
    assert "records of this step are those of its rows" in capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_may_complete_is_json_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["shell"]) == ("v41.completion.1", shell)
    found = {each["after"]: each for each in told["completions"]}
    assert found[""]["words"].keys() >= COMMANDS.keys() and "--strict" in found["memory"]["words"]
    assert found["kernels"]["values"]["--arch"] == ["sm_80", "sm_90", "sm_100"]


def test_no_schedule_is_told_of_more_rows_than_a_decode_step_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(sided())

    def told(plan: dict[str, Any], *more: str) -> tuple[int, str]:
        report = replace(run.report, plan=replace(run.plan, **plan))
        found = replace(run.predicted, plan=replace(run.predicted.plan, **plan))
        parts = {**run.parts, "predicted": lambda: found}
        save(replace(run, report=report, parts=parts), tmp_path / "run")
        code = main(["timeline", str(tmp_path / "run"), *more])
        return code, " ".join(" ".join(capsys.readouterr()).split())

    whole = {"whole": {"rows": 24, "longest": 1}}
    assert told(whole, "--rows", "24")[0] == 0
    code, text = told(whole, "--rows", "25")
    assert code == 2 and "no decode step has 25 rows" in text and "captured whole holds 24" in text
    assert told({"whole": {}}, "--rows", "99999")[0] == 0  # a plan without buckets has no largest
    unnamed = {"sizes": {symbol: "entries" for symbol in run.plan.sizes}}
    code, text = told(unnamed, "--rows", "4")
    assert code == 2 and "the program has no size called rows" in text
    code, text = told(unnamed)
    assert code == 0 and "every step, predicted" in text


def test_what_is_measured_has_no_more_rows_either_and_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is compiled."""
    assert main(["timeline", "tiny", "--measure", "--rows", "257"]) == 2
    assert "captured whole holds 256" in " ".join(capsys.readouterr().err.split())
    assert main(["timeline", "tiny", "--measure", "--strict"]) == 2
    assert "--strict would change nothing here" in capsys.readouterr().err
