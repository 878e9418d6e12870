"""gains: what side work gained in whole steps on this device, measured once and kept on disk for later compiles.

    keep(device, "triton", 16, {"9c41...": 3.1})   `v41 bench overlap --sites`: at 16 rows a step got 3.1 µs shorter
    gained = gained_on(device, "triton")            what assign_streams asks
    gained("9c41...", 12)                           3.1; None where nobody measured

A site is named by its work, by what runs beside it, and by how pieces run; rows by bucket, the next power of two. The
file (lowering/kept.py) is named by what else a gain hangs on: device, versions, the compiler's sources. One of another
form is a miss with a warning. What is kept decides what is compiled, so it is a part of a program's key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from v41.artifact_key import SOURCES, device_facts, short, triton_version
from v41.lowering.kept import directory, entries, put, unusable
from v41.lowering.tuned import bucket
from v41.regions import Gained

IGNORED: ContextVar[bool] = ContextVar("v41_gains_ignored", default=False)
Kept = dict[str, dict[int, float]]  # site -> µs by bucket of rows


@contextmanager
def ignored() -> Iterator[None]:
    """Under it programs are compiled as if nothing were kept: so that what was turned off is measured again."""
    token = IGNORED.set(True)
    try:
        yield
    finally:
        IGNORED.reset(token)


def gained_on(device: torch.device, codegen: str) -> Gained:
    """What is kept of sites whose pieces run by `codegen`, as it is now."""
    kept = {} if IGNORED.get() else read(file_of(device))

    def gained(site: str, rows: int) -> float | None:
        return kept.get(_named(codegen, site), {}).get(bucket(rows))

    return gained


def keep(device: torch.device, codegen: str, rows: int, gains: Mapping[str, float | None]) -> None:
    """Adds what sites gained at so many rows, beside what is kept of other rows and sites. None: no longer known."""
    path = file_of(device)
    kept = read(path)
    for site, us in gains.items():
        of_site = kept.setdefault(_named(codegen, site), {})
        of_site.pop(bucket(rows), None)
        if us is not None:
            of_site[bucket(rows)] = round(us, 3)
    put(path, {site: {str(most): us for most, us in sorted(of.items())} for site, of in kept.items() if of})


def digest_of(device: torch.device) -> str:
    """A hash of all that is kept for `device`."""
    return short([json.dumps({} if IGNORED.get() else read(file_of(device)), sort_keys=True)])


def file_of(device: torch.device) -> Path:
    versions = {"torch": str(torch.__version__), "triton": triton_version()}
    facts = {"device": device_facts(device), "versions": versions, "sources": SOURCES}
    return directory() / f"side_work_{short([json.dumps(facts, sort_keys=True)])[:24]}.json"


def read(path: Path) -> Kept:
    """What `path` says; nothing where there is no file, and a warning where it is of no use."""
    try:
        return {site: {_rows(most): _us(us) for most, us in of.items()} for site, of in entries(path).items()}
    except (ValueError, TypeError, AttributeError) as error:
        return unusable(path, f"{type(error).__name__}: {error}")


def _named(codegen: str, site: str) -> str:
    return f"{codegen} {site}"


def _rows(told: str) -> int:
    rows = int(told)
    if rows < 1 or bucket(rows) != rows:
        raise ValueError(f"no bucket of rows: {told}")
    return rows


def _us(told: Any) -> float:
    if not isinstance(told, float) or not math.isfinite(told):
        raise ValueError(f"no number of µs: {told}")
    return told
