"""_compat_groups: what a process group's name tells: how many ranks it has, how it talks, and a store they share.

Functional collectives name their group by a text that torch looks up in the process. A store is no collective: reading
and writing it needs no order among the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

ALL = "0"  # torch's name of the group of all
FAKE = "fake"  # the backend of a group with one process in it, for tracing


def ranks_of(group: object) -> int | None:
    """How many ranks the group of this name has; None where no such group is known here."""
    found = _resolved(group)
    return None if found is None else int(found.size())


def backend_of(group: object, device: torch.device | None = None) -> str | None:
    """ "gloo", "nccl", "fake" ...: how the group talks about tensors on `device`; None where none is known here."""
    found = _resolved(group)
    if found is None:
        return None
    with contextlib.suppress(RuntimeError):  # it talks about no such tensors, or is one by itself
        return str(found._get_backend(device or torch.device("cpu")).name())
    return str(dist.get_backend(found))


def store_of(group: str) -> tuple[dist.Store, int, int]:
    """A store that the ranks of a group share, which keeps other groups' keys apart; this rank, and how many."""
    found = _resolved(group)
    assert found is not None, group
    store = dist.PrefixStore("v41", distributed_c10d._get_process_group_store(found))
    return store, found.rank(), found.size()


@contextlib.contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """This process as rank 0 of so many, of which there are no others: programs can be traced, and sums mean nothing.
    Their group is ALL."""
    dist.init_process_group(FAKE, store=FakeStore(), rank=0, world_size=ranks)
    assert ranks_of(ALL) == ranks
    try:
        yield
    finally:
        dist.destroy_process_group()


def _resolved(group: object) -> dist.ProcessGroup | None:
    if not isinstance(group, str) or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, unused-ignore]
    except RuntimeError:
        return None
