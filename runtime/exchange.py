"""exchange: every rank of a group shows the others a text, and has theirs; through the store the group was made with.

    rank 0   "three all_reduces"   ->  keys of the store  <-   rank 1   "two all_reduces"
    both     ["three all_reduces", "two all_reduces"], or RankMissing where a rank shows nothing in time

That is no collective: it needs no device and no order among other collectives, and one rank may be late.
"""

from __future__ import annotations

import torch.distributed as dist

from v41._compat_groups import store_of
from v41.errors import RankMissing, StoreLost

WHERE = "torch.compile, before the first step"


def exchanged(group: str, what: str, ours: str) -> list[str]:
    """What each rank of `group` shows the next time that it has done `what` ("compiled program"), in order of ranks; of
    this one it is `ours`. Raises RankMissing after the timeout that the group was made with, and StoreLost."""
    store, rank, count = store_of(group)
    try:
        number = store.add(f"{what}: times of rank {rank}", 1)
        store.set(f"{what} {number} of rank {rank}", ours)
        return [ours if other == rank else _shown(store, group, what, number, other) for other in range(count)]
    except dist.DistNetworkError as error:  # whoever holds the store is gone
        raise StoreLost(WHERE, rank=rank, group=group, what=what) from error


def _shown(store: dist.Store, group: str, what: str, number: int, other: int) -> str:
    try:
        return store.get(f"{what} {number} of rank {other}").decode()
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:
        seconds = f"{store.timeout.total_seconds():.0f}"  # type: ignore[attr-defined]  # there, and in no stub
        raise RankMissing(WHERE, rank=other, group=group, what=what, number=number, seconds=seconds) from error
