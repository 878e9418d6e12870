"""What a bench found is a file, or with --json all that stdout has; what cannot be done is refused before long work."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import sorts, timing
from v41.tools.cli import main

FACTS = {"schema": "v41.bench.1", "case": "sorts", "rows": [2]}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that finds fault, without a GPU: it and a child of it print."""

    def bench(arguments: Namespace) -> int:
        print("a line", flush=True)
        os.system("echo a child")
        timing.save({"case": "sorts", "rows": arguments.rows}, arguments.out)
        return 1

    monkeypatch.setattr(sorts, "bench_command", bench)


def test_json_is_all_that_stdout_has(measured: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sorts", "--rows", "2", "--json"]) == 1
    out, err = capfd.readouterr()
    assert (json.loads(out), err) == (FACTS, "a line\na child\n")


def test_without_it_lines_are_printed_and_a_file_is_kept(
    measured: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "found.json"
    assert main(["bench", "sorts", "--rows", "2", "--out", str(file)]) == 1
    assert capfd.readouterr() == ("a line\na child\n", "") and json.loads(file.read_text()) == FACTS


def test_a_file_that_cannot_be_written_is_refused_first(
    measured: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "sorts", "--out", str(tmp_path / "file" / "found.json")]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("the file cannot be written there")


@pytest.mark.parametrize("case", ["alone", "overlap", "program"])
@pytest.mark.parametrize(
    ("more", "told"), [(["--rows", "257"], "no decode step has 257 rows"), (["--context", "1025"], "has 1025 tokens")]
)
def test_what_no_decode_step_has_is_refused_before_weights_are_drawn(
    case: str, more: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"v41.tools.bench.{case}.model_of")
    assert main(["bench", case, "--preset", "tiny", "--device", "cpu", "--json", *more]) == 2
    out, err = capsys.readouterr()
    assert not out and told in err and f"v41 bench {case} {more[0]}" in err


@pytest.mark.parametrize("command", [["bench", "overlap", "--preset", "tiny", "--device", "cpu", "--context", "64"],
                                     ["timeline", "tiny", "--measure"]])  # fmt: skip
def test_a_model_that_memory_does_not_hold_is_refused_before_it_is_drawn(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("v41.tools.drawn_model.memory_of_host", lambda: 2**20)
    monkeypatch.delattr(V41ForCausalLM, "random")
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert not out and "this machine has 0.0 GiB of memory" in err and f"v41 {command[0]}" in err
