"""captures_table and capture_values: what became of the steps of a compiled graph that runs captured.

    how steps ran                          steps  graphs
    one graph                                340      12        38.2 µs on the host a step
    in segments: longest above 1               6      24
    warm-up                                   18       -
    uncaptured: rows=3 is in no bucket         2       -
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from v41.report import Captures
from v41.tools.tables import add, table


def captures_table(log: Captures) -> Table:
    made = table("how steps ran", "steps", "graphs")
    segments = sum(" segment_" in name for name in log.captured)
    add(made, "one graph", log.replays, len(log.captured) - segments)
    for reason, steps in log.piecewise.items():
        add(made, f"in segments: {reason}", steps, segments)
    add(made, "warm-up, of these and of new sizes", log.warm_ups, None)
    for reason, steps in log.uncaptured.items():
        add(made, f"uncaptured: {reason}", steps, None)
    return made


def capture_remarks(log: Captures) -> list[str]:
    """What the table cannot hold: time and memory, graphs that were dropped, captures that raised."""
    host, memory = "-" if log.host_us is None else f"{log.host_us:.1f}", log.pool_bytes() / 2**20
    lines = [f"capture  {host} µs on the host a step that is one graph; {memory:.1f} MiB in all graphs"]
    if log.dropped:
        lines.append(f"dropped  {len(log.dropped)}: an input lay at another address; the first {log.dropped[0]}")
    return lines + [f"error    {line}: runs uncaptured" for line in log.errors]


def capture_values(log: Captures) -> dict[str, Any]:
    """The same, as values json can write."""
    names = ("captured", "replays", "segment_replays", "piecewise", "uncaptured", "warm_ups", "dropped", "errors")
    return {**{name: getattr(log, name) for name in names}, "host_us": log.host_us, "pool_bytes": log.pool_bytes()}
