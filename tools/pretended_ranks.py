"""pretended_ranks: the other ranks of a group that does not exist, as far as kernels that add over ranks need them.

    with group_of(plan): ...       its group is known again, of as many ranks as when the plan was made
    shared_memory(4, "sm_90")      what four such GPUs would share, under without_storage(): sizes and no memory

So what such a kernel launches can be told, and compiled, where there is neither a GPU nor a second process. Numbers of
processors and words are those of real ranks, since they decide whether rows go in one shot or in two.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from v41._compat_groups import ALL, pretended, ranks_of
from v41.channels import Workspace
from v41.gpu_facts import KNOWN
from v41.plan import Plan
from v41.regions import region_of, regions
from v41.runtime.symmetric import COUNTERS, PATIENCE, WORDS


def group_of(plan: Plan) -> AbstractContextManager[None]:
    """The group over which kernels of `plan` add up, where it is the one that a capture pretends and it is gone."""
    found = (region_of(call).attrs.get("ranks") for piece in plan.pieces for call in regions(piece.body))
    ranks = next((each for each in found if each is not None), None)
    if ranks is None or plan.groups != (ALL,) or ranks_of(ALL) is not None:
        return contextlib.nullcontext()
    return pretended(int(str(ranks)))


def shared_memory(ranks: int, arch: str) -> Workspace:
    """Of the first rank."""
    memory = tuple(torch.empty(WORDS, dtype=torch.int32) for _ in range(ranks))
    counters = torch.empty(COUNTERS, dtype=torch.int32)
    failed, record = (torch.empty(1, dtype=torch.int64) for _ in range(2))
    return Workspace(0, memory, counters, failed, record, PATIENCE, KNOWN[arch].multiprocessors)
