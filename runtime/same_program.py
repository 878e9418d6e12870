"""same_program: before the first step the ranks of a group show each other what they will say, and in which order.

    rank 0   all_reduce, all_reduce, all_gather   ->  keys of the group's store  <-   rank 1   all_reduce, all_gather
    where the two differ, RanksDisagree on both; where a rank shows nothing in time, RankMissing

Ranks that call other collectives, or in another order, wait for each other forever or add up the wrong numbers. What
they compiled tells beforehand (exchange.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from v41._compat_groups import FAKE, backend_of, store_of
from v41.errors import RanksDisagree
from v41.plan import Plan
from v41.regions import REDUCED
from v41.runtime.exchange import WHERE, exchanged

OWN = f"region {REDUCED}"  # why a piece begins that adds up over ranks itself


def check_same_program(plan: Plan, artifacts: Mapping[str, Any]) -> str | None:
    """Returns when all ranks of each of the plan's groups have compiled the same collectives: a line for the report,
    None where there are none. Raises RanksDisagree, or RankMissing after the timeout that the group was made with."""
    told = [group for group in plan.groups if backend_of(group) != FAKE]  # of a fake group there is one process
    ours = lines(plan, artifacts)
    for group in told:
        shown = exchanged(group, "compiled program", "\n".join(ours))
        _, rank, _ = store_of(group)
        for other in (each for each in range(len(shown)) if each != rank):
            theirs = shown[other].splitlines()
            _compare(group, (rank, other), ours, theirs)
    return f"{len(plan.collectives)} collectives, the same on all ranks" if told else None


def lines(plan: Plan, artifacts: Mapping[str, Any]) -> list[str]:
    """The collectives of a plan, and the kernels that hold some."""
    kernels = [getattr(artifacts[piece.key], "kernel", None) for piece in plan.pieces if piece.border == OWN]
    return [*plan.collectives, *(f"in kernel {kernel.name}" for kernel in kernels if kernel is not None)]


def _compare(group: str, ranks: tuple[int, int], ours: list[str], theirs: list[str]) -> None:
    for at, (mine, other) in enumerate(zip_longest(ours, theirs, fillvalue="nothing more")):
        if mine != other:
            facts = {"rank": ranks[0], "other": ranks[1], "group": group, "number": at}
            raise RanksDisagree(WHERE, **facts, ours=mine, theirs=other)
