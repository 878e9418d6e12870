"""Channels are parts of memory that is there already, at one place on all ranks; none of it asks for multicast.

What went wrong elsewhere with sums over ranks goes right here, and in what these tests show:

    vllm#53000             a clean-up of old epochs erased a peer's next   test_all_reduce: a_planted_flaw_is_noticed,
                                                                           many_calls_while_ranks_drift_apart
    vllm#53000, #48071     multicast where the platform has none           here; test_all_reduce_compiles: check_order
    vllm#56266             NaN in rows of pads                             test_fuse_all_reduce: pad_rows_reach_no_...;
                                                                           test_all_reduce_front: a_row_of_nan_...
    radixark/miles#1664    memory registered while a graph is captured     here
    sglang#33037, #29946, #34230    memory laid out anew under capture     here
    vllm#48486             a wait without an end                           test_all_reduce: a_rank_that_stays_away_...;
                                                                           test_sums: a_rank_that_waits_in_vain_...
    pytorch#126846         a collective while compiling                    test_symmetric: all_ranks_hear_... (a store)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from v41._compat_symmetric import symmetric_tensors
from v41.channels import ALIGNED, Workspace
from v41.errors import ChannelsFull

MOVES = {"aten.slice.Tensor", "aten.detach.default", "aten.view.dtype", "aten.view.default"}


def workspace(words: int = 1024, counters: int = 128, ranks: int = 2) -> Workspace:
    memory = tuple(torch.zeros(words, dtype=torch.int32) for _ in range(ranks))
    record = torch.zeros(1, dtype=torch.int64)
    return Workspace(0, memory, torch.zeros(counters, dtype=torch.int32), record, record, 1.0, 8)


class Heard(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(str(func))
        return func(*args, **(kwargs or {}))


def place(part: Tensor, whole: Tensor) -> int:
    return (part.data_ptr() - whole.data_ptr()) // 4


def test_a_channel_is_memory_that_was_there_and_may_be_asked_for_under_capture() -> None:
    """Nothing is allocated, zeroed or mapped, so a graph that is being captured holds none of it."""
    made = workspace()
    with Heard() as heard:
        channel = made.channel("sums", 100, 5)
        halves = channel.part(32, 10, torch.bfloat16)
    assert heard.called <= MOVES and "aten.slice.Tensor" in heard.called
    for part, whole, half in zip(channel.memory, made.memory, halves, strict=True):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert place(half, whole) == place(part, whole) + 32 and half.numel() == 20
    with Heard() as heard:
        assert made.channel("sums", 100, 5) is channel and channel.part(32, 10, torch.bfloat16) is halves
    assert not heard.called


def test_ranks_that_ask_alike_find_their_channels_at_one_place() -> None:
    first, second = workspace(), workspace()
    starts = []
    for each in (first, second):
        channels = [each.channel(key, words, 3) for key, words in (("a", 33), ("b", 1), ("c", 64))]
        starts.append([[place(part, whole) for part, whole in zip(channel.memory, each.memory, strict=True)]
                       for channel in channels])  # fmt: skip
    assert starts[0] == starts[1] == [[0, 0], [64, 64], [96, 96]]
    assert all(start % ALIGNED == 0 for starts_of in starts[0] for start in starts_of)


def test_a_workspace_that_is_full_says_so_and_keeps_what_it_has() -> None:
    made = workspace(words=128)
    kept = made.channel("a", 64, 1)
    with pytest.raises(ChannelsFull) as raised:
        made.channel("b", 65, 1)
    assert (raised.value.facts["words"], raised.value.facts["left"]) == (65, 64)
    assert made.channel("a", 64, 1) is kept
    made.channel("c", 64, 1)


class Handle:
    """What torch returns where memory is mapped and the platform has no multicast."""

    rank, world_size = 1, 3

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> Tensor:
        return torch.full(sizes, rank, dtype=dtype)

    @property
    def multicast_ptr(self) -> int:
        raise RuntimeError("there is none")


def test_memory_is_shared_where_the_platform_has_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory as torchs

    monkeypatch.setattr(torchs, "empty", lambda *size, dtype, device: torch.full(size, 1, dtype=dtype))
    monkeypatch.setattr(torchs, "rendezvous", lambda own, group: Handle())
    tensors, kept = symmetric_tensors(8, torch.device("cpu"), SimpleNamespace())  # type: ignore[arg-type]
    assert [int(each[0]) for each in tensors] == [0, 1, 2] and kept is not None
