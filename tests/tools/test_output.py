"""What a command prints is the same facts wherever it goes: terminals of any width, closed pipes, other alphabets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.small_models import run_of_balanced
from tests.tools.test_width import SHOWN
from tests.tools.test_width import places as places
from v41.tools.cli import COMMANDS, main
from v41.tools.json_output import VERSIONS
from v41.tools.run_folder import save

QUICK = {name: every[0] for name, every in SHOWN.items() if set(every[0]) & {"RUN", "ROUTED", "PASSES"}}
LATER = {"capture", "verify", "bisect", "generate", "completion", "bench"}  # which take a model, or none


def test_every_command_that_reads_a_run_is_tried() -> None:
    assert QUICK.keys() == COMMANDS.keys() - LATER


@pytest.mark.parametrize("name", QUICK)
def test_no_figure_is_lost_in_a_narrow_or_wide_terminal(
    name: str, places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lines break differs, and nothing else; colours are off where NO_COLOR says so."""
    words = [name, *(places.get(each, each) for each in QUICK[name])]
    told = set()
    for columns in ("40", "100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("NO_COLOR", "1")
        assert main(words) == 0
        out, err = capsys.readouterr()
        told.add("".join(out.split()) if name != "memory" else "".join(out.split("▁")[0].split()))
        assert "\x1b" not in out + err
    assert len(told) == 1


@pytest.mark.parametrize("name", QUICK)
def test_json_is_all_that_stdout_has_and_says_its_schema(
    name: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *(places.get(each, each) for each in QUICK[name]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == f"v41.{name}.{VERSIONS[name]}"


READ_ON = """
import sys
from v41.tools.cli import main
code = main(sys.argv[1:])
print("code", code, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["partition"], ["inspect", "--json"], ["explain", "piece_1", "-m"]])
def test_a_pipe_that_closes_is_no_error(command: list[str], tmp_path: Path) -> None:
    """`| head` has seen enough, whoever writes: a table, print, or what is left at the end."""
    save(run_of_balanced(), tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", READ_ON, *command, str(tmp_path / "run")]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "code 0\n")


@pytest.mark.slow
def test_an_alphabet_that_lacks_a_letter_gets_its_number(tmp_path: Path) -> None:
    save(run_of_balanced(), tmp_path / "läufe")
    words = [sys.executable, "-c", READ_ON, "memory", str(tmp_path / "läufe")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "code 0\n") and "\\u25" in done.stdout
    words[-2:] = ["inspect", "mödel"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (2, "") and "there is no model 'm\\xf6del'" in done.stderr
