"""launch: a generated attention as a callable; see lowering/rowwise/launch.py for what all kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from v41.lowering.rowwise.launch import DEEP, Call, Kernel, shared_memory
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER

BLACKWELL = 10  # compute capability from which results lie in tensor memory


@dataclass(frozen=True)
class Spread:
    """slice: channels a program, in two launches; 0: all of them, in one. warps: of each program."""

    slice: int
    warps: int = 4


MOST_IN_TWO = 64  # rows, in two launches
SPREADS = (  # most rows, schedule
    (4, Spread(64)),
    (MOST_IN_TWO, Spread(128)),
    (1 << 62, Spread(0, 8)),  # results of 64 heads by 512 channels fill the registers of 8 warps
)


@dataclass
class AttentionKernel(Kernel):
    """tiles: programs that hold the heads of a row, `heads` each; `blocks` of `block` keys; width: of a head. narrow:
    channels under one scale, below which no slice goes."""

    heads: int
    tiles: int
    block: int
    blocks: int
    width: int
    narrow: int

    def schedule_for(self, rows: int, device: torch.device) -> Spread:
        """By rows; the last that takes two launches where the device cannot hold the results of one."""
        return by_rows(rows, takes_one_launch(device))

    def candidates(self, rows: int, device: torch.device) -> list[Spread]:
        two = [Spread(slice, warps) for slice in (32, 64, 128, 256) for warps in (4, 8)]
        return [Spread(0, 8), *two] if takes_one_launch(device) else two

    def prepare(self, tensors: Sequence[Any], schedule: Spread | None = None) -> Call:
        read, rows, device = self.given(tensors)
        chosen = self.chosen(tensors, rows, device) if schedule is None else schedule
        outputs, programs = self.results(rows, device), rows * self.tiles
        whole = chosen.slice == 0
        wide = self.width if whole else min(self.width, max(chosen.slice, self.narrow))
        held = 0 if whole else programs * self.blocks * self.heads * self.block
        scores = torch.empty(held, dtype=torch.float32, device=device)
        steps = ((ALL, 1),) if whole else ((FIRST, self.blocks), (LATER, self.width // wide))
        launches = [((programs, parts), {"SLICE": wide, "STEP": step}) for step, parts in steps if rows]
        options = {"num_warps": chosen.warps, "enable_fp_fusion": False}
        return Call(launches, [*read, *outputs, scores], options, outputs)


def by_rows(rows: int, one_launch: bool) -> Spread:
    return next(spread for most, spread in SPREADS if (rows if one_launch else min(rows, MOST_IN_TWO)) <= most)


@cache
def takes_one_launch(device: torch.device) -> bool:
    """Whether a program of all channels fits. On Blackwell, where results lie in tensor memory beside scores and p,
    those of 64 heads by 512 channels leave no room, and Triton makes a trap of the kernel without an error."""
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= BLACKWELL
    return shared_memory(device) >= DEEP and not blackwell
