"""Channels: memory that the ranks of a group share, as kernels that hand each other rows see it.

    Workspace      one for each group and device: its memory on every rank, mapped into this process
      Channel      a part of it for one kind of use, at the same place on every rank, with counters of this rank's own

A workspace hands out channels in the order in which they are asked for, so all ranks must ask alike; they run the same
program, so they do. Nothing is allocated or zeroed for a channel, hence it may be asked for while a graph is captured.
All uses of a workspace come one behind the other on the device, in the same order on all ranks: kernels and graphs that
use it run on one stream. What runs beside them is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from v41.errors import ChannelsFull, PeerStalled

ALIGNED = 32  # words that the start of a channel, or of a part of it, is a multiple of: 128 bytes
SITE, PEER = 40, 32  # bits of a record at which these begin; the epoch lies below


@dataclass(frozen=True)
class Channel:
    """`memory`: one int32 tensor a rank, the same place on each. `counters`: int32, zero before the first use."""

    memory: tuple[Tensor, ...]
    counters: Tensor
    _views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = field(default_factory=dict)

    def part(self, start: int, words: int, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
        """Words start.. of every rank's memory, as `dtype`."""
        key = (start, words, dtype)
        if key not in self._views:
            self._views[key] = tuple(memory[start : start + words].view(dtype) for memory in self.memory)
        return self._views[key]


@dataclass
class Workspace:
    """`memory`: of every rank in order, int32, zero at first; `counters`: int32, of this rank alone, zero at first.

    `failed`: int64 [1] on the device, the record of the first wait that was given up; `record`: one of them, int64 [1]
    that the host sees without asking the device. patience: seconds that a kernel waits for a peer.
    """

    rank: int
    memory: tuple[Tensor, ...]
    counters: Tensor
    failed: Tensor
    record: Tensor
    patience: float
    processors: int  # of each rank's device
    sites: list[str] = field(default_factory=list)
    kept: object = None  # what lives as long as the memory does
    _channels: dict[object, Channel] = field(default_factory=dict)
    _used: tuple[int, int] = (0, 0)

    @property
    def ranks(self) -> int:
        return len(self.memory)

    def channel(self, key: object, words: int, counters: int) -> Channel:
        """The channel of `key`, made now if there is none. ChannelsFull."""
        if key not in self._channels:
            first, count = self._used
            after, last = first + aligned(words), count + aligned(counters)
            if after > self.memory[0].numel() or last > self.counters.numel():
                raise ChannelsFull(f"rank {self.rank}", words=words, left=self.memory[0].numel() - first)
            memory = tuple(each[first : first + words] for each in self.memory)
            self._channels[key] = Channel(memory, self.counters[count : count + counters])
            self._used = (after, last)
        return self._channels[key]

    def site(self, name: str) -> int:
        """The number by which a kernel called `name` says that it waits."""
        if name not in self.sites:
            self.sites.append(name)
        return self.sites.index(name)

    def check(self) -> None:
        """Raises PeerStalled if a kernel gave up waiting. Sees what has run: call it where the host has waited."""
        if int(self.record[0]):
            told = int(self.failed[0])
            facts = {"rank": self.rank, "peer": (told >> PEER) & 0xFF, "epoch": told & 0xFFFFFFFF}
            raise PeerStalled(self.sites[(told >> SITE) - 1], seconds=self.patience, **facts)


def aligned(words: int) -> int:
    """`words`, rounded up to where the next may begin."""
    return -(-words // ALIGNED) * ALIGNED
