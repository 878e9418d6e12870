"""launch: a generated attention as a callable; see lowering/rowwise/launch.py for what all kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v41.lowering.gpu import gpu_of
from v41.lowering.rowwise.launch import DEEP, Call, Kernel, shared_memory
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER
from v41.lowering.templates.attention.text import BLOCK
from v41.lowering.templates.decode import packs
from v41.lowering.templates.formats import NUMBERS

BLACKWELL = 10  # compute capability from which results lie in tensor memory


@dataclass(frozen=True)
class Spread:
    """slice: channels a program, in two launches; 0: all of them, in one. warps: of each program, or of the last
    launch; there `stages` blocks are under way. keys, first_warps: of each program of the first launch."""

    slice: int
    warps: int = 4
    stages: int = 1
    keys: int = BLOCK
    first_warps: int = 4


MOST_IN_TWO = 64  # rows, in two launches
SPREADS = (  # most rows, schedule: the fastest of those that are tried on an H200, at 1 to 96 rows
    (4, Spread(64, keys=16)),
    (MOST_IN_TWO, Spread(64)),
    (1 << 62, Spread(0, 8)),  # results of 64 heads by 512 channels fill the registers of 8 warps
)


@dataclass
class AttentionKernel(Kernel):
    """tiles: programs that hold the heads of a row, `heads` each; `blocks` of keys; width: of a head. narrow: channels
    under one scale, below which no slice goes. sizes: bytes of the numbers that the units and the scales of packed
    keys are read as. counted: operands, and axes of them whose sizes the kernel is told."""

    heads: int
    tiles: int
    blocks: int
    width: int
    narrow: int
    sizes: dict[str, tuple[int, int]]
    counted: tuple[tuple[str, int], ...]

    def schedule_for(self, rows: int, device: torch.device) -> Spread:
        """By rows; the last that takes two launches where the device cannot hold the results of one."""
        return by_rows(rows, takes_one_launch(device))

    def candidates(self, rows: int, device: torch.device) -> list[Spread]:
        two = [Spread(32, stages=3, keys=16), Spread(64, keys=16), Spread(64), Spread(64, stages=3), Spread(128),
               Spread(128, 8), Spread(128, stages=3)]  # fmt: skip
        return [Spread(0, 8), *two] if takes_one_launch(device) else two

    def prepare(self, tensors: Sequence[Any], schedule: Spread | None = None) -> Call:
        read, rows, device = self.given(tensors)
        of = self.by_name(read)
        chosen = self.chosen(tensors, rows, device) if schedule is None else schedule
        outputs, programs = self.results(rows, device), rows * self.tiles
        whole = chosen.slice == 0
        wide = self.width if whole else min(self.width, max(chosen.slice, self.narrow))
        keys = self.blocks * BLOCK
        scores = torch.empty(0 if whole else programs * keys * self.heads, dtype=torch.float32, device=device)
        steps = ((ALL, 1),) if whole else ((FIRST, keys // chosen.keys), (LATER, self.width // wide))
        constants = {"SLICE": wide, "KEYS": chosen.keys, "STAGES": chosen.stages, "PACKED": packs(device)}
        launches = [((programs, parts), {**constants, "STEP": step}) for step, parts in steps if rows]
        options = {"num_warps": chosen.warps if whole else chosen.first_warps, "enable_fp_fusion": False}
        numbers = [of[name].shape[axis] for name, axis in self.counted]
        arguments = [*self.pointers(of), *outputs, scores, *numbers]
        return Call(launches, arguments, options, outputs, late={"num_warps": chosen.warps})

    def by_name(self, read: Sequence[Tensor]) -> dict[str, Tensor]:
        names = (what.name for what in self.inputs if what is not None)
        return dict(zip(names, read, strict=True))

    def pointers(self, of: Mapping[str, Tensor]) -> list[Tensor]:
        """The inputs; packed keys twice, as numbers that hold a unit and as such that hold scales."""
        found = []
        for name, tensor in of.items():
            sizes = self.sizes.get(name)
            found += [tensor] if sizes is None else [tensor.view(NUMBERS[size]) for size in sizes]
        return found


def by_rows(rows: int, one_launch: bool) -> Spread:
    return next(spread for most, spread in SPREADS if (rows if one_launch else min(rows, MOST_IN_TWO)) <= most)


def takes_one_launch(device: torch.device) -> bool:
    """Whether a program of all channels fits. On Blackwell, where results lie in tensor memory beside scores and p,
    those of 64 heads by 512 channels leave no room, and Triton makes a trap of the kernel without an error."""
    gpu = gpu_of(device)
    return shared_memory(device) >= DEEP and (gpu is None or gpu.capability[0] < BLACKWELL)
