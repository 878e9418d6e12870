"""timing: what one call costs on a GPU, without launch latency, with cold weights; which kernels it launches; and the
file that keeps what was measured.

Many calls go into one CUDA graph, each on the next of several sets of inputs, together larger than the L2 cache; the
graph is replayed and the median divided by the calls.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

L2_BYTES = 60 << 20
RESULTS = Path(__file__).parent / "results"
REPLAYS = 40
Kernel = tuple[str, float]  # name, µs


def sets_needed(bytes_a_call: int) -> int:
    """How many sets of inputs together exceed twice the L2 cache."""
    return max(2, -(-2 * L2_BYTES // bytes_a_call))


def microseconds(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int | None = None) -> float:
    """Median time of one call, the inputs taken in turn."""
    calls = calls or max(len(inputs), 16 if len(inputs) > 8 else 4)
    for args in inputs[:2]:
        call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(*inputs[i % len(inputs)])
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    del graph
    return statistics.median(times)


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


def by_origin(launched: Sequence[Kernel], generated: str | tuple[str, ...]) -> dict[str, dict[str, float]]:
    split: dict[str, dict[str, float]] = defaultdict(lambda: {"launches": 0, "us": 0.0})
    for name, us in launched:
        known = (
            "generated" if name.startswith(generated) else "inductor" if name.startswith("triton_") else "library"
        )
        split[known]["launches"] += 1
        split[known]["us"] += us
    return dict(split)


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
    """Writes `result` to `out`, or beside the other results under its case and date; where it is now."""
    path = out or RESULTS / f"{result['case'].replace(' ', '-')}-{result['date'][:16].replace(':', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
