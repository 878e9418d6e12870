"""same_program: before the first step the ranks of a group show each other what they will say, and in which order.

    rank 0   all_reduce, all_reduce, all_gather   ->  keys of the group's store  <-   rank 1   all_reduce, all_gather
    where the two differ, RanksDisagree on both; where a rank shows nothing in time, RankMissing

Ranks that call other collectives, or in another order, wait for each other forever or add up the wrong numbers. What
they compiled tells beforehand. It goes through the store that the group was made with, which is no collective: it
needs no order, no device, and one rank may be late by as long as it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from v41._compat_groups import FAKE, backend_of, store_of
from v41.errors import RankMissing, RanksDisagree
from v41.plan import Plan
from v41.regions import REDUCED

OWN = f"region {REDUCED}"  # why a piece begins that adds up over ranks itself
WHERE = "torch.compile, before the first step"


def check_same_program(plan: Plan, artifacts: Mapping[str, Any]) -> str | None:
    """Returns when all ranks of each of the plan's groups have compiled the same collectives: a line for the report,
    None where there are none. Raises RanksDisagree, or RankMissing after the timeout that the group was made with."""
    told = [group for group in plan.groups if backend_of(group) != FAKE]  # of a fake group there is one process
    ours = lines(plan, artifacts)
    for group in told:
        store, rank, count = store_of(group)
        number = store.add(f"programs of rank {rank}", 1)
        store.set(f"program {number} of rank {rank}", "\n".join(ours))
        for other in (each for each in range(count) if each != rank):
            theirs = _shown(store, group, number, other).splitlines()
            _compare(group, (rank, other), ours, theirs)
    return f"{len(plan.collectives)} collectives, the same on all ranks" if told else None


def lines(plan: Plan, artifacts: Mapping[str, Any]) -> list[str]:
    """The collectives of a plan, and the kernels that hold some."""
    kernels = [getattr(artifacts[piece.key], "kernel", None) for piece in plan.pieces if piece.border == OWN]
    return [*plan.collectives, *(f"in kernel {kernel.name}" for kernel in kernels if kernel is not None)]


def _shown(store: dist.Store, group: str, number: int, other: int) -> str:
    try:
        return store.get(f"program {number} of rank {other}").decode()
    except RuntimeError as error:
        seconds = f"{store.timeout.total_seconds():.0f}"  # type: ignore[attr-defined]  # there, and in no stub
        raise RankMissing(WHERE, rank=other, group=group, number=number, seconds=seconds) from error


def _compare(group: str, ranks: tuple[int, int], ours: list[str], theirs: list[str]) -> None:
    for at, (mine, other) in enumerate(zip_longest(ours, theirs, fillvalue="nothing more")):
        if mine != other:
            facts = {"rank": ranks[0], "other": ranks[1], "group": group, "number": at}
            raise RanksDisagree(WHERE, **facts, ours=mine, theirs=other)
