"""Ranks of a model in processes of their own, and whether their logits are those of one process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import Share
from v41.tools.compare import Agreement, agree
from v41.tools.exact import Exact
from v41.tools.last_bits import NUDGED, Nudged

IDS = [[(7 * i + 3 * k) % 500 for i in range(n + 4)] for k, n in enumerate((37, 1, 18))]


@torch.no_grad()
def logits_of(model: V41ForCausalLM, forward: Any = None) -> Tensor:
    """Three prompts in one step, all rows of the longest; then four tokens each."""
    cache, forward = Cache.zeros(model.config, 3, 64), model if forward is None else forward
    steps = [[Chunk(ids, 0, slot, len(ids) - 4, every_logit=slot == 0) for slot, ids in enumerate(IDS)]]
    steps += [[Chunk(ids, len(ids) - n, slot, len(ids) - n + 1) for slot, ids in enumerate(IDS)] for n in (4, 3, 2, 1)]
    return torch.cat([forward(build_batch(model.config, cache, chunks), cache) for chunks in steps])


def run_rank(folder: Path, rank: int, world: int, compiled: str | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    model = V41ForCausalLM.from_checkpoint(folder, share=Share.of_group(dist.group.WORLD))
    forward = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
    torch.save(logits_of(model, forward), folder / f"logits of rank {rank}")
    dist.destroy_process_group()


def run_ranks(folder: Path, world: int, compiled: str | None = None) -> list[Tensor]:
    """The logits of each rank, in processes of their own."""
    processes = [
        multiprocessing.get_context("fork").Process(target=run_rank, args=(folder, rank, world, compiled))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * world
    return [torch.load(folder / f"logits of rank {rank}") for rank in range(world)]


def agreement(ours: Tensor, model: V41ForCausalLM) -> Agreement:
    """By the criterion of every compiled run (compare.py): rounding the parts moves no row much further than last bits
    do, and the argmax is another one only where these excuse it."""
    last_bits = []
    for mode in (Exact(), *map(Nudged, range(NUDGED))):
        with mode:
            last_bits.append(logits_of(model))
    return agree(logits_of(model), ours, torch.stack(last_bits))
