"""A run in which anything was changed by anybody is read as it is, or refused with its file: no command ever raises."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.small_models import run_of_balanced, run_of_routed
from v41.tools.cli import main
from v41.tools.run_folder import save

RUNS = {"balanced": run_of_balanced, "routed": lambda: run_of_routed("triton")}
COMMANDS = (  # all that read a run, RUN being its place
    "inspect RUN", "inspect RUN --json --changes", "inspect RUN --against RUN", "inspect RUN --html PAGE",
    "inspect RUN --dot PAGE", "inspect RUN --model-explorer PAGE", "cost RUN", "memory RUN --all", "partition RUN",
    "passes RUN", "kernels RUN", "kernels RUN --json", "timeline RUN", "timeline RUN --trace PAGE",
    "explain piece_1 -m RUN", "explain x -m RUN", "explain no_such -m RUN", "explain LINE -m RUN",
    "why-not outline_mhc -m RUN", "why-not fold_sinkhorn -m RUN", "diff canonicalize -m RUN", "verify RUN",
)  # fmt: skip
STRANGE: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 3, 10**30, 0.5, float("nan"), "", "x", "u0", "piece_0", [], ["x"], [[]], {}, {"x": 1}]
)
LOST = object()  # what is taken away


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("damaged") / name for name in RUNS}
    for name, run in RUNS.items():
        save(run(), made[name])
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Where anything stands in a file."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def change(facts: Any, path: tuple[Any, ...], strange: Any) -> None:
    for key in path[:-1]:
        facts = facts[key]
    if strange is LOST:
        del facts[path[-1]]
    else:
        facts[path[-1]] = strange


def answer(command: str, folder: Path) -> tuple[int, str]:
    """The exit code, and what is told on stderr."""
    line = next(node.source for node in run_of_balanced().nodes).partition("  ")[0]
    told = {"RUN": str(folder), "PAGE": str(folder.parent / "page"), "LINE": line}
    words = [told.get(word, word) for word in command.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        return main(words), err.getvalue()


@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e999"])
def test_times_that_are_no_numbers_are_refused(number: str, tmp_path: Path) -> None:
    save(run_of_balanced(), tmp_path / "run")
    for file in (tmp_path / "run").glob("*.json"):
        file.write_text(re.sub(r'("milliseconds": )[0-9.e+-]+', rf"\g<1>{number}", file.read_text()))
    for command in ("inspect RUN", "passes RUN --json"):
        code, told = answer(command, tmp_path / "run")
        assert code == 2 and "run" in told and "fix" in told


@pytest.mark.parametrize("name", RUNS)
@given(data=st.data())
def test_whatever_stands_in_a_run_no_command_raises(name: str, folders: dict[str, Path], data: st.DataObject) -> None:
    folder = folders[name]
    path = data.draw(st.sampled_from(sorted(folder.iterdir())), "file")
    text = path.read_text()
    facts = json.loads(text)
    where = list(places(facts))
    by_depth = sorted({len(each) for each in where})  # so that what is rare and shallow is drawn as often
    depth = data.draw(st.sampled_from(by_depth), "depth")
    place = data.draw(st.sampled_from([each for each in where if len(each) == depth]), "place")
    change(facts, place, data.draw(STRANGE | st.just(LOST), "instead"))
    commands = data.draw(st.lists(st.sampled_from(COMMANDS), min_size=4, max_size=4, unique=True), "commands")
    path.write_text(json.dumps(facts))
    try:
        for command in commands:
            code, told = answer(command, folder)
            assert code in (0, 1, 2), command
            assert code != 2 or "\n  fix  " in told, (command, told)
    finally:
        path.write_text(text)


def test_the_run_as_it_is_is_read_by_every_command(folders: dict[str, Path]) -> None:
    refused = {command for command in COMMANDS if answer(command, folders["balanced"])[0] == 2}
    assert refused == {"explain no_such -m RUN", "verify RUN"}
