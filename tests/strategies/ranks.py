"""A process group of several ranks in one process: sums come out as if all ranks had what this one has.

    with ranks(3): ...      three ranks; `dist.all_reduce(y)` gives 3 y

For values, where the group that torch has for tracing gives y back, so that nobody would miss a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

NAME = "v41_alike"  # of the backend


class Alike(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(self.size())
        return _done(tensors)

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return _done([])


def _done(tensors: list[torch.Tensor]) -> Any:
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


def _alike(store: Any, rank: int, size: int, timeout: Any) -> Alike:
    return Alike(rank, size)


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """This process is rank 0 of `count`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _alike, devices=["cpu"])
    dist.init_process_group(NAME, store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
