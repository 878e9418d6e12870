"""timeline: when each piece of a plan would run on its stream, as a table and as a trace that Perfetto shows.

    piece         begins                           stream  from us  to us
    piece_4       region mhc_boundary                   0     96.1    101
    piece_4_side  read late: side work of piece_4       1      101    110
    piece_5       end of region mhc_boundary            0      101    140

A piece begins when its stream is free and those it waits for are done; how long each takes is predicted (times.py), as
if streams did not slow each other down. The names are those of the plan. What was measured (measured_schedule.py) gets
columns beside it, and a process of its own in the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from v41.plan import END, START, Plan
from v41.tools.tables import add, table


@dataclass(frozen=True)
class Slot:
    """When a piece runs, in µs from the start of the step."""

    name: str
    stream: int
    start: float
    end: float
    border: str


def schedule(plan: Plan, us: Mapping[str, float]) -> list[Slot]:
    """A slot for each piece that takes time, in order. us: name of a piece -> how long it takes."""
    free: dict[int, float] = {}
    done = {START: 0.0}
    waits: dict[str, list[str]] = {}
    for event in plan.events:
        waits.setdefault(event.before, []).append(event.after)
    slots = []
    for piece in plan.pieces:
        start = max([free.get(piece.stream, 0.0), *(done[name] for name in waits.get(piece.name, ()))])
        free[piece.stream] = done[piece.name] = start + us[piece.name]
        if us[piece.name] > 0:
            slots.append(Slot(piece.name, piece.stream, start, done[piece.name], piece.border))
    return slots


def length(plan: Plan, slots: list[Slot]) -> float:
    """µs until the caller's stream is done, with all it waits for."""
    joined = {event.after for event in plan.events if event.before == END}
    return max((slot.end for slot in slots if slot.stream == 0 or slot.name in joined), default=0.0)


def beside(predicted: Sequence[Slot], measured: Sequence[Slot]) -> list[tuple[Slot | None, Slot | None]]:
    """Both slots of each piece, in the order of the first that knows it; None where it has none."""
    ours, theirs = ({slot.name: slot for slot in slots} for slots in (predicted, measured))
    return [(ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])]


def schedule_table(slots: Sequence[Slot], measured: Sequence[Slot] | None = None) -> Table:
    """A line a piece."""
    times = ("from us", "to us", "us")
    further = [f"measured {time}" for time in times] if measured is not None else []
    made = table("piece", "begins", "stream", *times, *further, left=2)
    for ours, theirs in beside(slots, measured or ()):
        slot = ours or theirs
        assert slot is not None
        add(made, slot.name, slot.border, slot.stream, *_times(ours), *(_times(theirs) if further else ()))
    return made


def _times(slot: Slot | None) -> tuple[float | None, float | None, float | None]:
    return (slot.start, slot.end, slot.end - slot.start) if slot else (None, None, None)


def trace(plan: Plan, slots: Sequence[Slot], measured: Sequence[Slot] | None = None) -> dict[str, Any]:
    """The same as Chrome and Perfetto read it: a track a stream, an arrow an event; of each schedule a process."""
    schedules = {"predicted": slots} | ({} if measured is None else {"measured": measured})
    told = [event for pid, (name, each) in enumerate(schedules.items()) for event in _process(plan, pid, name, each)]
    return {"displayTimeUnit": "ns", "traceEvents": told}


def _process(plan: Plan, pid: int, name: str, slots: Sequence[Slot]) -> list[dict[str, Any]]:
    placed = {slot.name: slot for slot in slots}
    tracks = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": stream, "args": {"name": f"stream {stream}"}}
          for stream in sorted({slot.stream for slot in slots})),
    ]  # fmt: skip
    pieces = [
        {"ph": "X", "name": slot.name, "cat": "piece", "pid": pid, "tid": slot.stream, "ts": slot.start,
         "dur": slot.end - slot.start, "args": {"begins": slot.border}}
        for slot in slots
    ]  # fmt: skip
    arrows: list[dict[str, Any]] = []
    for at, event in enumerate(plan.events):
        if event.after in placed and event.before in placed:
            after, before = placed[event.after], placed[event.before]
            both = {"name": "event", "cat": "event", "id": f"{pid}.{at}", "pid": pid}
            arrows.append({**both, "ph": "s", "tid": after.stream, "ts": after.end})
            arrows.append({**both, "ph": "f", "bp": "e", "tid": before.stream, "ts": before.start})
    return [*tracks, *pieces, *arrows]
