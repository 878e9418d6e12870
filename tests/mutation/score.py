"""score: which tests see which mutants, and the file that says how many were killed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.mutation.children import Outcome, Seen, preload, try_mutant, watch
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.guards import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
SCORE = Path(__file__).with_name("score.json")
TESTS = "tests/passes"
ENOUGH = 40.0  # seconds of processor: what a mutant has survived that outlived that much of the tests that reach it
COUNTED = ("total", "equivalent", "killed")
FILE_LIMIT = 1200  # for one file of tests, watched


@dataclass(frozen=True)
class Reach:
    """What each test reaches, of those that pass."""

    tests: dict[str, Seen]

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that run what the mutant changes: first those of the file of its name, the quickest first. Of a
        rule all of these: each has a flaw of its own there."""
        own = f"{TESTS}/test_{Path(mutant.file).stem}.py"
        first, last = mutant.lines
        changed = set(range(first, last + 1))
        reached = {name: seen for name, seen in self.tests.items() if mutant.file in seen.lines}
        if mutant.function:
            reached = {name: seen for name, seen in reached.items() if changed & seen.lines[mutant.file]}
        found, spent = [], 0.0
        for name in sorted(reached, key=lambda name: (not name.startswith(own), reached[name].seconds)):
            spent += reached[name].seconds
            if found and spent > ENOUGH and not (mutant.kind == "rule" and name.startswith(own)):
                break
            found.append(name)
        return found

    def limit(self, tests: Sequence[str]) -> int:
        """Seconds of processor for a mutant: loading, and three times what its tests take."""
        return 30 + int(3 * sum(self.tests[name].seconds for name in tests))


def reach(root: Path, sources: Sequence[str], words: Sequence[str] = (), *, quick: bool = False) -> Reach:
    """Runs every test of passes once, slow ones too unless `quick`; of files with one of `words` in their name, if any
    are given."""
    found: dict[str, Seen] = {}
    for file in sorted((root / TESTS).glob("test_*.py")):
        if words and not any(word in file.name for word in words):
            continue
        chosen = [str(file.relative_to(root)), *(["-m", "not slow"] if quick else [])]
        seen, modules = watch(root, chosen, sources, FILE_LIMIT)
        preload(modules)
        found |= {name: each for name, each in seen.items() if each.passed}
    return Reach(found)


def sources_of(root: Path, only: Sequence[str]) -> list[str]:
    """Files of passes and of their analyses whose name has one of `only` in it; all of them where it is empty."""
    files = sorted(path.relative_to(root).as_posix() for path in (root / "passes").rglob("*.py"))
    return [file for file in files if not only or any(word in file for word in only)]


def drawn(root: Path, sources: Sequence[str], share: float, most: int | None = None) -> list[Mutant]:
    """All rules, and of the other mutants that share which the hash of their key says, at most so many of a file."""
    found = []
    for file in sources:
        every = mutants_of(file, (root / file).read_text())
        by_hash = sorted((mutant for mutant in every if mutant.kind != "rule"), key=lambda each: _fraction(each.key))
        chosen = {mutant for mutant in by_hash[:most] if _fraction(mutant.key) < share}
        found += [mutant for mutant in every if mutant.kind == "rule" or mutant in chosen]
    return found


def _fraction(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32


def run(root: Path, mutants: Sequence[Mutant], reached: Reach) -> Iterator[tuple[Mutant, Outcome]]:
    """Tries each mutant that is not known to be equivalent."""
    for mutant in mutants:
        tests = reached.of(mutant)
        if mutant.key in EQUIVALENT:
            yield mutant, Outcome("equivalent", EQUIVALENT[mutant.key])
        elif not tests:
            yield mutant, Outcome("survived", "no test reaches it")
        else:
            yield mutant, try_mutant(root, mutant, tests, reached.limit(tests))


def score_of(results: Sequence[tuple[Mutant, Outcome]], how: str) -> dict[str, Any]:
    """What score.json holds. A mutant whose tests ran out of time is not counted as killed. how: they were drawn."""
    files: dict[str, Counter[str]] = {}
    for mutant, outcome in results:
        files.setdefault(mutant.file, Counter())[outcome.told] += 1
    rows = {file: {"drawn": how, "total": told.total(), **dict(sorted(told.items()))} for file, told in files.items()}
    survivors = [
        {"at": f"{mutant.file}:{mutant.line}", "key": mutant.key, "told": outcome.told}
        for mutant, outcome in results
        if outcome.told in ("survived", "timeout")
    ]
    kills = {mutant.key: outcome.by for mutant, outcome in results if outcome.told == "killed"}
    return summed({"files": rows, "survivors": survivors, "kills": kills})


def summed(parts: dict[str, Any]) -> dict[str, Any]:
    """A score of these files, survivors and kills."""
    rows = dict(sorted(parts["files"].items()))
    total, equivalent, killed = (sum(row.get(name, 0) for row in rows.values()) for name in COUNTED)
    return {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "hypothesis")}},
        "killed": killed,
        "total": total - equivalent,
        "equivalent": equivalent,
        **parts,
        "files": rows,
    }


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`before` with what `now` says of the files that it is about, in place of what was said of them."""
    again = tuple(f"{file} " for file in now["files"])
    kept = {key: by for key, by in before.get("kills", {}).items() if not key.startswith(again)}
    left = [each for each in before.get("survivors", []) if not each["key"].startswith(again)]
    return summed(
        {
            "files": before.get("files", {}) | now["files"],
            "survivors": left + now["survivors"],
            "kills": kept | now["kills"],
        }
    )


def table(score: dict[str, Any]) -> str:
    """The score for people."""
    names = "killed", "timeout", "survived", "equivalent", "total"
    lines = [f"{'':<40}" + "".join(f"{name:>11}" for name in names)]
    for file, row in score["files"].items():
        lines.append(f"{file:<40}" + "".join(f"{row.get(name, '-'):>11}" for name in names))
    lines.append(f"killed {score['killed']} of {score['total']} mutants")
    return "\n".join(lines)


def newly_survived(score: dict[str, Any], before: dict[str, Any]) -> list[dict[str, str]]:
    """Survivors that an earlier score saw killed."""
    return [each for each in score["survivors"] if each["key"] in before.get("kills", {})]


def load(path: Path = SCORE) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
