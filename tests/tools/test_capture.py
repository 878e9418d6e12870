"""A captured run is kept whole or not at all, and read back as it was; every name of a model is found or explained."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tools.small_models import balanced, run_of_balanced
from v41.errors import RunNotWritten, RunUnreadable
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.plan import Plan
from v41.tools import files, run_folder, sources
from v41.tools.cli import main
from v41.tools.inspect import PHASES, capture, capture_call, first_layers
from v41.tools.run import Run, run_of
from v41.tools.run_folder import MAIN, load, run_values, save

HERE = "tests.tools.small_models"
PARTS = ("nodes", "work", "kernels", "changes", "predicted")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(run_of_balanced(), tmp_path / "run")
    return tmp_path / "run"


def check_same(again: Run, run: Run) -> None:
    assert run_values(again) == run_values(run)
    assert again.plan.to_json() == run.plan.to_json() and again.config == run.config
    assert [getattr(again, part) for part in PARTS] == [getattr(run, part) for part in PARTS]
    assert again.by_config == run.by_config and again.layer_of == run.layer_of


def test_a_run_is_read_as_it_was_saved(folder: Path) -> None:
    check_same(load(folder), run_of_balanced())
    save(load(folder), folder.with_name("again"))
    for path in folder.iterdir():
        assert path.read_text() == (folder.with_name("again") / path.name).read_text()


@pytest.mark.slow
def test_a_run_of_the_model_is_read_as_it_was_saved(tmp_path: Path) -> None:
    config = first_layers(V41Config.preset("tiny"), 2)
    run = run_of(capture(lambda: V41ForCausalLM(config), "triton"), "preset tiny, 2 layers")
    save(run, tmp_path / "run")
    again = load(tmp_path / "run")
    check_same(again, run)
    assert again.config == config and again.changes is None
    kinds = [region.attrs for view in again.layers for region in view.regions]
    assert kinds == [region.attrs for view in run.layers for region in view.regions]
    assert any(kernel.launches for kernel in again.kernels)


def test_the_command_keeps_a_model_of_ones_own_and_all_others_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "new" / "run"
    assert main(["capture", f"{HERE}:balanced", "-o", str(kept)]) == 0
    assert capsys.readouterr().out.startswith(f"captured {HERE}:balanced: 2 pieces, 2 artifacts, 2 regions, 0 kernels")
    assert sorted(kept.parent.iterdir()) == [kept]
    for command in (["inspect", str(kept)], ["passes", "--run", str(kept)], ["diff", "fold_sinkhorn", "-m", str(kept)]):
        assert main(command) == 0
        assert "fold_sinkhorn" in capsys.readouterr().out
    assert main(["inspect", str(kept), "--json", "--changes"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "v41.inspect.1" and Plan.from_json(json.dumps(told["plan"])).pieces
    changed = [each["name"] for each in told["graph"]["passes"] if each["changes"]]
    assert "fold_sinkhorn" in changed and told["regions"]["by_config"] is None
    assert main(["inspect", str(kept), "--against", str(kept)]) == 0
    assert capsys.readouterr().out == "nothing differs\n"


def test_strictly_a_refusal_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["capture", f"{HERE}:unbalanced", "-o", str(tmp_path / "run")]
    assert [main(command), main([*command, "--strict"])] == [0, 1]
    assert [main(["inspect", command[-1]]), main(["inspect", command[-1], "--strict"])] == [0, 1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize(("at", "call"), [("write", 2), ("move", 1), ("move", 2), ("move", 3)])
def test_what_is_broken_off_leaves_the_folder_as_it_was(
    stop: Any, at: str, call: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_text() for path in folder.iterdir()}
    (kind, name), calls = {"write": (Path, "write_text"), "move": (Path, "rename")}[at], list[Path]()
    real = getattr(kind, name)

    def broken(path: Path, *given: Any) -> Any:
        calls.append(path)
        if len(calls) == call:
            raise stop
        return real(path, *given)

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, broken)
        with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else RunNotWritten):
            save(run_of_balanced(flawed=True), folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert sorted(folder.parent.iterdir()) == [folder]


def test_two_who_capture_into_one_folder_leave_a_whole_run_and_nothing_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another puts its run there, or takes the old one away, wherever this one is in putting its own there."""
    ours, theirs, real = run_of_balanced(flawed=True), run_of_balanced(), Path.rename
    for at in range(1, 4):
        for other in (lambda: save(theirs, folder), lambda: shutil.rmtree(folder, ignore_errors=True)):
            calls = list[Path]()

            def between(path: Path, target: Any, at: int = at, other: Any = other, calls: Any = calls) -> Any:
                calls.append(path)
                if len(calls) == at:
                    with monkeypatch.context() as alone:
                        alone.setattr(Path, "rename", real)
                        other()
                return real(path, target)

            with monkeypatch.context() as patched:
                patched.setattr(Path, "rename", between)
                save(ours, folder)
            assert load(folder).source == ours.source and load(folder).nodes == ours.nodes
            assert sorted(folder.parent.iterdir()) == [folder]


def test_a_run_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    save(run_of_balanced(), tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    save(run_of_balanced(flawed=True), tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink() and load(tmp_path / "run").nodes == run_of_balanced(flawed=True).nodes
    assert {path.name for path in tmp_path.iterdir()} == {"run", "latest"}


def test_a_file_is_written_whole_and_a_pipe_as_it_is(tmp_path: Path) -> None:
    name = "ä" * 120 + ".html"  # as long as a name may be
    files.write_whole(tmp_path / name, "ü")
    (tmp_path / "link").symlink_to(name)
    files.write_whole(tmp_path / "link", "é")
    assert (tmp_path / name).read_text(encoding="utf-8") == "é" and (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert {path.name for path in tmp_path.iterdir()} == {name, "link", "pipe"}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(RunNotWritten, match="holds no run"):
        save(run_of_balanced(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


FOR_EVER = "(" * 12 + "9" + "**8)" * 12


def with_a_piece(facts: dict[str, Any]) -> dict[str, Any]:
    """The first piece of the first layer that has one."""
    found: dict[str, Any] = next(each["pieces"][0] for each in facts["layers"] if each["pieces"])
    return found


def pieces_in(facts: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = facts["plan"]["pieces"]
    return found


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another schema": (MAIN, lambda facts: facts.update(schema="v41.run.0")),
    "no schema": ("nodes.json", lambda facts: facts.pop("schema")),
    "no graph": (MAIN, lambda facts: facts.pop("graph")),
    "a layer of a piece that is not there": (MAIN, lambda facts: with_a_piece(facts).update(name="x")),
    "no config, of which it says that it is there": (MAIN, lambda facts: facts["files"].append("config.json")),
    "a number that is a text": ("plan.json", lambda facts: pieces_in(facts)[0].update(nodes="4")),
    "a piece that reads what nobody makes": ("plan.json", lambda facts: pieces_in(facts)[1]["reads"].append("x")),
    "a formula that takes for ever": ("work.json", lambda facts: facts["work"][0].update(read=FOR_EVER)),
    "a formula that is none": ("work.json", lambda facts: facts["work"][0].update(read="__import__('os')")),
    "bytes of nobody": ("plan.json", lambda facts: next(iter(facts["plan"]["buffers"].values())).update(bytes="a b")),
    "nodes of another run": ("nodes.json", lambda facts: facts.update(run="0" * 16)),
    "a node of a piece that is not there": ("nodes.json", lambda facts: facts["nodes"][0].update(piece="piece_99")),
    "a time that is missing": ("streams.json", lambda facts: facts["times"].clear()),
    "no pass": (MAIN, lambda facts: facts["graph"]["passes"].clear()),
    "a plan of something else": ("plan.json", lambda facts: facts.update(plan=[])),
    "a line that is not there": ("nodes.json", lambda facts: facts["nodes"][0].update(source=10**6)),
    "work without a kind": ("work.json", lambda facts: facts["work"][0].pop("kind")),
    "a kernel that is a number": ("kernels.json", lambda facts: facts.update(kernels=[3])),
    "changes that are none": ("changes.json", lambda facts: facts.update(changes=[])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_refused_with_its_file(damage: str, folder: Path) -> None:
    name, change = DAMAGES[damage]
    facts = json.loads((folder / name).read_text())
    change(facts)
    (folder / name).write_text(json.dumps(facts))
    with pytest.raises(RunUnreadable) as refusal:
        run = load(folder)
        assert [getattr(run, part) for part in PARTS]
    assert str(folder / name) in str(refusal.value) and "v41 capture" in str(refusal.value)


def test_an_attribute_that_python_cannot_read_is_a_text() -> None:
    assert run_folder.literal("[" * 99_999) == "[" * 99_999 and run_folder.literal("-" * 99_999 + "1")
    assert run_folder.literal("(1, 'a')") == (1, "a")


@pytest.mark.parametrize("name", ["plan.json", "nodes.json", MAIN])
@pytest.mark.parametrize("text", [None, "", "[]", "3", "null", "[" * 200_000], ids=["half", *"abcd", "deep"])
def test_half_a_file_or_another_is_refused(text: str | None, name: str, folder: Path) -> None:
    (folder / name).write_text((folder / name).read_text()[:200] if text is None else text)
    with pytest.raises(RunUnreadable):
        assert load(folder).nodes


@pytest.mark.parametrize(
    ("model", "told"),
    [("flsh", "flash, the nearest"), ("no_such:function", "ModuleNotFoundError"), (f"{HERE}:balance", "AttributeError"),
     (f"{HERE}:no_pair", "it returned a Tensor"), (f"{HERE}:raises", 'no weights here at tools/small_models.py:'),
     (f"{HERE}:leaves", "SystemExit: 3 at tools/small_models.py:"), (f"{HERE}:odd", "Odd: no message at tools/small_"),
     (f"{HERE}:cut", "cannot trace the call as one graph"), (f"{HERE}:cut", "if x.sum().item() > 0 else x"),
     (f"{HERE}:misshapen", "return x @ torch.ones(WIDTH + 1, WIDTH)"), (f"{HERE}:misshapen", "[3, 8] X [9, 8]"),
     (f"{HERE}:misfed", "at tools/small_models.py:"), (f"{HERE}:misfed", "layer(x).unsqueeze(-2)"),
     (f"{HERE}:refuses", 'raise LookupError("no such expert")'), (f"{HERE}:refuses", "fails in this call: LookupError"),
     (f"{HERE}:too_few", "missing 1 required positional argument: 'x' at tools/small_models.py:"),
     (f"{HERE}:learns", "1 of 1 inputs require gradients"),
     ("tests.broken:f", "line 2) at tests/broken.py:2 x ="),
     ("x" * 5000, "there is no model"), ("\udcff", "there is no model")],
)  # fmt: skip
def test_what_is_no_model_is_explained(
    model: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own line, where it has one; nothing of torch's is logged beside it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "broken.py").write_text("y = 1\nx =\n")
    if model == "tests.broken:f":
        monkeypatch.setattr("tests.__path__", [str(tmp_path / "tests")])
    torch._dynamo.reset()
    assert main(["inspect", model]) == 2
    captured = capsys.readouterr()
    assert told in " ".join(captured.err.split()) and not captured.out and "Traceback" not in captured.err


def test_a_model_that_computes_nothing_is_a_program_without_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["partition", f"{HERE}:identity"]) == 0
    assert "0 pieces, 0 artifacts, 0 nodes" in capsys.readouterr().out
    x = torch.rand(3)
    with torch.no_grad():
        compiled = torch.compile(nn.Identity(), backend="v41", options={"codegen": "eager"})
        assert torch.equal(compiled(x), x)


def test_what_a_function_prints_is_not_among_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["partition", f"{HERE}:chatters", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "v41.partition.1" and "weights are made" in captured.err


def test_what_would_change_nothing_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that a saved run, or a function, cannot heed."""
    for arguments in (["passes", str(folder), "--layers", "2"], ["inspect", str(folder), "--codegen", "eager"],
                      ["cost", str(folder), "--ranks", "2"], ["partition", f"{HERE}:balanced", "--layers", "1"],
                      ["inspect", str(folder), "--of", "piece_0"], ["inspect", str(folder), "--changes"]):  # fmt: skip
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert "would change nothing here" in captured.err and not captured.out


def test_a_place_that_cannot_be_written_is_refused_before_the_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is called a file, and a folder a folder."""
    (tmp_path / "thesis.txt").write_text("three years")
    under = f"{tmp_path}/thesis.txt/made"

    def no_model(*given: object, **named: object) -> None:
        raise AssertionError("a model was captured")

    monkeypatch.setattr("v41.tools.capture_command.captured", no_model)  # first: importing it takes what sources has
    monkeypatch.setattr(sources, "captured", no_model)
    for command in (["inspect", "tiny", "--html", under], ["inspect", "tiny", "--dot", str(tmp_path)],
                    ["timeline", "tiny", "--trace", under]):  # fmt: skip
        assert main(command) == 2
        assert "the file cannot be written there" in capsys.readouterr().err
    for out in (under, str(tmp_path)):
        assert main(["capture", "tiny", "-o", out]) == 2
        assert "the run cannot be written there" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "three years"

    def read_only(*given: object, **named: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("v41.tools.files.tempfile.mkdtemp", read_only)  # to root, permissions say nothing of that
    for command in (["capture", "tiny", "-o", f"{tmp_path}/made"], ["inspect", "tiny", "--html", f"{tmp_path}/made"]):
        assert main(command) == 2
        assert f"nothing can be made in {tmp_path}: Read-only file system" in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_folder_is_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = V41Config.preset("tiny")
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    built: list[V41Config] = []
    monkeypatch.setattr(sources, "step_of", lambda build: built.append(build().config))
    model = sources.model_named(str(tmp_path), 2)
    model.make()
    assert built == [first_layers(config, 2)] and model.name == f"checkpoint {tmp_path.name}, 2 layers"


def test_a_preset_is_no_folder_of_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is called like a preset does not hide it, and is read where it is named as a folder."""
    shutil.copytree(folder, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert sources.model_named("tiny").name == "preset tiny"
    assert main(["partition", "tiny/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == load(folder).source
    monkeypatch.setattr(sources, "captured", lambda *given, **named: load(folder))
    for name, told in (("tiny", "captures the preset; the run that lies here is tiny/\n"), ("flash", "")):
        assert main(["partition", name, "--json"]) == 0
        assert capsys.readouterr().err == told


def test_every_file_says_its_schema(folder: Path) -> None:
    assert {json.loads(path.read_text())["schema"] for path in folder.iterdir()} == {run_folder.SCHEMA}


def test_a_capture_tells_its_phases_in_order() -> None:
    heard: list[str] = []
    torch._dynamo.reset()
    capture_call(balanced, told=heard.append)
    assert heard == [*PHASES]
