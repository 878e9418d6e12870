"""launch: a selection as a callable, in as many rounds as its rows are long.

131,072 columns, k = 512      16 tiles of 8,192 -> the 512 best of each -> one tile of 8,192 -> picks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from v41.lowering.rowwise.launch import Kernel
from v41.lowering.templates.formats import HEAD
from v41.lowering.templates.topk.text import TEXT

MOST = 4096  # picks: several times as many must fit a tile
LARGEST = 16_384  # columns of a tile, which its program's registers hold
TILES = (1024, 2048, 4096, 8192, LARGEST)


@dataclass(frozen=True)
class Round:
    """One launch: `parts` tiles of each row's `count` columns."""

    count: int
    tile: int
    parts: int

    @property
    def warps(self) -> int:
        return max(4, min(16, self.tile // 512))

    @property
    def wide(self) -> int:
        """Columns of a line, which one thread holds."""
        return max(4, min(32, self.tile // 512))


@dataclass(frozen=True)
class Step:
    """One launch of a kernel by its name."""

    kernel: str
    grid: tuple[int, int]
    arguments: list[Any]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def rounds(rows: int, columns: int, k: int, tile: int | None = None) -> list[Round]:
    """The rounds that leave k of `columns`. tile: columns of a tile in all but the last (by reckoning)."""
    found, count = list[Round](), columns
    while not found or found[-1].parts > 1:
        size = max(tile, 2 * padded(k)) if tile else _best(rows, count, k)[1]
        found.append(Round(count, size, -(-max(count, 1) // size)))
        count = found[-1].parts * k
    return found


@cache
def _best(rows: int, count: int, k: int) -> tuple[float, int]:
    """Least µs for this round and those behind it, and the tile of this one. A tile takes a program 4.2 µs and 1 for
    each 2,100 columns, a GPU 1 for each 300,000 columns of all programs (fitted to rounds measured on an H200)."""
    whole, least = max(16, padded(count)), 2 * padded(k)
    sizes = [size for size in TILES if least <= size < whole] + [whole] * (whole <= max(LARGEST, 2 * least))
    found = []
    for size in sizes:
        parts = -(-max(count, 1) // size)
        spent = 4.2 + size / 2100 + rows * parts * size / 300_000
        found.append((spent + (_best(rows, parts * k, k)[0] if parts > 1 else 0), size))
    return min(found)


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
) -> list[Step]:
    """The launches that write the k best columns of scores [rows, columns] fp32 to picks int64 [rows, k], or as many
    as there are columns if those are fewer.

    kept: bool [rows, columns], false, in which they are marked. lists [rows, lists], size: column c stands for
    lists[row, c // size] * size + c % size.
    """
    rows, columns = scores.shape
    steps, none = list[Step](), torch.empty(0, dtype=torch.int32, device=scores.device)
    given, at = scores, none
    marks = none if kept is None else kept.view(torch.int8)
    chosen = rounds(rows, columns, k, tile) if rows else []
    for each in chosen:
        last = each is chosen[-1]
        shape = (0,) if last else (rows, each.parts, k)
        left, left_at = (torch.empty(shape, dtype=d, device=scores.device) for d in (torch.float32, torch.int32))
        step = 0 if lists is None else lists.stride(0)
        tensors = [given, at, left, left_at, picks, marks, none if lists is None else lists]
        constants = {"K": k, "GROUPS": padded(k), "TILE": each.tile, "WIDE": each.wide, "FIRST": each is chosen[0],
                     "LAST": last, "KEEPS": kept is not None, "SIZE": size}  # fmt: skip
        numbers = [each.count, columns, step, picks.shape[1]]
        grid = (rows, each.parts)
        steps.append(Step("select", grid, [*tensors, *numbers], constants, {"num_warps": each.warps}))
        given, at = left, left_at
    return steps


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
