"""Gains of sites on disk: what was measured here is known to later compiles, by rows, codegen, device and sources; what
is damaged or of elsewhere is a miss."""

from __future__ import annotations

import errno
import itertools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from v41 import gains
from v41.gains import digest_of, file_of, gained_on, ignored, keep
from v41.lowering import kept
from v41.lowering.kept import TunedWarning, checksum

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    return tmp_path


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def known(site: str, rows: int, codegen: str = "triton", device: torch.device = CPU) -> float | None:
    return gained_on(device, codegen)(site, rows)


def test_what_is_kept_is_known_for_its_bucket_of_rows() -> None:
    with silent():
        assert known("a", 16) is None
        keep(CPU, "triton", 12, {"a": 3.14159, "b": -0.5})
        assert [known("a", rows) for rows in (8, 9, 12, 16, 17)] == [None, 3.142, 3.142, 3.142, None]
        assert known("b", 16) == -0.5 and known("c", 16) is None and known("a", 16, codegen="inductor") is None


def test_what_is_measured_later_is_added_or_takes_the_place_of_what_was() -> None:
    with silent():
        keep(CPU, "triton", 16, {"a": 3.0, "b": 1.0})
        keep(CPU, "triton", 1, {"a": 2.0})
        keep(CPU, "eager", 16, {"a": 9.0})
        keep(CPU, "triton", 16, {"a": -1.0})
        assert [known("a", 1), known("a", 16), known("b", 16)] == [2.0, -1.0, 1.0]


@pytest.mark.parametrize("differs", ["device", "torch", "sources"])
def test_of_another_device_version_or_compiler_nothing_is_known(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(CPU, "triton", 16, {"a": 3.0})
    if differs == "device":
        monkeypatch.setattr(gains, "device_facts", lambda device: {"type": "cuda 13.0", "name": "another"})
    if differs == "torch":
        monkeypatch.setattr(torch, "__version__", "another")
    if differs == "sources":
        monkeypatch.setattr(gains, "SOURCES", {"passes/assign_streams.py": "another"})
    with silent():
        assert known("a", 16) is None
        keep(CPU, "triton", 16, {"a": -3.0})
        assert known("a", 16) == -3.0
    monkeypatch.undo()


def signed(held: Any) -> str:
    rest = held if isinstance(held, str) else json.dumps(held)
    return f"{checksum(rest)}\n{rest}"


DAMAGE = {
    "empty": "",
    "no checksum": json.dumps({"triton a": {"16": 3.0}}),
    "another checksum": signed({"triton a": {"16": 3.0}}).replace("3.0", "9.0"),
    "no JSON": signed("{"),
    "a list": signed([1]),
    "no buckets": signed({"triton a": 3.0}),
    "no bucket": signed({"triton a": {"17": 3.0}}),
    "no rows": signed({"triton a": {"0": 3.0}}),
    "a word for rows": signed({"triton a": {"many": 3.0}}),
    "a word for µs": signed({"triton a": {"16": "3.0"}}),
    "no number": signed('{"triton a": {"16": NaN}}'),
    "no end": signed('{"triton a": {"16": Infinity}}'),
    "no µs": signed({"triton a": {"16": None}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_with_a_warning_and_written_anew(damage: str) -> None:
    keep(CPU, "triton", 16, {"a": 3.0})
    path = file_of(CPU)
    path.write_text(DAMAGE[damage])
    with pytest.warns(TunedWarning, match=f"{path.name} is not used: "):
        assert known("a", 16) is None
    with pytest.warns(TunedWarning, match=f"{path.name} is not used: "):
        keep(CPU, "triton", 8, {"a": 2.0})
    with silent():
        assert [known("a", 8), known("a", 16)] == [2.0, None]


def test_nothing_is_kept_where_the_cache_is_off(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with silent():
        keep(CPU, "triton", 16, {"a": 3.0})
        assert known("a", 16) is None and not list(folder.rglob("*"))


def test_without_a_home_nothing_is_kept_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("V41_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kept.Path, "home", homeless)
    with pytest.warns(TunedWarning, match="no home directory"):
        keep(CPU, "triton", 16, {"a": 3.0})
    with pytest.warns(TunedWarning, match="no home directory"):
        assert known("a", 16) is None


def test_what_is_ignored_is_there_afterwards() -> None:
    before = digest_of(CPU)
    keep(CPU, "triton", 16, {"a": 3.0})
    with ignored():
        assert known("a", 16) is None and digest_of(CPU) == before
        keep(CPU, "triton", 1, {"a": 2.0})
    assert [known("a", 1), known("a", 16)] == [2.0, 3.0]


def test_a_programs_key_hangs_on_what_is_kept() -> None:
    """By content: measuring the same again makes no other key."""
    digests = [digest_of(CPU)]
    for us in (3.0, 3.0, -3.0):
        keep(CPU, "triton", 16, {"a": us})
        digests.append(digest_of(CPU))
    assert digests[1] == digests[2] and len(set(digests)) == 3


@pytest.mark.parametrize("problem", ["a file", "no folder can be made", "no file can be made", "nothing can be read"])
def test_a_cache_that_cannot_be_written_is_told_once(
    problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are kept, and though what is there is read first."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / f"writing.{next(numbers)}"))

    numbers = itertools.count()
    if problem == "a file":
        (folder / "file").touch()
        monkeypatch.setenv("V41_CACHE_DIR", str(folder / "file"))
    if problem == "no folder can be made":
        monkeypatch.setattr(kept.Path, "mkdir", refuse)
    if problem in ("no file can be made", "nothing can be read"):
        monkeypatch.setattr(kept.tempfile, "TemporaryDirectory", refuse)
    if problem == "nothing can be read":
        monkeypatch.setattr(kept.Path, "read_text", refuse)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for rows in (1, 16):
            keep(CPU, "triton", rows, {"a": 3.0})
            assert known("a", rows) is None and digest_of(CPU) == digest_of(CPU)
    assert [(each.category, file_of(CPU).name in str(each.message)) for each in heard] == [(TunedWarning, True)]
