"""Help teaches by examples that work, mistyped words are answered, shells complete what there is, Ctrl-C is quiet."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from v41.errors import UnknownPass
from v41.model_def.config import PRESETS
from v41.passes.pipeline import PIPELINE
from v41.report import PassRun
from v41.tools import cost_command
from v41.tools.cli import COMMANDS, main, parser
from v41.tools.completion import MODELS, SHELLS, commands, script
from v41.tools.nearest import choices, nearest
from v41.tools.parser import EXAMPLES
from v41.tools.pass_runs import pass_named

LINES = [(command, line) for command, lines in EXAMPLES.items() for line, _ in lines]


@pytest.mark.parametrize(("command", "line"), LINES)
def test_every_example_is_a_command_that_is_understood(command: str | None, line: str) -> None:
    words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"'))
    assert words[0] == "v41"
    found = parser().parse_args(words[1:])
    assert command in (None, found.command)


def test_every_command_says_what_it_does_in_its_help_and_has_an_example() -> None:
    assert EXAMPLES.keys() - {None} == COMMANDS.keys()
    for command in COMMANDS:
        assert parser().of(command).description, command
        helped = parser().of(command).format_help()
        assert all(line in helped and what in helped for line, what in EXAMPLES[command])
    assert all(line in parser().format_help() for line, _ in EXAMPLES[None])


def test_what_cannot_read_a_saved_run_does_not_offer_it() -> None:
    helped = {command: " ".join(parser().of(command).format_help().split()) for command in COMMANDS}
    offered = {command for command, told in helped.items() if "a folder that v41 capture wrote" in told}
    assert {"inspect", "passes", "diff"} <= offered and not {"verify", "generate", "capture"} & offered


@pytest.mark.parametrize(
    ("typed", "told"),
    [(["insepct"], "the nearest is inspect"), (["cost", "--tokns", "3"], "the nearest is --tokens"),
     (["kernels", "--arch", "sm90"], "the nearest is sm_90"), (["bench", "rowise"], "the nearest is rowwise"),
     (["completion", "csh"], "invalid choice"), (["cost", "--tokens", "0"], "0 is not a whole number"),
     (["cost", "--size", "rows"], "rows is not NAME=NUMBER")],
)  # fmt: skip
def test_a_mistyped_word_is_answered_with_the_nearest(
    typed: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(typed)
    captured = capsys.readouterr()
    assert left.value.code == 2 and told in captured.err and not captured.out


def test_the_nearest_of_names() -> None:
    assert nearest("Outline_MHC", ["outline_mhc", "outline_gate"]) == "outline_mhc"
    assert nearest("zebra", ["outline_mhc"]) is None
    told = "outline_mhc, the nearest; all: canonicalize, outline_mhc"
    assert choices("outline_mch", ["canonicalize", "outline_mhc", "canonicalize"]) == told  # each name once
    many = [f"view_{i}" for i in range(500)]
    told = choices("view_48x", many)  # of many names those like it
    assert told.startswith("view_48, the nearest; like it: ") and "view_489" in told and told.endswith("and 492 more")
    assert choices("zebra", many) == f"{', '.join(many[:8])} and 492 more"
    with pytest.raises(UnknownPass, match="fold_sinkhorn, the nearest"):
        pass_named([PassRun(each.name, [], 0, 0, 0.0) for each in PIPELINE], "fold_sinkhron")


def test_the_model_is_named_by_position_or_by_option() -> None:
    for option in ([], ["-m"], ["--model"], ["--preset"], ["--run"]):
        assert parser().parse_args(["cost", *option, "flash"]).model == "flash"
    assert parser().parse_args(["cost"]).model == "tiny"
    for words in (["outline_mhc", "view_1", "-m", "run"], ["outline_mhc", "-m", "run", "view_1"]):
        found = parser().parse_args(["why-not", *words])
        assert (found.name, found.site, found.model) == ("outline_mhc", "view_1", "run")


def test_what_is_asked_for_twice_is_told_once() -> None:
    assert parser().parse_args(["cost", "--tokens", "16,1,16"]).tokens == [16, 1]


def test_ctrl_c_is_one_word_and_a_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cost_command, "cost_command", stop)
    assert main(["cost", "tiny"]) == 130
    assert capsys.readouterr() == ("", "stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_and_a_closed_output_are_no_crash() -> None:
    """What takes long is not needed to see it: nothing heavy is imported for the completion of a shell."""
    command = f"{sys.executable} -m v41.tools.cli completion bash"
    full = subprocess.run(["bash", "-c", f"{command} > /dev/full"], cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 2 and full.stderr.startswith("what is printed cannot be written: No space left")
    assert "Traceback" not in full.stderr and "Exception ignored" not in full.stderr
    closed = subprocess.run(["bash", "-c", f"{command} >&-"], cwd=ROOT, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_completion_knows_every_command_and_option() -> None:
    found = commands(parser())
    assert found[()].keys() >= {*COMMANDS, "bench", "--help"}
    assert found["cost",].keys() >= {"--tokens", "--gpu", "--json", "-m"}
    assert found["bench", "rowwise"].keys() >= {"--cases", "check", "tune"}
    assert {*MODELS} == {*PRESETS}
    for shell in SHELLS:
        text = script(parser(), shell)
        assert all(command in text for command in COMMANDS)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("v41 ex", "explain"), ("v41 bench row", "rowwise"), ("v41 bench compile --la", "--layers"),
     ("v41 kernels run/ --arch sm_9", "sm_90"), ("v41 inspect bench --ht", "--html"), ("v41 bench --ht", None)],
)  # fmt: skip
def test_fish_completes(typed: str, offered: str | None, tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(script(parser(), "fish"))
    ask = ["fish", "-c", f"source completion; complete -C '{typed}'"]
    done = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True)
    found = [line.split("\t")[0] for line in done.stdout.splitlines() if not line.startswith("completion")]
    assert (found, done.stderr) == ([offered] if offered is not None else [], "")


def test_fish_is_told_of_every_case_with_its_words_as_they_are() -> None:
    text = script(parser(), "fish")
    assert """test "$typed[2]" = bench; and test "$typed[3]" = compile' -l layers""" in text
    assert "a node\\'s way from its line" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("v41 ex", ["explain"]), ("v41 cost --to", ["--tokens"]), ("v41 bench row", ["rowwise"]),
     ("v41 bench rowwise --c", ["--cases", "--contenders"]), ("v41 completion f", ["fish"]),
     ("v41 kernels run/ --arch sm_9", ["sm_90"]), ("v41 inspect fl", ["flash"]), ("v41 cost -m t", ["tiny"]),
     ("v41 capture flash --all-reduce f", ["fused"]), ("v41 inspect run/ --html -", [])],
)  # fmt: skip
def test_bash_completes(typed: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(script(parser(), "bash"))
    words = typed.split()
    ask = f'source completion; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _v41; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")
