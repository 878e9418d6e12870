"""Arrivals: counters of launches that may run at once are apart, whichever streams they are on."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from v41.lowering.rowwise.launch import SPARE, TILES, Arrivals

GPUS = torch.device("cuda", 0), torch.device("cuda", 1)
ZEROS = torch.zeros


class Streams:
    """Stands in for CUDA: which stream is current, and how often memory was zeroed."""

    def __init__(self) -> None:
        self.current, self.zeroed, self.capturing = 1, 0, False
        self.behind: list[Tensor] = []  # memory whose zeroing is launched, and not known to be done

    def stream(self, device: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=self.current, synchronize=self.behind.clear)

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.zeroed += 1
        self.behind.append(ZEROS(*shape, dtype=dtype))
        return self.behind[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", made.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch, "zeros", made.zeros)
    return made


def places(counters: Tensor) -> range:
    return range(counters.data_ptr(), counters.data_ptr() + counters.numel() * counters.element_size())


def test_each_stream_of_each_device_has_counters_of_its_own(streams: Streams) -> None:
    arrivals, found = Arrivals({}, {}), dict[tuple[torch.device, int], Tensor]()
    for turn in range(2):
        for device in GPUS:
            for streams.current in (1, 2, 3):
                counters = arrivals.on(device, 10)
                assert found.setdefault((device, streams.current), counters) is counters, turn
    taken = sorted((places(each) for each in found.values()), key=lambda place: place.start)
    assert len(taken) == 6 and all(a.stop <= b.start for a, b in pairwise(taken))
    assert all(each.count_nonzero() == 0 and each.numel() >= 10 for each in found.values())


def test_a_stream_that_captures_takes_counters_that_were_zeroed_before(streams: Streams) -> None:
    arrivals = Arrivals({}, {})
    arrivals.on(GPUS[0], 10)
    for streams.current in range(2, SPARE + 1):
        arrivals.on(GPUS[0], TILES)
    assert streams.zeroed == 1
    streams.current = SPARE + 1
    arrivals.on(GPUS[0], 10)
    assert streams.zeroed == 2


def test_counters_are_zero_before_another_stream_is_given_some(streams: Streams) -> None:
    arrivals = Arrivals({}, {})
    arrivals.on(GPUS[0], 10)
    assert streams.zeroed == 1 and not streams.behind
    streams.capturing = True  # no stream may be waited for then; zeroing is work of the graph
    arrivals.on(GPUS[0], TILES + 1)
    assert streams.zeroed == 2 and streams.behind


def test_more_tiles_than_there_are_counters_for_get_more(streams: Streams) -> None:
    arrivals = Arrivals({}, {})
    few = arrivals.on(GPUS[0], 10)
    many = arrivals.on(GPUS[0], TILES + 1)
    assert many.numel() > TILES and many is not few and arrivals.on(GPUS[0], 10) is many


def test_a_host_has_one_stream() -> None:
    arrivals = Arrivals({}, {})
    assert arrivals.on(torch.device("cpu"), 10) is arrivals.on(torch.device("cpu"), TILES)
