"""run_ranks: a function runs in several processes that form a gloo group; what each returns, or raised."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _run(run: Callable[..., Any], folder: Path, rank: int, world: int, seconds: float, given: tuple[Any, ...]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    try:
        made = run(*given)
    except BaseException as error:
        made = RuntimeError("".join(traceback.format_exception(error)))
    torch.save(made, folder / f"of rank {rank}")
    if not isinstance(made, RuntimeError):
        dist.barrier()
        dist.destroy_process_group()


def run_ranks(run: Callable[..., Any], folder: Path, world: int, *given: Any, seconds: float = 600) -> list[Any]:
    """run(*given) in `world` processes. What raised is a RuntimeError with its text. seconds: the group's patience."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run, args=(run, folder, rank, world, seconds, given)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
        process.kill()
    return [torch.load(folder / f"of rank {rank}", weights_only=False) for rank in range(world)]
