"""launch: a generated attention as a callable; see lowering/rowwise/launch.py for what all kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from v41.lowering.rowwise.launch import Call, Kernel
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER


@dataclass(frozen=True)
class Spread:
    """slice: channels a program, in two launches; 0: all of them, in one. warps: of each program."""

    slice: int
    warps: int = 4


SPREADS = (  # most rows, schedule
    (4, Spread(64)),
    (64, Spread(128)),
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

    def schedule_for(self, rows: int) -> Spread:
        return next(spread for most, spread in SPREADS if rows <= most)

    def prepare(self, tensors: Sequence[Any], schedule: Spread | None = None) -> Call:
        read, rows, device = self.given(tensors)
        chosen = self.schedule_for(rows) if schedule is None else schedule
        outputs, programs = self.results(rows, device), rows * self.tiles
        whole = chosen.slice == 0
        wide = self.width if whole else min(self.width, max(chosen.slice, self.narrow))
        held = 0 if whole else programs * self.blocks * self.heads * self.block
        scores = torch.empty(held, dtype=torch.float32, device=device)
        steps = ((ALL, 1),) if whole else ((FIRST, self.blocks), (LATER, self.width // wide))
        launches = [((programs, parts), {"SLICE": wide, "STEP": step}) for step, parts in steps if rows]
        options = {"num_warps": chosen.warps, "enable_fp_fusion": False}
        return Call(launches, [*read, *outputs, scores], options, outputs)
