"""sum_ranks: the processes of a bench of sums over ranks: one group, each rank with a GPU of its own, or sharing some.

spawned(2, work)      starts two ranks on this host, each of which does `work`; what rank 0 found
joined(rank, ...)     this process as one rank of a group that exists, or that others are about to join
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from v41.channels import Workspace
from v41.runtime import symmetric

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
Work = Callable[["Place"], dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """This process: rank `rank` of `ranks`, on `device`. nccl: whether the group has it, each rank a GPU of its own."""

    rank: int
    ranks: int
    device: torch.device
    nccl: bool
    workspace: Workspace

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def gathered(self, fact: Any) -> list[Any]:
        heard: list[Any] = [None] * self.ranks
        dist.all_gather_object(heard, fact)
        return heard

    def meet(self) -> None:
        torch.cuda.synchronize(self.device)
        self.gathered(None)


def group_of() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def joined(rank: int, ranks: int, address: str) -> Iterator[Place]:
    """This process as `rank` of a group that meets at `address`, until the block ends."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    own_gpu = gpus >= ranks
    backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    try:
        place = Place(rank, ranks, device, own_gpu, symmetric.workspace(group_of(), device))
        yield place
        place.meet()
    finally:
        dist.destroy_process_group()


def spawned(ranks: int, work: Work) -> dict[str, Any]:
    """`ranks` processes of this host, as one group, each of which does `work`; what its rank 0 found."""
    if torch.cuda.device_count() < ranks:
        os.environ[OVERLAP] = "1"
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        torch.multiprocessing.spawn(_run_rank, (ranks, address, work, file), nprocs=ranks)
        answer: dict[str, Any] = json.loads(file.read_text())
    return answer


def _run_rank(rank: int, ranks: int, address: str, work: Work, file: Path) -> None:
    with joined(rank, ranks, address) as place:
        answer = work(place)
    if rank == 0:
        file.write_text(json.dumps(answer))
