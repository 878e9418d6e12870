"""streams: a step ends with all streams behind each other, one that raised says why, and a graph is not waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from v41.runtime.streams import CudaFlight


class Stream:
    """Of a GPU: tells who waits for whom. alone: it is no branch of the graph that is captured."""

    def __init__(self, name: str, told: list[str], alone: bool = False) -> None:
        self.name, self.told, self.alone = name, told, alone

    def wait_stream(self, other: Stream) -> None:
        if other.alone:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.told.append(f"{self.name} waits for {other.name}")


class Steps:
    """Flights on one stream of the caller's and two others."""

    def __init__(self, patch: pytest.MonkeyPatch, captures: bool, alone: str = "") -> None:
        self.told: list[str] = []
        self.lanes = SimpleNamespace(free=[])
        self.streams = [Stream(name, self.told, name in alone) for name in ("home", "one", "two")]
        patch.setattr(torch.cuda, "set_stream", lambda stream: self.told.append(f"on {stream.name}"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)

    def flight(self) -> CudaFlight:
        return CudaFlight(self.lanes, list(self.streams), ["event"])  # type: ignore[arg-type]


def test_what_side_streams_get_next_comes_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step lets go behind its end was used by the caller's stream, and goes back to them."""
    steps = Steps(monkeypatch, captures=False)
    steps.flight().end()
    assert steps.told == ["on home", "one waits for home", "two waits for home"] and steps.lanes.free == [["event"]]


def test_a_graph_ends_with_no_branch_open(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, captures=True)
    steps.flight().end()
    assert steps.told == ["on home"] and steps.lanes.free == [["event"]]


def test_a_step_that_raised_is_waited_for_and_its_events_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, captures=False)
    steps.flight().abandon()
    joined = ["home waits for one", "home waits for two", "one waits for home", "two waits for home"]
    assert steps.told == ["on home", *joined] and steps.lanes.free == []


def test_a_capture_that_raised_before_it_branched_says_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to wait for a stream that is no branch yet; a KeyboardInterrupt must not end as that."""
    steps = Steps(monkeypatch, captures=True, alone="one")
    steps.flight().abandon()
    assert steps.told == ["on home", "home waits for two"]
