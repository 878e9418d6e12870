"""launch: a generated attention as a callable; see lowering/rowwise/launch.py for what all kernels share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from v41.lowering.gpu import gpu_of
from v41.lowering.rowwise.launch import DEEP, Call, Kernel, comes_up_early, shared_memory
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER
from v41.lowering.templates.attention.text import AHEAD, BLOCK
from v41.lowering.templates.decode import packs
from v41.lowering.templates.formats import NUMBERS

BLACKWELL = 10  # compute capability from which results lie in tensor memory
SCORING = {True: 8, False: 4}  # warps of a program that scores: of one that does both, too, or of chunks of channels


@dataclass(frozen=True)
class Spread:
    """slice: channels a program, in two launches; 0: all of them, in one. warps: of each program of the last launch;
    there `stages` tiles of keys are under way, unless all are read at once. early: it comes up while the first runs.
    whole: the first multiplies all channels at once."""

    slice: int
    warps: int = 4
    stages: int = 1
    early: bool = False
    whole: bool = True


MOST_IN_TWO = 32  # rows, in two launches
SPREADS = (  # most rows, schedule: the fastest of those that are tried on an H200
    (4, Spread(32, early=True)),
    (MOST_IN_TWO, Spread(64, 8, early=True)),  # what is read at once fills the registers of four
    (1 << 62, Spread(0, 8)),  # results of 64 heads by 512 channels fill the registers of 8 warps
)


@dataclass
class AttentionKernel(Kernel):
    """tiles: programs that hold the heads of a row, `heads` each; keys: tiles of them, and blocks in these; width: of a
    head. narrow: channels under one scale, below which no slice goes. sizes: bytes of the numbers that the units of
    packed keys are read as. counted: operands, and axes of them whose sizes the kernel is told."""

    heads: int
    tiles: int
    keys: tuple[int, int]
    width: int
    narrow: int
    sizes: dict[str, int]
    counted: tuple[tuple[str, int], ...]

    def schedule_for(self, rows: int, device: torch.device) -> Spread:
        """By rows; the last that takes two launches where the device cannot hold the results of one."""
        return fitted(by_rows(rows, takes_one_launch(device)), device)

    def candidates(self, rows: int, device: torch.device) -> list[Spread]:
        two = [Spread(32, early=True), Spread(32), Spread(64), Spread(64, 8), Spread(64, 8, early=True), Spread(128, 8)]
        two += [Spread(64, stages=3)] if self.keys[0] > AHEAD else []
        return [Spread(0, 8), *two] if takes_one_launch(device) else [fitted(each, device) for each in two]

    def prepare(self, tensors: Sequence[Any], schedule: Spread | None = None) -> Call:
        read, rows, device = self.given(tensors)
        of = self.by_name(read)
        chosen = self.chosen(tensors, rows, device) if schedule is None else schedule
        outputs, programs = self.results(rows, device), rows * self.tiles
        lone = chosen.slice == 0
        wide = self.width if lone else min(self.width, max(chosen.slice, self.narrow))
        tiles, blocks = self.keys
        early = not lone and chosen.early and comes_up_early(device)
        kept = 0 if lone else programs * blocks * self.heads
        parts = torch.empty(kept * BLOCK, dtype=torch.bfloat16, device=device)
        tops = torch.empty(kept * 2, dtype=torch.float32, device=device)
        steps = ((ALL, 1),) if lone else ((FIRST, tiles), (LATER, self.width // wide))
        constants = {"SLICE": wide, "STAGES": chosen.stages, "WHOLE": chosen.whole, "PDL": int(early),
                     "PACKED": packs(device)}  # fmt: skip
        launches = [((programs, count), {**constants, "STEP": step}) for step, count in steps if rows]
        options = {"num_warps": SCORING[chosen.whole], "enable_fp_fusion": False}
        late = {"num_warps": chosen.warps, **({"launch_pdl": True} if early else {})}
        numbers = [of[name].shape[axis] for name, axis in self.counted]
        arguments = [*self.pointers(of), *outputs, parts, tops, *numbers]
        return Call(launches, arguments, options, outputs, late=late)

    def by_name(self, read: Sequence[Tensor]) -> dict[str, Tensor]:
        names = (what.name for what in self.inputs if what is not None)
        return dict(zip(names, read, strict=True))

    def pointers(self, of: Mapping[str, Tensor]) -> list[Tensor]:
        """The inputs; packed keys twice, as numbers that hold a unit and as bytes."""
        found = []
        for name, tensor in of.items():
            size = self.sizes.get(name)
            found += [tensor] if size is None else [tensor.view(NUMBERS[size]), tensor]
        return found


def by_rows(rows: int, one_launch: bool) -> Spread:
    return next(spread for most, spread in SPREADS if (rows if one_launch else min(rows, MOST_IN_TWO)) <= most)


def fitted(spread: Spread, device: torch.device) -> Spread:
    """In chunks of channels where shared memory does not hold all of queries and keys."""
    return replace(spread, whole=shared_memory(device) >= DEEP)


def takes_one_launch(device: torch.device) -> bool:
    """Whether a program of all channels fits. On Blackwell, where results lie in tensor memory beside scores and p,
    those of 64 heads by 512 channels leave no room, and Triton makes a trap of the kernel without an error."""
    gpu = gpu_of(device)
    return shared_memory(device) >= DEEP and (gpu is None or gpu.capability[0] < BLACKWELL)
