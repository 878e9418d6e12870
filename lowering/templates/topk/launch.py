"""launch: a selection as a callable: the highest level that a program holds, and what makes it.

131,072 columns, k = 512      maxima of 8 and of 64 -> 512 best of 2,048 -> of the 4,096 below them -> of 4,096 scores
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from v41.lowering.gpu import gpu_of
from v41.lowering.rowwise.launch import Kernel, comes_up_early
from v41.lowering.templates.formats import HEAD
from v41.lowering.templates.topk.text import TEXT

MOST = 4096  # picks: several times as many must fit a tile
LARGEST = 16_384  # columns that a program's registers hold
TILE = 2048  # columns of the highest level, unless there are many picks
PART = 4096  # columns of a program that makes levels


@dataclass(frozen=True)
class Levels:
    """How rows of `count` columns are gone through. levels: above the scores. fold: the one there is, on the way."""

    count: int
    group: int
    levels: int
    fold: bool
    tile: int  # that holds the highest level

    def warps(self, room: int) -> int:
        return max(4, min(16, max(self.tile, room * self.group if self.levels else 0) // 512))

    def wide(self, room: int) -> int:
        """Columns of a line of the highest level, which few threads hold."""
        return max(1, min(32, self.tile // (32 * self.warps(room))))


@dataclass(frozen=True)
class Step:
    """One launch of a kernel by its name."""

    kernel: str
    grid: tuple[int, int]
    arguments: list[Any]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def levels_of(columns: int, k: int, tile: int | None = None) -> Levels:
    """tile: most columns of the highest level."""
    room = padded(k)
    group = max(2, min(8, LARGEST // room))
    most = max(tile or TILE, 4 * room)
    count, levels = columns, 0
    while count > most:
        count, levels = -(-count // group), levels + 1
    return Levels(columns, group, levels, levels == 1 and columns <= LARGEST, max(16, padded(count)))


def padded(count: int) -> int:
    """The next power of two."""
    return 1 << (max(count, 1) - 1).bit_length()


def selection(
    scores: Tensor,
    k: int,
    picks: Tensor,
    kept: Tensor | None = None,
    lists: Tensor | None = None,
    size: int = 0,
    tile: int | None = None,
    led: bool = False,
) -> list[Step]:
    """The launches that write the k best columns of scores [rows, columns] fp32 to picks int64 [rows, k], or as many
    as there are columns if those are fewer.

    kept: bool [rows, columns], false, in which they are marked. lists [rows, lists], size: column c stands for
    lists[row, c // size] * size + c % size. led: the launch before lets the first of these come up early, and each lets
    the next (rowwise/launch.py says why that is right; here each waits before it reads anything).
    """
    rows, columns = scores.shape
    how, room, device = levels_of(columns, k, tile), padded(k), scores.device
    if not rows:
        return []

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    none, steps = empty(0, dtype=torch.int32), list[Step]()
    made, early = 0 if how.fold else how.levels, comes_up_early(device)
    lengths = [columns]
    while len(lengths) <= how.levels:
        lengths.append(-(-lengths[-1] // how.group))
    tops = empty(rows * sum(lengths[1 : made + 1]), dtype=torch.float32)
    part = min(PART, max(how.group**2, padded(columns)))
    for level in range(0, made, 2):
        constants = {"LEVEL": level, "LEVELS": min(2, made - level), "TILE": part, "GROUP": how.group, "WAITS": led,
                     "LEADS": early}  # fmt: skip
        grid = (rows, -(-lengths[level] // part))
        steps.append(Step("maxima", grid, [scores, tops, rows, columns], constants, options(4, led)))
        led = early
    constants = {"K": k, "ROOM": room, "TILE": how.tile, "WIDE": how.wide(room), "GROUP": how.group,
                 "LEVELS": how.levels, "FOLD": how.fold, "KEEPS": kept is not None, "SIZE": size,
                 "SETS": sets(device), "WAITS": led}  # fmt: skip
    chosen = empty(rows * how.levels * room, dtype=torch.int32)
    marks = none if kept is None else kept.view(torch.int8)
    tensors = [scores, tops, chosen, picks, marks, none if lists is None else lists]
    ints = [rows, columns, columns, 0 if lists is None else lists.stride(0), picks.shape[1]]
    return [*steps, Step("select", (rows, 1), [*tensors, *ints], constants, options(how.warps(room), led))]


def sets(device: torch.device) -> bool:
    """Whether scores are compared by PTX there."""
    gpu = gpu_of(device)
    return gpu is not None and not gpu.hip


def options(warps: int, led: bool) -> dict[str, Any]:
    """Triton's, of a launch that may come up early."""
    return {"num_warps": warps} | ({"launch_pdl": True} if led else {})


@dataclass
class TopK(Kernel):
    """The k best columns of each row."""

    k: int

    @classmethod
    def of(cls, k: int) -> TopK:
        """For at most MOST picks."""
        if not 0 < k <= MOST:
            raise ValueError(f"selects {k} of each row: from 1 to {MOST} fit a tile")
        return cls("select", HEAD + "\n\n" + TEXT, [], [], k)

    def steps(self, scores: Tensor, tile: int | None = None) -> tuple[list[Step], Tensor]:
        """The launches for scores fp32 [rows, columns], and what they will have written."""
        picks = torch.empty(scores.shape[0], self.k, dtype=torch.int64, device=scores.device)
        return selection(scores, self.k, picks, tile=tile), picks

    def launch(self, *tensors: Any, schedule: Any = None) -> tuple[Tensor, ...]:
        """int64 [rows, k], ascending, then -1. schedule: columns of a tile."""
        (scores,) = tensors
        steps, picks = self.steps(scores, schedule)
        self.run_steps(steps)
        return (picks,)

    def run_steps(self, steps: Sequence[Step]) -> list[Any]:
        return run_steps(self.module, steps)


def run_steps(module: Any, steps: Sequence[Step]) -> list[Any]:
    """Launches each; what Triton compiled for it."""
    return [getattr(module, s.kernel)[s.grid](*s.arguments, **s.constants, **s.options) for s in steps]
