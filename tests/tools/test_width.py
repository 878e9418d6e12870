"""What any command prints fits 100 columns: into a pipe, errors and help included. Nothing of progress gets there."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.saved import runs
from tests.tools.saved import save as save_passes
from tests.tools.small_models import run_of_balanced, run_of_routed
from v41.tools import progress as bars
from v41.tools.cli import COMMANDS, main, parser
from v41.tools.run_folder import save
from v41.tools.tables import WIDTH, fitted

HERE = "tests.tools.small_models"
SHOWN = {  # command -> arguments; RUN, ROUTED and PASSES are folders and a file of saved runs
    "inspect": [["RUN"], ["ROUTED"], ["ROUTED", "--against", "RUN"]],
    "cost": [["RUN"], ["ROUTED", "--tokens", "1,4096"]],
    "partition": [["RUN"], ["ROUTED"]],
    "memory": [["RUN", "--all"]],
    "explain": [
        ["sinkhorn_0", "-m", "RUN"],
        ["moe_gate_0", "-m", "ROUTED"],
        ["where", "-m", "ROUTED"],
        ["x", "-m", "RUN"],
    ],
    "passes": [["PASSES"], ["RUN"]],
    "why-not": [["fold_sinkhorn", "--run", "PASSES"], ["outline_mhc", "-m", "RUN"]],
    "diff": [["fold_sinkhorn", "--run", "PASSES", "--all"], ["outline_gate", "-m", "ROUTED", "--all"]],
    "kernels": [["ROUTED"], ["RUN"]],
    "verify": [[f"{HERE}:balanced"]],
    "timeline": [["RUN"], [f"{HERE}:balanced"]],
    "capture": [[f"{HERE}:balanced", "-o", "NEW"]],
    "bisect": [[sys.executable, "-c", "raise SystemExit(0)"]],
    "generate": [["--prompt", "Hi", "--tokens", "2", "--codegen", "eager", "--chunk", "8"]],
}
SLOW = ("generate",)
CASES = [pytest.param(name, given, marks=[pytest.mark.slow] * (name in SLOW), id=f"{name} {given[0]}")
         for name, every in SHOWN.items() for given in every]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    save(run_of_balanced(), folder / "run")
    save(run_of_routed("triton"), folder / "routed")
    passes = save_passes(folder / "passes.json", runs())
    return {"RUN": f"{folder}/run", "ROUTED": f"{folder}/routed", "PASSES": str(passes), "NEW": f"{folder}/new"}


def test_every_command_is_tried() -> None:
    assert set(SHOWN) == set(COMMANDS) - {"completion", "bench"}  # which print what a shell reads, or as a case does


@pytest.mark.parametrize(("name", "given"), CASES)
def test_what_a_command_prints_fits(
    name: str, given: list[str], places: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, *(places.get(each, each) for each in given)]) in (0, 1, 2)
    out, err = capfd.readouterr()
    wide = [line for line in (*out.splitlines(), *err.splitlines()) if len(line.rstrip()) > WIDTH]
    assert (out or err) and wide == []
    assert "\x1b" not in out + err and "━" not in out + err


def parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_help_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for each in parsers(parser()):
        assert [line for line in each.format_help().splitlines() if len(line) > WIDTH] == [], each.prog


@pytest.mark.parametrize("given", [["insepct"], ["cost", "--tokns", "16"], ["kernels", "--arch", "sm_91"]])
def test_a_mistake_is_answered_in_lines_that_fit(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given)
    told = capsys.readouterr().err
    assert "the nearest is" in " ".join(told.split()) and max(map(len, told.splitlines())) <= WIDTH


words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1)


@given(st.lists(words).map(" ".join), st.integers(20, 120))
def test_no_word_of_a_line_is_lost(line: str, width: int) -> None:
    parts = fitted(line, width)
    assert all(len(part) <= width for part in parts)
    assert "".join("".join(parts).split()) == "".join(line.split())


def test_what_goes_on_stands_behind_its_label() -> None:
    assert fitted("refused  aaaa bbbbb", 18) == ["refused  aaaa", "         bbbbb"]
    assert fitted("  read by  aaaaaaaa bbb", 22) == ["  read by  aaaaaaaa", "           bbb"]
    assert fitted("  read by  a b", 12) == ["  read by  a", "  b"]  # a label of more than half the width is none
    assert fitted("a b c", 3) == ["a b", "  c"]


# ---- progress and interruption ---------------------------------------------------------------------------------------


def test_bars_are_shown_on_a_terminal_alone_and_go_again(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def work() -> str:
        with bars.progress() as shown:
            step = shown.begin("verify", 2)
            step("fold_sinkhorn")
            step("outline_mhc")
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert work() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "verify: outline_mhc" in work()


def test_a_step_with_a_name_ends_the_one_before() -> None:
    with bars.progress() as shown:
        named, bare = shown.begin("passes", 3), shown.begin("steps", 3)
        for name in ("a", "b", "c"):
            named(name)
            bare()
        done = [(task.description, task.completed) for task in shown.shown.tasks]
    assert done == [("passes: c", 2), ("steps", 3)]


INTERRUPTED = """
import os, signal, sys
from v41.tools import {module}
from v41.tools.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it starts in the background
real = {module}.{name}
def stop(*given, **named):
    os.kill(os.getpid(), signal.SIGINT)
    return real(*given, **named)
{module}.{name} = stop
sys.exit(main(sys.argv[1:]))
"""
STOPS = {  # what is under way -> the command, which writes to OUT
    "capture": ("capture_command", "save", ["capture", f"{HERE}:balanced", "-o", "OUT"]),
    "page": ("inspect_command", "page", ["inspect", "RUN", "--html", "OUT"]),
    "trace": ("timeline_command", "trace", ["timeline", f"{HERE}:balanced", "--trace", "OUT"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
def test_ctrl_c_leaves_nothing_half_written(stop: str, places: dict[str, str], tmp_path: Path) -> None:
    module, name, arguments = STOPS[stop]
    told = {**places, "OUT": str(tmp_path / "made")}
    code = INTERRUPTED.format(module=module, name=name)
    command = [sys.executable, "-c", code, *(told.get(each, each) for each in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n") and list(tmp_path.iterdir()) == []
