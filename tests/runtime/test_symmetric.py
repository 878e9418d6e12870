"""Ranks vote on memory that they share: one reason is heard by all, a trial is remembered only where all passed it.

Two processes of a gloo group; memory and devices are pretended, the vote is real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.v41.rank_processes import run_ranks
from v41._compat_symmetric import group_called
from v41.channels import Workspace
from v41.errors import NotSymmetric, PeerStalled, StoreLost, V41Error
from v41.runtime import exchange, symmetric

CPU = torch.device("cpu")


def heard(call: Callable[[], Any]) -> str:
    """The reason that a rank is given; "" for none."""
    try:
        call()
    except NotSymmetric as error:
        return str(error.facts["reason"])
    return ""


def laid_out(words: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Any, object]:
    return tuple(torch.empty(words, dtype=torch.int32) for _ in range(dist.get_world_size(group))), None


def memory() -> Workspace:
    empty, record = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return Workspace(dist.get_rank(), (empty, empty), empty, record, record.clone(), 1.0, 8)


def vote(case: str) -> str:
    """What this rank hears when the second one differs in `case`."""
    second = dist.get_rank() == 1
    group = group_called("0")
    assert group is dist.group.WORLD
    if case != "device":
        symmetric._unable = lambda group, device: "no driver" if case == "unable" and second else None
        symmetric._size = lambda device, words: (8 + (case == "processors" and second), words)
        symmetric.symmetric_tensors = laid_out
        torch.cuda.synchronize = lambda device=None: None
        if case == "mapping" and second:
            symmetric.symmetric_tensors = lambda *_: [][0]
        if case in ("none", "words"):  # pinned memory there is none here
            zeros = torch.zeros
            torch.zeros = lambda *given, **named: zeros(*given, **{k: v for k, v in named.items() if k != "pin_memory"})
    return heard(lambda: symmetric.workspace(group, CPU, 64 + (case == "words" and second)))


VOTES = {
    "none": "",
    "device": "rank 0: its device is cpu",
    "unable": "rank 1: no driver",
    "processors": "processors and words differ: [8, 64] on rank 0, [9, 64] on rank 1",
    "words": "processors and words differ: [8, 64] on rank 0, [8, 65] on rank 1",
    "mapping": "rank 1: IndexError: list index out of range",
}


@pytest.mark.parametrize("case", VOTES)
def test_all_ranks_hear_the_reason_of_one(case: str, tmp_path: Path) -> None:
    assert run_ranks(vote, tmp_path, 2, case, seconds=30) == [VOTES[case]] * 2


def trials(folder: Path) -> list[tuple[str, int, bool]]:
    """Trials in turn, each with the reason heard, how often this rank has tried so far, and whether it remembers."""
    second = dist.get_rank() == 1
    group, found, tried = group_called("0"), memory(), []
    mine = folder / str(dist.get_rank())
    symmetric.remembered = lambda: mine
    torch.cuda.get_device_name = lambda device=None: "a device"
    told = []

    def trial(name: str, result: Callable[[], str | None]) -> None:
        def run(given: Workspace) -> str | None:
            assert given is found
            tried.append(name)
            return result()

        reason = heard(lambda: symmetric.trusted(found, group, name, run))
        told.append((reason, len(tried), any(mine.glob("*.json"))))

    def fail() -> str | None:
        raise PeerStalled("a kernel", rank=1, peer=0, epoch=3, seconds=1.0)

    trial("sums", lambda: "3 elements differ" if second else None)
    trial("sums", lambda: fail() if second else None)
    trial("sums", lambda: None)
    trial("sums", fail)  # remembered: not tried again
    if second:
        for file in mine.glob("*.json"):
            file.unlink()  # as on a host that has never tried
    trial("sums", lambda: None)
    trial("other sums", lambda: None)
    return told


def test_a_trial_is_remembered_where_all_ranks_passed_it(tmp_path: Path) -> None:
    first, second = run_ranks(trials, tmp_path, 2, tmp_path, seconds=30)
    assert not isinstance(first, RuntimeError), first
    assert first == second
    assert first[0] == ("rank 1: 3 elements differ", 1, False)
    assert first[1][0].startswith("rank 1: rank 1 waited 1.0 s for rank 0") and first[1][1:] == (2, False)
    assert first[2:] == [("", 3, True), ("", 3, True), ("", 4, True), ("", 5, True)]


def late() -> str:
    if dist.get_rank() == 1:
        return "stays away"
    try:
        symmetric.agree(group_called("0"), "rank 0 of 2", None)
    except V41Error as error:
        return f"{type(error).__name__}: {error}"
    return "heard"


def test_a_rank_that_does_not_vote_is_named(tmp_path: Path) -> None:
    first, _ = run_ranks(late, tmp_path, 2, seconds=2)
    assert first.startswith("RankMissing: rank 1 of group 0 has not voted in round 1 of this group within 2 s")


@pytest.mark.parametrize("at", ["add", "get"])
def test_a_store_that_is_gone_is_told_from_a_rank_that_is_late(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Any:
        raise dist.DistNetworkError("connection reset by peer")

    store = dist.HashStore()
    monkeypatch.setattr(exchange, "store_of", lambda group: (store, 1, 3))
    monkeypatch.setattr(dist.HashStore, at, gone)
    with pytest.raises(StoreLost, match="rank 1 cannot reach the store of group 0"):
        exchange.exchanged("0", "voted in round", "")
