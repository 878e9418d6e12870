"""kept: what was measured on this machine, on disk for later processes: one file a subject, with a checksum.

    path = directory() / "kernel_4f0c.json"     named by everything that hangs on the subject: text, device, versions
    put(path, {"16": ...})                      replaces it whole
    entries(path)                               what it holds; {} where there is none

A file is a line with the SHA-256 of the rest, and JSON. One that is cut or changed is a miss with a warning, as is a
directory that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TunedWarning(UserWarning):
    """A file of what was measured is of no use, or nothing could be measured; what it would decide is reckoned."""


def directory() -> Path:
    """Beside the compiled programs (v41/artifact_store.py): $V41_CACHE_DIR, else v41/ in $XDG_CACHE_HOME or ~/.cache.

    With V41_CACHE_DIR=off nothing is read or kept on disk."""
    named = os.environ.get("V41_CACHE_DIR")
    if named and named != "off":
        return Path(named) / "schedules"
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "v41" / "schedules"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "no home directory"  # where nothing is, and nothing can be written


def entries(path: Path) -> dict[str, Any]:
    """The JSON in `path`, empty where there is none or the sum does not hold."""
    if os.environ.get("V41_CACHE_DIR") == "off":
        return {}
    try:
        head, _, rest = path.read_text().partition("\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        return unusable(path, told(error))
    except UnicodeDecodeError as error:
        return unusable(path, str(error))
    if head != checksum(rest):
        return unusable(path, "its checksum does not hold")
    try:
        return dict(json.loads(rest))
    except (ValueError, TypeError) as error:
        return unusable(path, f"{type(error).__name__}: {error}")


def put(path: Path, held: Mapping[str, Any]) -> None:
    """Replaces what `path` holds. A directory that cannot be written is a warning."""
    if os.environ.get("V41_CACHE_DIR") == "off":
        return
    rest = json.dumps(held, indent=1, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing.", dir=path.parent) as beside:
            made = Path(beside) / path.name
            made.write_text(f"{checksum(rest)}\n{rest}")
            made.replace(path)
    except OSError as error:
        unusable(path, told(error))


def told(error: OSError) -> str:
    """What the system says went wrong, without paths: what is written on the way to a file has another name each
    time."""
    return f"{type(error).__name__}: {error.strerror or error}"


def checksum(rest: str) -> str:
    return hashlib.sha256(rest.encode()).hexdigest()


def unusable(path: Path, why: str) -> dict[Any, Any]:
    """Warns, once of a file and a reason wherever it is read or written, and gives what such a file counts as."""
    said = globals().setdefault("__warningregistry__", {})  # where warnings.warn keeps what it said, line by line
    warnings.warn_explicit(f"{path} is not used: {why}", TunedWarning, __file__, 0, __name__, said)
    return {}
