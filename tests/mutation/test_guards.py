"""Every way to break a guard is tried, each mutant is another program, and what a child says of it is true."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.children import Outcome, Seen
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.guards import Mutant, mutants_of, mutated
from tests.mutation.score import ENOUGH, ROOT, Reach, drawn, merged, newly_survived, score_of, sources_of, table

SOURCE = '''
RULES: tuple[tuple[str, Rule[int]], ...] = (
    ("is even", is_odd),
    ("is small", lambda x: x if x > 9 else None),
    STAYS,
)

def judge(x, kinds, limit=3):
    """Not 1 < 2."""
    assert x is not None
    if not kinds or x > limit:
        return False
    kept = [kind for kind in kinds if kind.size == 4]
    match kept:
        case [first] if first.size:
            return any(each is first for each in kinds)
        case _:
            return len(kept) >= -1 if x else min(x, 7)

if TYPE_CHECKING:
    from typing import Any
'''
WANTED = [
    "rule 'is even' finds nobody",
    "rule 'is small' finds nobody",
    "rule STAYS finds nobody",
    "x if x > 9 else None  ->  x",
    "x if x > 9 else None  ->  None",
    "x > 9  ->  x >= 9",
    "x > 9  with 9 + 1",
    "not kinds or x > limit  ->  False",
    "not kinds or x > limit  ->  True",
    "not kinds or x > limit  ->  x > limit",
    "not kinds or x > limit  ->  not kinds",
    "not kinds  ->  kinds",
    "x > limit  ->  x >= limit",
    "False  ->  True",
    "kind.size == 4  ->  True",
    "kind.size == 4  ->  kind.size != 4",
    "kind.size == 4  with 4 + 1",
    "case [first] never matches",
    "case [first] without its guard",
    "any((each is first for each in kinds))  ->  all((each is first for each in kinds))",
    "each is first  ->  each is not first",
    "case _ never matches",
    "len(kept) >= -1 if x else min(x, 7)  ->  len(kept) >= -1",
    "len(kept) >= -1 if x else min(x, 7)  ->  min(x, 7)",
    "len(kept) >= -1  ->  len(kept) > -1",
    "len(kept) >= -1  with 1 + 1",
    "min(x, 7)  ->  max(x, 7)",
]


def test_all_that_decides_is_broken_and_nothing_else() -> None:
    assert [mutant.change for mutant in mutants_of("a.py", SOURCE)] == WANTED


@pytest.mark.parametrize("file", sources_of(ROOT, []))
def test_each_mutant_of_the_passes_is_another_program_of_a_name_of_its_own(file: str) -> None:
    source = (ROOT / file).read_text()
    mutants = mutants_of(file, source)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    plain = ast.dump(ast.parse(source))
    for mutant in mutants[:: len(mutants) // 2 or 1]:
        tree = mutated(source, mutant)
        assert ast.dump(tree) != plain
        compile(tree, file, "exec")


TOY = """
def is_far(x):
    while True:
        if x <= 3:
            return False
        if x == 5 and x is not None:
            return True
        x = x - 1
"""
TESTS = """
from v41.passes.toy import is_far

def test_far():
    assert is_far(7)

def test_near():
    assert not is_far(4)
"""
ASKED = """
import dataclasses, json, pathlib, sys
from tests.mutation.children import preload, try_mutant, watch
from tests.mutation.guards import mutants_of
root = pathlib.Path(sys.argv[1])
file = "passes/toy.py"
seen, modules = watch(root, ["test_toy.py"], [file], 30)
preload([name for name in modules if name != "test_toy"])  # else loading them is most of what a child may take
tests = ["test_toy.py::test_near", "test_toy.py::test_far"]
mutants = [m for m in mutants_of(file, (root / "v41" / file).read_text()) if m.kind == "if" or m.kind == "and"]
told = {m.change: try_mutant(root, m, tests, 5) for m in mutants}
print(json.dumps([{name: sorted(each.lines[file]) for name, each in seen.items() if each.passed}, "pytest" in modules,
                  {change: dataclasses.astuple(outcome) for change, outcome in told.items()}]))
"""


def test_children_tell_what_tests_reach_and_which_mutants_they_kill(tmp_path: Path) -> None:
    """In a tree of its own, since a child must not find the compiler loaded."""
    (tmp_path / "v41" / "passes").mkdir(parents=True)
    for package in "v41", "v41/passes":
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "v41" / "passes" / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TESTS)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n" + ASKED
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, told_of_modules, told = json.loads(done.stdout)
    assert lines == {"test_toy.py::test_far": [2, 3, 4, 6, 7, 8], "test_toy.py::test_near": [2, 3, 4, 5, 6, 8]}
    assert told_of_modules
    assert told == {
        "x <= 3  ->  False": ["timeout", "5 s"],
        "x <= 3  ->  True": ["killed", "test_toy.py::test_far"],
        "x == 5 and x is not None  ->  False": ["killed", "test_toy.py::test_far"],
        "x == 5 and x is not None  ->  True": ["killed", "test_toy.py::test_near"],
        "x == 5 and x is not None  ->  x == 5": ["survived", ""],
        "x == 5 and x is not None  ->  x is not None": ["killed", "test_toy.py::test_near"],
    }


def some() -> list[Mutant]:
    return mutants_of("passes/a.py", SOURCE)


def test_a_rule_is_tried_by_all_tests_of_its_file_and_others_as_long_as_that_takes() -> None:
    lines = {"passes/a.py": set(range(100))}
    names = ["tests/passes/test_b.py::x", *(f"tests/passes/test_a.py::{i}" for i in range(9))]
    reached = Reach({name: Seen(True, ENOUGH / 4 + i, lines) for i, name in enumerate(names)})
    for mutant in some():
        tried = reached.of(mutant)
        assert tried == names[1:] if mutant.kind == "rule" else len(tried) == 3 and set(tried) < set(names[1:])


def test_a_score_counts_and_names_survivors() -> None:
    killed = len(WANTED) - 3
    told = ["survived", "equivalent", "timeout", *["killed"] * killed]
    score = score_of([(mutant, Outcome(each, "")) for mutant, each in zip(some(), told, strict=True)], "all")
    assert (score["killed"], score["total"], score["equivalent"]) == (killed, killed + 2, 1)
    assert [each["at"] for each in score["survivors"]] == ["passes/a.py:3", "passes/a.py:5"]
    assert score["files"]["passes/a.py"] == {"drawn": "all", "total": len(WANTED)} | Counter(told)
    assert len(score["kills"]) == killed and newly_survived(score, score) == newly_survived(score, {}) == []
    assert newly_survived(score, {"kills": {score["survivors"][0]["key"]: "a test"}}) == score["survivors"][:1]
    assert table(score).splitlines()[-1].startswith(f"killed {killed} of {killed + 2} mutants")


def test_a_run_of_some_files_replaces_what_was_said_of_them() -> None:
    """Of a file that comes again nothing is left: neither survivors that are killed now, nor kills of what is gone."""
    first, second = (mutants_of(file, SOURCE) for file in ("passes/a.py", "passes/ab.py"))
    before = score_of([(each, Outcome("survived", "")) for each in first] + [(second[0], Outcome("killed", "x"))], "1")
    now = score_of([(first[0], Outcome("killed", "y")), (first[1], Outcome("survived", ""))], "2")
    both = merged(before, now)
    assert {file: row["drawn"] for file, row in both["files"].items()} == {"passes/a.py": "2", "passes/ab.py": "1"}
    assert both["kills"] == {second[0].key: "x", first[0].key: "y"} and both["survivors"] == now["survivors"]
    assert (both["killed"], both["total"]) == (2, 3)
    assert merged({}, now) == now == merged(now, now)


def test_what_is_told_to_be_equivalent_is_a_mutant() -> None:
    keys = {mutant.key for mutant in drawn(ROOT, sources_of(ROOT, []), 1.0)}
    assert [key for key in EQUIVALENT if key not in keys] == []


def test_rules_are_always_drawn_and_a_share_of_the_others() -> None:
    sources = sources_of(ROOT, ["outline_gate", "fold_sinkhorn"])
    every, some, none = (drawn(ROOT, sources, share) for share in (1.0, 0.2, 0.0))
    assert {mutant.kind for mutant in none} == {"rule"} and set(none) < set(some) < set(every)
    few = drawn(ROOT, sources, 1.0, 2)
    assert set(none) < set(few) and len(few) == len(none) + 2 * len(sources)
    assert 0.1 < (len(some) - len(none)) / (len(every) - len(none)) < 0.3
