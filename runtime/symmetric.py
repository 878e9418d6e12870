"""symmetric: a Workspace (v41/channels.py) for the ranks of a group, on GPUs that can write each other's memory.

    workspace(group)    ranks vote -> memory laid out on all of them, zeroed -> mapped -> they vote again
    trusted(...)        the trial of the kernels that use it, unless this hardware passed it before; they vote

Collective: all ranks call it at the same point, once, before anything is captured; all of them get a workspace or
NotSymmetric, with the reason of the first rank that has one. A rank that sees no way for itself must not keep its
peers waiting, so each says what it can before any of them begins (exchange.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from v41._compat_symmetric import symmetric_tensors
from v41.channels import Workspace
from v41.errors import NotSymmetric, V41Error
from v41.runtime.exchange import exchanged

WORDS = 48 << 20  # 192 MB: the channels of one width, at up to 8 ranks
COUNTERS = 1 << 16
PATIENCE = 60.0  # seconds: longer than ranks differ in compiling their kernels
MOST_RANKS = 64


def workspace(
    group: dist.ProcessGroup, device: torch.device, words: int = WORDS, patience: float = PATIENCE
) -> Workspace:
    """The memory that `group` shares, `words` of four bytes on each rank's `device`."""
    where = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
    processors = agree(group, where, _unable(group, device), ("processors and words", _size(device, words)))
    made: tuple[Any, object] | None = None
    try:
        made = symmetric_tensors(words, device, group)
        made[0][dist.get_rank(group)].zero_()
        torch.cuda.synchronize(device)
        reason = None
    except Exception as error:  # torch raises many types here; the peers must hear of it, whatever it is
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    agree(group, where, reason)
    assert made is not None
    memory, kept = made
    found = Workspace(
        dist.get_rank(group),
        memory,
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, pin_memory=True),
        patience,
        processors[0],
    )
    found.kept = kept
    return found


def trusted(found: Workspace, group: dist.ProcessGroup, name: str, trial: Callable[[Workspace], str | None]) -> None:
    """Runs `trial`, called `name`, unless every rank remembers that ranks on such devices passed it. NotSymmetric,
    with what went wrong, on all ranks."""
    device, where = found.counters.device, f"rank {found.rank} of {found.ranks}"
    facts = (torch.cuda.get_device_name(device), found.ranks, torch.__version__, torch.version.cuda, name)
    file = remembered() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"
    if all(json.loads(each) for each in exchanged(group.group_name, "looked for trial", json.dumps(file.exists()))):
        return
    try:
        wrong = trial(found)
    except V41Error as error:
        wrong = str(error)
    agree(group, where, wrong)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts))


def remembered() -> Path:
    """Where what passed a trial is written down."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "v41" / "trials"


def agree(
    group: dist.ProcessGroup, where: str, unable: str | None, same: tuple[str, Sequence[int]] = ("", ())
) -> Sequence[int]:
    """Hears from all ranks: NotSymmetric on each of them if one is `unable` (why), or if they differ in what must be
    the `same` (its name, and what it is here)."""
    said = json.dumps((unable, list(same[1])))
    heard = [json.loads(each) for each in exchanged(group.group_name, "voted in round", said)]
    for rank, (reason, _) in enumerate(heard):
        if reason is not None:
            raise NotSymmetric(where, reason=f"rank {rank}: {reason}")
    for rank, (_, theirs) in enumerate(heard):
        if theirs != heard[0][1]:
            raise NotSymmetric(where, reason=f"{same[0]} differ: {heard[0][1]} on rank 0, {theirs} on rank {rank}")
    return same[1]


def _unable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"its device is {device}"
    if not 2 <= dist.get_world_size(group) <= MOST_RANKS:
        return f"the group has {dist.get_world_size(group)} ranks"
    return None


def _size(device: torch.device, words: int) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, words
    return torch.cuda.get_device_properties(device).multi_processor_count, words
