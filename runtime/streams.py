"""streams: where the pieces of a plan run that are on side streams, and the events between them.

    flight = lanes()         a step begins on the caller's stream
    flight.mark(0)           event 0, behind what the current stream has got so far
    flight.switch(1)         what follows is issued to side stream 1
    flight.wait(0)           ... which goes on once event 0 is past
    flight.end()             back on the caller's stream, which has waited for all others by then, and they for it

The plan's function makes these calls (executor.py), captured or not: under a capture the side streams become branches
of the graph. Each step that is on its way has events of its own, so two threads, or a step within a step, cannot
re-record what the other waits for. What side streams use is kept by the references of that function, which drops them
where the plan frees them, and the last behind `end`: nothing is told to the allocator. It may give them out at once to
anyone on the stream that they came from, which by then waits for all who used them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import torch


class Flight(Protocol):
    """One step on its way."""

    def mark(self, event: int) -> None: ...
    def switch(self, stream: int) -> None: ...
    def wait(self, event: int) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None:
        """Ends a step that raised: the caller's stream waits for whatever was issued."""


class Lanes(Protocol):
    """Makes flights for one plan."""

    def __call__(self) -> Flight: ...


class CudaLanes:
    """Side streams of one device, and events for as many steps as were ever on their way at once."""

    def __init__(self, device: torch.device, streams: int, events: int) -> None:
        self.device, self.count = device, events
        self.sides = distinct_streams(device, streams)
        self.free: list[list[torch.cuda.Event]] = []

    def __call__(self) -> CudaFlight:
        home = torch.cuda.current_stream(self.device)
        sides = self.sides
        if any(side.cuda_stream == home.cuda_stream for side in sides):  # a step within a side piece of another
            sides = [side for side in distinct_streams(self.device, len(sides) + 1) if side != home][: len(sides)]
        return CudaFlight(self, [home, *sides], self.free.pop() if self.free else self._events())

    def _events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event() for _ in range(self.count)]


class CudaFlight:
    __slots__ = ("current", "events", "lanes", "streams")

    def __init__(self, lanes: CudaLanes, streams: list[torch.cuda.Stream], events: list[torch.cuda.Event]) -> None:
        self.lanes, self.streams, self.events = lanes, streams, events
        self.current = streams[0]

    def mark(self, event: int) -> None:
        self.events[event].record(self.current)

    def switch(self, stream: int) -> None:
        self.current = self.streams[stream]
        torch.cuda.set_stream(self.current)

    def wait(self, event: int) -> None:
        self.current.wait_event(self.events[event])

    def end(self) -> None:
        torch.cuda.set_stream(self.streams[0])
        self._let_go()
        self.lanes.free.append(self.events)

    def abandon(self) -> None:
        home, *sides = self.streams
        torch.cuda.set_stream(home)
        for side in sides:  # its events are not used again: which were recorded nobody knows
            with suppress(RuntimeError):  # of a capture that has not branched there: what was raised says more
                home.wait_stream(side)
        self._let_go()

    def _let_go(self) -> None:
        """What side streams get next comes behind all of this step, whose last values are freed now."""
        home, *sides = self.streams
        if not torch.cuda.is_current_stream_capturing():  # a graph's memory is its own, and its branches have ended
            for side in sides:
                side.wait_stream(home)


def distinct_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams that are no two the same: torch hands out a few in turn."""
    found: dict[int, torch.cuda.Stream] = {}
    while len(found) < count:
        stream = torch.cuda.Stream(device)
        found.setdefault(stream.cuda_stream, stream)
    return list(found.values())
