"""_compat_symmetric: torch's symmetric memory, as far as it is needed: one tensor that every rank of a group can reach.
Programs know a group by its name.

Torch lays it out with the driver's virtual memory, exchanges handles through the group's store, and maps all ranks'
tensors into each process. Both calls are collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def group_called(name: str) -> dist.ProcessGroup:
    """The group that functional collectives call `name`."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


def symmetric_tensors(words: int, device: torch.device, group: dist.ProcessGroup) -> tuple[tuple[Tensor, ...], object]:
    """int32 [words] of every rank of `group`, in order, none of it set yet; and what must live as long as they do.

    Raises what torch raises where ranks cannot reach each other.
    """
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(words, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(own, group)
    ranks = range(handle.world_size)
    tensors = tuple(own if rank == handle.rank else handle.get_buffer(rank, (words,), torch.int32) for rank in ranks)
    return tensors, (own, handle)
