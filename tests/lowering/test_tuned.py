"""Tuned schedules: the fastest is kept for its bucket of rows, here and on disk; what is damaged is a miss with a
warning; processes that tune at once leave a whole file."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41 import backend
from v41.lowering import tuned
from v41.lowering.rowwise import GeneratedKernel, Unsupported, generate
from v41.lowering.rowwise.held.launch import Spread
from v41.lowering.tuned import Tuned, TunedWarning, bucket
from v41.runtime.executor import executor
from v41.tools.bench.rowwise_cases import cases

DEVICE = torch.device("cuda", 0)
SMALL = cases(20)


@dataclass
class Timed:
    """A kernel that takes as long as `us` says, and fails with schedules of no entry."""

    us: dict[Spread, float]
    name: str = "kernel"
    source: str = "text"
    launched: list[Spread] = field(default_factory=list)

    def candidates(self, rows: int, device: torch.device) -> list[Spread]:
        return [Spread(1, warps) for warps in (1, 2, 4)]

    def launch(self, *tensors: Any, schedule: Any = None) -> None:
        if schedule not in self.us:
            raise RuntimeError("out of resource: shared memory")
        self.launched.append(schedule)

    def measure(self, call: Any, sets: Any) -> float:
        call(*sets[0])
        return self.us[self.launched[-1]]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def tune(kernel: Timed, rows: int) -> Spread | None:
    return Tuned().tune(kernel, [torch.zeros(rows, 4)], rows, DEVICE, kernel.measure)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


FAST = Timed({Spread(1, 1): 3.0, Spread(1, 2): 2.0})  # with four warps it does not run


def test_the_fastest_is_kept_for_its_bucket_here_and_in_later_processes() -> None:
    with silent():
        assert tune(FAST, 5) == Spread(1, 2)
        for known in (Tuned(), Tuned()):  # a later process reads what the first wrote
            assert [known.schedule(FAST, [], rows, DEVICE) for rows in (5, 8, 4, 9, 0)] == [
                Spread(1, 2), Spread(1, 2), None, None, None,
            ]  # fmt: skip


def test_a_second_bucket_joins_the_first() -> None:
    tune(FAST, 5)
    tune(replace(FAST, us={Spread(1, 4): 1.0}), 64)
    found = Tuned()
    assert [found.schedule(FAST, [], rows, DEVICE) for rows in (8, 64)] == [Spread(1, 2), Spread(1, 4)]
    assert json.loads(tuned.file_of(FAST, DEVICE).read_text().partition("\n")[2])["8"]["us"] == 2.0


def test_tuning_happens_under_tuning_alone_once_a_bucket_and_never_in_a_capture(monkeypatch: Any) -> None:
    monkeypatch.setattr(tuned, "_measure", FAST.measure)
    known, given = Tuned(), [torch.zeros(5, 4)]
    assert known.schedule(FAST, given, 5, DEVICE) is None
    with tuned.tuning():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert known.schedule(FAST, given, 5, DEVICE) is None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert known.schedule(FAST, given, 5, DEVICE) == Spread(1, 2)
        before = len(FAST.launched)
        assert known.schedule(FAST, given, 7, DEVICE) == Spread(1, 2) and len(FAST.launched) == before
        assert known.schedule(FAST, [], 5, torch.device("cpu")) is None
    assert known.schedule(FAST, given, 5, DEVICE) == Spread(1, 2)


def test_a_program_compiled_to_tune_does_so_whenever_it_runs(monkeypatch: Any) -> None:
    seen: list[bool] = []

    def watched(*given: Any) -> Any:
        run = executor(*given)

        def watching(inputs: list[Any]) -> Any:
            seen.append(tuned.TUNING.get())
            return run(inputs)

        watching._boxed_call = True  # type: ignore[attr-defined]
        return watching

    monkeypatch.setattr(backend, "executor", watched)
    for tune in (True, False):
        torch.compiler.reset()
        step = torch.compile(lambda x: x + 1, backend="v41", options={"tune": tune, "cache": False})
        with torch.no_grad():
            assert torch.equal(step(torch.zeros(3)), torch.ones(3))
    assert seen == [True, False] and not tuned.TUNING.get()


def test_where_no_candidate_runs_that_is_said() -> None:
    with pytest.warns(TunedWarning, match="kernel could not be tuned for 3 rows: no candidate ran"):
        assert tune(Timed({}), 3) is None


@pytest.mark.parametrize("differs", ["text", "device", "torch"])
def test_what_a_time_depends_on_names_the_file(differs: str, monkeypatch: Any) -> None:
    tune(FAST, 5)
    other = replace(FAST, source="another") if differs == "text" else FAST
    if differs == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    if differs == "torch":
        monkeypatch.setattr(torch, "__version__", "another")
    assert Tuned().schedule(other, [], 5, DEVICE) is None


def signed(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


DAMAGE = {
    "empty": lambda _: "",
    "cut": lambda text: text[:-10],
    "changed": lambda text: text.replace('"warps": 2', '"warps": 1'),
    "no JSON": lambda _: signed("{"),
    "a list": lambda _: signed("[1]"),
    "other fields": lambda _: signed('{"8": {"schedule": {"rows": 1}}}'),
    "other types": lambda text: signed(text.partition("\n")[2].replace('"split": false', '"split": 0')),
    "no number": lambda text: signed(text.partition("\n")[2].replace('"8"', '"eight"')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_with_a_warning_and_written_anew(damage: str) -> None:
    tune(FAST, 5)
    path = tuned.file_of(FAST, DEVICE)
    path.write_text(DAMAGE[damage](path.read_text()))
    with pytest.warns(TunedWarning, match=f"{path.name} is not used: "):
        assert Tuned().schedule(FAST, [], 5, DEVICE) is None
    with pytest.warns(TunedWarning, match=f"{path.name} is not used: "):
        tune(FAST, 5)
    with silent():
        assert Tuned().schedule(FAST, [], 5, DEVICE) == Spread(1, 2)


def test_nothing_is_kept_where_the_cache_is_off(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune(FAST, 5) == Spread(1, 2)
    assert Tuned().schedule(FAST, [], 5, DEVICE) is None and not list(tmp_path.rglob("*"))


def test_a_directory_that_cannot_be_written_is_a_warning(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "schedules").write_text("a file")
    with pytest.warns(TunedWarning, match="is not used: "):
        assert tune(FAST, 5) == Spread(1, 2)


def write_many(path: Path, start: int) -> None:
    kernel = Timed({Spread(1, 1): 1.0})
    for n in range(60):
        tuned.write(path, kernel, DEVICE, 1 << ((start + n) % 20), Spread(1, 1), 1.0)


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, start)) for start in (0, 10)]
    with silent():
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            assert all(each == Spread(1, 1) for each in tuned.read(path, FAST, DEVICE).values())
        for writer in writers:
            writer.join()
        assert [writer.exitcode for writer in writers] == [0, 0] and len(tuned.read(path, FAST, DEVICE)) >= 10


@given(st.integers(0, 1 << 20))
def test_a_bucket_is_the_next_power_of_two(rows: int) -> None:
    most = bucket(rows)
    assert most >= max(rows, 1) > most // 2 and most & (most - 1) == 0


def test_copies_lie_in_memory_as_the_tensors_do() -> None:
    given = (torch.arange(24.0).view(4, 6).t(), 7, torch.arange(10)[::2])
    first, *others = tuned.copies_of(given)
    assert first == given and len(others) == tuned.MOST_SETS - 1
    for copy in others:
        assert copy[1] == 7
        for ours, theirs in ((copy[0], given[0]), (copy[2], given[2])):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
            assert ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("name", SMALL)
def test_whole_rows_have_one_schedule_and_all_else_has_several_to_try(name: str) -> None:
    kernel = generate(SMALL[name].body(), name)
    assert not isinstance(kernel, Unsupported)
    for rows in (1, 3, 16, 64, 300, 4096):
        tried = kernel.candidates(rows, DEVICE)
        assert len(tried) == len(set(tried)) != 1
        assert all(type(kernel.schedule_for(rows, DEVICE)) is type(each) for each in tried)
        assert bool(tried) is (name == "router" or isinstance(kernel, GeneratedKernel))


def test_a_kernel_without_candidates_is_never_tuned(monkeypatch: Any) -> None:
    monkeypatch.setattr(tuned, "_measure", FAST.measure)
    alone = replace(FAST)
    alone.candidates = lambda rows, device: []  # type: ignore[method-assign]
    with tuned.tuning(), silent():
        assert Tuned().schedule(alone, [torch.zeros(5, 4)], 5, DEVICE) is None
