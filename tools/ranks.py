"""ranks: a command that torchrun started runs one model together with the other processes.

    torchrun --nproc-per-node 2 -m v41.tools.cli generate ...

Each process joins the group of all, by NCCL where each has a GPU of its own, else by gloo through the host, and holds
its share of the model. All choose the same tokens, since logits have the same bits on all; the first one prints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from v41.model_def.checkpoint import slots
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import WHOLE, Share
from v41.runtime.exchange import exchanged


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def own_device(device: str) -> str:
    """`device`; of several GPUs the one whose turn it is, if none is named."""
    if device != "cuda" or not started_by_torchrun():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


@contextmanager
def joined(device: str) -> Iterator[Share]:
    """This process's share of a model on `device`: all of it, if torchrun has started no others."""
    if not started_by_torchrun():
        yield WHOLE
        return
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    dist.init_process_group("nccl" if where.type == "cuda" and alone else "gloo")
    everybody = dist.group.WORLD
    assert everybody is not None
    try:
        yield Share.of_group(everybody)
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def random_model(config: V41Config, seed: int, device: str, share: Share) -> V41ForCausalLM:
    """The share of V41ForCausalLM.random(config, seed, device), which each process makes as a whole."""
    whole = V41ForCausalLM.random(config, seed, device)
    if share.group is None:
        return whole
    with torch.random.fork_rng(), torch.device(device):
        part = V41ForCausalLM(config, share).to(device)  # frequencies come from the host
    stored = slots(whole)
    for name, slot in slots(part).items():
        slot.parameter.copy_(slot.part(stored[name].parameter))
    return part


def alike(share: Share, logits: Tensor) -> bool:
    """Whether these logits have the same bits on all ranks. All of them ask."""
    if share.group is None:
        return True
    ours = hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return len(set(exchanged(share.group, "written", ours))) == 1
