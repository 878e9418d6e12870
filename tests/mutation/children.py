"""children: tests run in forks of one process that has loaded torch, so that a mutant costs its tests alone.

The parent never imports the compiler or a test: each child does, with its one module mutated as it is loaded, so all
that is made at import (rules, tables, ops) is the mutant's too.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.guards import Mutant, mutated

OURS = ("v41", "tests")
PATIENCE = 12  # seconds of clock for one of processor, before a child is taken for hung


@dataclass
class Seen:
    """What one test did: seconds of processor, lines of each watched file that ran."""

    passed: bool = False
    seconds: float = 0.0
    lines: dict[str, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """told: "killed", "survived" or "timeout". by: the test that failed, or what else did."""

    told: str
    by: str


def watch(root: Path, args: Sequence[str], sources: Sequence[str], limit: int) -> tuple[dict[str, Seen], list[str]]:
    """Runs the tests that pytest finds by `args`: what each of them did, and what others' modules they loaded."""
    plugin = _Watch({str(root / "v41" / source): source for source in sources})

    def run() -> Any:
        _pytest(args, plugin)
        return plugin.seen, [name for name in sys.modules if name.split(".")[0] not in (*OURS, "__main__")]

    result = in_child(run, limit)
    return result if result is not None else ({}, [])


def try_mutant(root: Path, mutant: Mutant, tests: Sequence[str], limit: int) -> Outcome:
    """Runs `tests` in their order until one fails."""
    path = root / "v41" / mutant.file
    name = "v41." + mutant.file.removesuffix(".py").replace("/", ".")
    plugin = _Chosen(list(tests))

    def run() -> Any:
        sys.meta_path.insert(0, _Planted(name, path, mutant))
        code = _pytest(["-x", *dict.fromkeys(test.split("::")[0] for test in tests)], plugin)
        return int(code), plugin.failed

    result = in_child(run, limit)
    if result is None:
        return Outcome("timeout", f"{limit} s")
    code, failed = result
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Outcome("survived", "")
    return Outcome("killed", failed or "loading the tests")


def preload(modules: Sequence[str]) -> None:
    """Loads what tests load, once for all children."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # a module that only looks like one: it is loaded by who needs it
            continue


def in_child(run: Callable[[], Any], limit: int) -> Any:
    """What `run` returns in a fork of this process; None if it does not end in `limit` seconds of processor."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "result"
        child = multiprocessing.get_context("fork").Process(target=_limited, args=(run, limit, at))
        child.start()
        child.join(limit * PATIENCE)
        if child.is_alive():
            child.kill()
            child.join()
        return pickle.loads(at.read_bytes()) if at.exists() else None


def _limited(run: Callable[[], Any], limit: int, at: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    result = pickle.dumps(run())
    at.with_suffix(".part").write_bytes(result)
    at.with_suffix(".part").rename(at)


def _pytest(args: Sequence[str], plugin: object) -> int:
    return pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args], [plugin])


class _Quick:
    """Examples of hypothesis are not made small: that one fails is all that is asked."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = Phase.explicit, Phase.generate
        settings.register_profile("mutation", settings(), phases=phases, database=None, report_multiple_bugs=False)
        settings.load_profile("mutation")


class _Chosen(_Quick):
    """Runs the given tests in the given order."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: i for i, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class _Watch(_Quick):
    """Traces the lines of the watched files, a test at a time."""

    def __init__(self, watched: dict[str, str]) -> None:
        self.watched = watched
        self.seen: dict[str, Seen] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seen = self.seen[item.nodeid] = Seen()
        self.lines = seen.lines
        start = time.process_time()
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seen.seconds = time.process_time() - start

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seen[report.nodeid].passed = report.passed

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        name = self.watched.get(frame.f_code.co_filename)
        if name is None:
            return None
        lines = self.lines.setdefault(name, set())

        def local(frame: Any, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return local

        lines.add(frame.f_lineno)
        return local


class _Planted(SourceFileLoader):
    """Finds and loads the one module with the mutant in it."""

    def __init__(self, name: str, path: Path, mutant: Mutant) -> None:
        super().__init__(name, str(path))
        self.mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def get_code(self, name: str) -> Any:
        return compile(mutated(self.get_source(name) or "", self.mutant), self.path, "exec")
