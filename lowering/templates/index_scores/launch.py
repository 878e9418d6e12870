"""launch: a generated indexer as a callable: scores, then its selections.

scores [T, E] fp32 (and the best of each block [T, B])  ->  picks [T, k] int64  (and kept [T, B] bool, or as a list)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v41.lowering.rowwise.launch import Kernel, comes_up_early
from v41.lowering.templates.decode import packs
from v41.lowering.templates.formats import NUMBERS
from v41.lowering.templates.index_scores.form import Form
from v41.lowering.templates.index_scores.text import MOST_TURNS, SHARED
from v41.lowering.templates.topk.launch import Step, run_steps, selection

BUSY = 512  # programs that fill a GPU
SCORES = 10  # the place of the scores among the arguments of the first launch


@dataclass(frozen=True)
class Spread:
    """rows, tiles of `block` entries: of each program. tile: columns of a tile of a selection, None by reckoning."""

    rows: int
    turns: int
    block: int = 64
    warps: int = 4
    tile: int | None = None


@dataclass
class IndexKernel(Kernel):
    """roles: of each input, what it is to the region; None: a number that no kernel needs."""

    form: Form
    roles: tuple[str | None, ...]

    def spread_for(self, rows: int, entries: int, longest: int) -> Spread:
        """By rows, entries of each and rows of the longest request: tiles as large and as many a program as keep a GPU
        busy."""
        if longest > 1 and not self.form.listed:
            tiles = -(-entries // 64) * -(-rows // SHARED)
            return Spread(SHARED, _turns(tiles // BUSY, MOST_TURNS))
        tiles = -(-entries // 128) * rows
        wanted = min(tiles // BUSY, max(4, tiles // (8 * BUSY)))  # as measured on an H200
        return Spread(1, 1) if tiles < BUSY else Spread(1, _turns(wanted, MOST_TURNS), 128)

    def steps(self, tensors: Sequence[Any], spread: Spread | None = None) -> tuple[list[Step], tuple[Tensor, ...]]:
        """The launches for `tensors`, and what they will have written."""
        form = self.form
        of = {role: tensor for role, tensor in zip(self.roles, tensors, strict=True) if role is not None}
        queries, places, numbers, cache = of["queries"], of["rows"], of["blocks"], of["cache"]
        rows, device = queries.shape[0], queries.device
        given = of.get(form.given)
        entries = numbers.shape[0] * form.spread
        if form.listed and given is not None and entries:
            entries = given.shape[1] * form.block
        chosen = spread or self.spread_for(rows, entries, places.shape[1])

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        scores, picks = empty(rows, entries), empty(rows, form.k, dtype=torch.int64)
        blocks = entries // form.block if form.keeps else 0
        best = empty(rows, blocks)
        made: dict[str, Any] = {"picks": picks}
        units = cache.view(NUMBERS[form.groups])
        tensors_read = [queries, of["weights"], units, of["positions"], of["requests"], of["columns"], places,
                        of["slots"], numbers]  # fmt: skip
        restricted = numbers if given is None else given.view(torch.int8) if given.dtype is torch.bool else given
        sizes = [
            entries,
            rows,
            *places.shape,
            *cache.shape[:2],
            places.stride(0),
            0 if given is None else given.stride(0),
        ]
        grid = (-(-rows // chosen.rows), -(-entries // (chosen.turns * chosen.block)))
        early = comes_up_early(device)
        constants = {"BLOCK": chosen.block, "PACKED": packs(device), "LEADS": early}
        options = {"num_warps": chosen.warps, "enable_fp_fusion": False}
        arguments = [*tensors_read, restricted, scores, best, *sizes, form.reach, chosen.turns]
        steps = [Step(f"scores_{chosen.rows}", grid, arguments, constants, options)] if rows and entries else []
        lists, size = (given, form.block) if form.listed else (None, 0)
        steps += selection(scores, form.k, picks, None, lists, size, chosen.tile, led=early and bool(steps))
        if form.keeps:
            marks = torch.zeros(rows, blocks, dtype=torch.bool, device=device) if "kept" in form.outputs else None
            numbered = empty(rows, min(form.keep, blocks), dtype=torch.int64)
            steps += selection(best, form.keep, numbered, marks, tile=chosen.tile)
            made |= {"kept": marks, "kept_blocks": numbered}
        return steps, tuple(made[role] for role in form.outputs)

    def launch(self, *tensors: Any, schedule: Spread | None = None) -> tuple[Tensor, ...]:
        """The region's outputs, in its order."""
        steps, outputs = self.steps(tensors, schedule)
        run_steps(self.module, steps)
        return outputs


def _turns(wanted: int, most: int) -> int:
    """A power of two."""
    return 1 << max(1, min(most, wanted)).bit_length() - 1
