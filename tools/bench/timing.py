"""timing: which kernels a call launches, and the file that keeps what was measured; microseconds are measure.py's."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from v41.lowering.measure import microseconds, sets_needed
from v41.tools.files import write_whole
from v41.tools.json_output import schema

__all__ = ["by_origin", "costliest", "kernels", "launches", "microseconds", "provenance", "save", "sets_needed"]

RESULTS = Path(__file__).parent / "results"
Kernel = tuple[str, float]  # name, µs


def launches(call: Callable[[], Any], generated: str | tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Kernels and their µs in one call, by origin: generated (their names begin so, or so), inductor, library."""
    return by_origin(kernels(call), generated)


def kernels(call: Callable[[], Any]) -> list[Kernel]:
    """Each kernel that one call launches, those of a graph too."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [
        (event.name, event.self_device_time_total)
        for event in on_device
        if event.name != "Command Buffer Full" and not event.is_user_annotation
    ]


HASH = re.compile("_[0-9a-f]{6}$")  # behind the kind of region in a kernel's name


def by_origin(launched: Sequence[Kernel], generated: str | tuple[str, ...]) -> dict[str, dict[str, float]]:
    split: dict[str, dict[str, float]] = defaultdict(lambda: {"launches": 0, "us": 0.0})
    for name, us in launched:
        known = "generated" if name.startswith(generated) else _other(name)
        split[known]["launches"] += 1
        split[known]["us"] += us
    return dict(split)


def by_region(launched: Sequence[Kernel], generated: str | tuple[str, ...]) -> list[tuple[str, int, float]]:
    """Kind of region (generated kernels are named kind_hash), launches and µs together, the costliest first; others of
    ours by name, beside them what Inductor and libraries run."""
    kinds = [(HASH.sub("", name) if name.startswith(generated) else _other(name), us) for name, us in launched]
    return costliest(kinds, len(kinds))


def _other(name: str) -> str:
    return "inductor" if name.startswith("triton_") else "library"


def costliest(launched: Sequence[Kernel], count: int = 12) -> list[tuple[str, int, float]]:
    """Name, launches and µs together of the kernels that cost most."""
    named: dict[str, list[float]] = defaultdict(list)
    for name, us in launched:
        named[name].append(us)
    totals = [(name, len(each), round(sum(each), 1)) for name, each in named.items()]
    return sorted(totals, key=lambda total: -total[2])[:count]


def provenance() -> dict[str, Any]:
    """Commit, device, versions and date."""
    import triton  # type: ignore[import-untyped]

    gpu = torch.cuda.is_available()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or None,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def save(result: dict[str, Any], out: Path | None) -> Path:
    """Writes `result` to `out`, or beside the other results under its case and date; where it is now.
    FileNotWritten."""
    path = out or RESULTS / f"{result['case'].replace(' ', '-')}-{result['date'][:16].replace(':', '')}.json"
    write_whole(path, json.dumps({"schema": schema("bench"), **result}, indent=1) + "\n")
    return path
