"""The pass from which on a check fails is found, whichever it is; a check that is not a pass's doing is told apart."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41.errors import CheckNotStarted
from v41.passes.pipeline import PIPELINE
from v41.passes.plan_passes import PLAN_PASSES
from v41.tools.bisect_command import SWITCH, bisect, passes_without
from v41.tools.cli import main

NAMES = (*(each.name for each in PIPELINE), *PLAN_PASSES)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_the_first_bad_pass_is_found_in_few_runs(sizes: tuple[int, int]) -> None:
    count, bad = sizes
    names = [f"pass_{i}" for i in range(1, count + 1)]
    found = bisect(names, lambda on: on < bad)
    assert found.culprit == f"pass_{bad}" and f"from pass_{bad} on" in found.says
    assert len(found.attempts) <= 2 + count.bit_length()
    assert [attempt.good for attempt in found.attempts] == [attempt.on < bad for attempt in found.attempts]


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_of_a_check_that_comes_and_goes_a_change_is_found(verdicts: list[bool]) -> None:
    """It passes without any pass and fails with all: in between there is a pass with which it begins to fail."""
    good = [True, *verdicts, False]
    found = bisect([f"pass_{i}" for i in range(1, len(good))], good.__getitem__)
    at = int(str(found.culprit).removeprefix("pass_"))
    assert good[at - 1] and not good[at]


def test_a_check_that_passes_or_that_no_pass_breaks_is_said() -> None:
    passes, fails = bisect(NAMES, lambda on: True), bisect(NAMES, lambda on: False)
    assert (passes.culprit, len(passes.attempts)) == (None, 1) and "nothing to look for" in passes.says
    assert (fails.culprit, len(fails.attempts)) == (None, 2) and "is not a pass" in fails.says


def test_no_pass_is_named_within_another() -> None:
    """The switch is a text in which torch looks for the name of a pass."""
    assert [(a, b) for a in NAMES for b in NAMES if a != b and a in b] == []


def fails_with(name: str) -> list[str]:
    """A check that fails where the pass `name` is not switched off."""
    code = f"import os, sys; sys.exit({name!r} not in os.environ['{SWITCH}'].split(','))"
    return [sys.executable, "-c", code]


def test_passes_are_switched_off_for_the_check_beside_those_that_are_already(monkeypatch: pytest.MonkeyPatch) -> None:
    check = fails_with("outline_mhc")
    assert [passes_without(check, off) for off in ([], ["outline_gate", "outline_mhc"])] == [False, True]
    monkeypatch.setenv(SWITCH, "outline_mhc")
    assert passes_without(check, ["outline_gate"])
    with pytest.raises(CheckNotStarted, match="no_such_program"):
        passes_without(["no_such_program_of_anybody"], [])


@pytest.mark.parametrize("words", [[], ["--"], ["--json"]])
def test_without_a_command_there_is_nothing_to_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", *words]) == 2
    captured = capsys.readouterr()
    assert "there is no command" in captured.err and not captured.out


@pytest.mark.parametrize("name", [NAMES[0], "outline_mhc", NAMES[-1]])
def test_the_command_names_the_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "--json", "--", *fails_with(name)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["culprit"]) == ("v41.bisect.1", name)
    assert main(["bisect", *fails_with("nothing")[:-1], "pass"]) == 0
    assert f"{len(NAMES)} of {len(NAMES)}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_pass_that_is_switched_off_is_off_in_a_compilation(tmp_path: Path) -> None:
    """The check compiles, and fails where fold_sinkhorn finds its loop."""
    check = tmp_path / "check.py"
    check.write_text(
        textwrap.dedent("""
        import sys, torch, v41
        def balance(m):
            for turn in range(6):
                m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6)
            return m
        with torch.no_grad(), v41.collect() as reports:
            torch.compile(balance, backend="v41", options={"codegen": "eager"})(torch.rand(5, 4, 4))
        sys.exit(any(run.applied for run in reports[0].passes))
    """)
    )
    found = bisect(NAMES, lambda on: passes_without([sys.executable, str(check)], NAMES[on:]))
    assert found.culprit == "fold_sinkhorn"
