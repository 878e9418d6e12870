"""ArtifactStore: compiled programs in one directory, a file each, which another process may read, write or damage.

    store = open_store()
    store.put(key, values)
    store.get(key)  ->  the values, or a Miss that says why

Where: $V41_CACHE_DIR; else v41/programs in $XDG_CACHE_HOME or ~/.cache. V41_CACHE_DIR=off stores nothing and reads
nothing. To clear it, delete the directory. It is kept below LIMIT bytes: the entries longest unused go first.

An entry is a line that names the format, a line with the SHA-256 of all that follows, a line of JSON (the parts of the
key), and a pickle. Nothing is unpickled unless that sum holds. A file that is cut, changed, empty or of another format
is a miss with a warning that names it, and is written anew. Writing goes to a file of its own that then takes the
entry's name, so readers see a whole entry, old or new, and of two writers the last wins; they wrote the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch.fx import GraphModule

from v41._compat import real_tensors
from v41._compat_cache import NotStorable
from v41.artifact_key import Key, Parts
from v41.text_code import Recipe, recipe_of

FORMAT = b"v41 program 1\n"
SUM = 64  # hexadecimal digits of a SHA-256
LIMIT = 4 << 30  # bytes
NEIGHBOURS = 64  # entries looked at, newest first, to say what differs
ABANDONED = 3600  # seconds after which nobody is still writing a file


class ArtifactCacheWarning(UserWarning):
    """An entry or the directory is of no use; names the file. The program was compiled instead."""


class Damaged(Exception):
    """What is wrong with a file."""


@dataclass(frozen=True)
class Miss:
    why: str


class Pickler(pickle.Pickler):
    """Knows modules by name and functions that were made from text by that text; refuses graphs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, FunctionType) and (recipe := recipe_of(obj)) is not None:
            return Recipe.make, (recipe,)
        if isinstance(obj, MethodType) and recipe_of(obj.__func__) is not None:
            return bound, (obj.__func__, obj.__self__)
        if isinstance(obj, GraphModule):
            raise NotStorable("a graph module lies among the artifacts")
        return NotImplemented


def bound(function: Any, owner: object) -> MethodType:
    """A method; its class has no name that pickle finds."""
    return MethodType(function, owner)


@dataclass(frozen=True)
class ArtifactStore:
    directory: Path

    def path(self, key: Key) -> Path:
        return self.directory / f"{key.digest}.v41"

    def get(self, key: Key) -> Any | Miss:
        """The values of `key`'s entry. A damaged one is a Miss and a warning."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Miss(self.nearest(key))
        except OSError as error:
            return self._unusable(path, str(error))
        try:
            parts, body = checked(content)
            if parts != key.parts:
                raise Damaged("it belongs to another key")
            with real_tensors():
                values = pickle.loads(body)
        except Damaged as damage:
            return self._unusable(path, str(damage))
        except Exception as error:  # the sum holds, and still a class or a file that it names is not there
            return self._unusable(path, f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):  # a directory that is only read
            os.utime(path)  # last used now
        return values

    def put(self, key: Key, values: Any) -> str | None:
        """Writes the entry. None, or why there is none: values no pickle takes, a directory that is read-only."""
        try:
            body = pickled(values)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        rest = json.dumps(key.parts).encode() + b"\n" + body
        content = FORMAT + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(content, self.path(key))
            self.trim()
        except OSError as error:
            return self._unusable(self.path(key), str(error)).why
        return None

    def _write(self, content: bytes, path: Path) -> None:
        """All of it or nothing: no part of a file stays where the disk is full or `path` cannot be replaced."""
        with tempfile.NamedTemporaryFile(dir=self.directory, suffix=".writing", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    def nearest(self, key: Key) -> str:
        """What differs from the entry most like `key`, among the newest."""
        found = [key.differences(parts) for parts in self._parts()]
        if not found:
            return "the store is empty"
        least = min(found, key=lambda differences: sum(line.count(",") + 1 for line in differences))
        return "nearest entry differs in " + "; ".join(least)

    def trim(self, limit: int = LIMIT) -> None:
        """Deletes the entries longest unused until the rest takes no more than `limit` bytes, and files that a process
        which was killed left half written."""
        for path in self.directory.glob("*.writing"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - ABANDONED:
                    path.unlink()
        facts = [(stat.st_mtime, stat.st_size, path) for path, stat in self._entries()]
        total = sum(size for _, size, _ in facts)
        for _, size, path in sorted(facts):
            if total <= limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.directory.glob("*.v41"):
            try:
                yield path, path.stat()
            except OSError:
                continue  # another process deleted it

    def _parts(self) -> Iterator[Parts]:
        newest = sorted(self._entries(), key=lambda entry: -entry[1].st_mtime)[:NEIGHBOURS]
        for path, _ in newest:
            try:
                with path.open("rb") as file:
                    head = file.read(len(FORMAT) + SUM + 1)
                    parts = json.loads(file.readline()) if head.startswith(FORMAT) else None
                if isinstance(parts, dict) and all(isinstance(told, dict) for told in parts.values()):
                    yield parts
            except (OSError, ValueError):
                continue  # it only helps to explain a miss

    def _unusable(self, path: Path, why: str) -> Miss:
        warnings.warn(f"{path} is not used: {why}", ArtifactCacheWarning, stacklevel=2)
        return Miss(f"{path.name} is not used: {why}")


def checked(content: bytes) -> tuple[Parts, bytes]:
    """The parts and the pickle of an entry whose sum holds, else Damaged."""
    if not content:
        raise Damaged("it is empty")
    if not content.startswith(FORMAT):
        raise Damaged("it has another format")
    start = len(FORMAT) + SUM + 1
    told, rest = content[len(FORMAT) : start], content[start:]
    if told != hashlib.sha256(rest).hexdigest().encode() + b"\n":
        raise Damaged("its checksum does not hold")
    head, _, body = rest.partition(b"\n")
    return json.loads(head), body


def pickled(values: Any) -> bytes:
    file = io.BytesIO()
    with real_tensors():
        Pickler(file).dump(values)
    return file.getvalue()


def open_store() -> ArtifactStore | str:
    """The store that the environment names, or why there is none."""
    named = os.environ.get("V41_CACHE_DIR")
    if named == "off":
        return "V41_CACHE_DIR=off"
    if named:
        return ArtifactStore(Path(named))
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return "no home directory, and V41_CACHE_DIR names no other"
    return ArtifactStore(cache / "v41" / "programs")
