"""Step: what all layers of one forward share, computed once: rotations, and where each row's window keys lie.

    row t at position p sees window keys p - W + 1 .. p:   from the rows of this step where they begin at or below the key,
                                                           else from the ring as the steps before left it

So a chunk may be longer than the window, and the ring is written once, after it was read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from v41.model_def.batch import Batch
from v41.model_def.cache import Cache
from v41.model_def.rope import Turn, turn


class Window(NamedTuple):
    """Row t's W window keys, oldest first. All [T, W]."""

    rows: Tensor  # the row of this step that holds the key, where it is in this step
    in_step: Tensor  # bool
    places: Tensor  # its place in the ring otherwise
    visible: Tensor  # bool: not before the request's start, nor below the floor
    late_visible: Tensor  # the same in layers that SWA bounded replay truncates


class Step(NamedTuple):
    batch: Batch
    cache: Cache
    plain: Turn  # rotation of each row in layers that see the window only
    compressed: Turn  # and in the others
    entries: dict[int, Turn]  # ratio -> rotation of the entry whose group the row belongs to
    window: Window
    row_before: Tensor  # [T] the row in front, 0 for the first
    rows_of_request: Tensor  # [R, Q]; rows of others beyond a chunk's end


def plan_step(batch: Batch, cache: Cache, window: int, plain: Tensor, compressed: Tensor) -> Step:
    """plain, compressed: the frequencies of both tables."""
    at = batch.positions
    rows = torch.arange(at.shape[0], device=at.device)
    return Step(
        batch,
        cache,
        turn(at, plain),
        turn(at, compressed),
        {m: turn(at // m * m, compressed) for m in batch.blocks},  # an entry stands at its group's first token
        window_of(batch, rows, window),
        (rows - 1).clamp(min=0),
        (batch.first_rows.unsqueeze(-1) + batch.longest).clamp(max=at.shape[0] - 1),
    )


def window_of(batch: Batch, rows: Tensor, window: int) -> Window:
    """Where the W keys of each row lie."""
    back = torch.arange(window - 1, -1, -1, device=batch.positions.device)  # how far behind the row
    keys = batch.positions.unsqueeze(-1) - back  # [T, W] positions
    return Window(
        (rows.unsqueeze(-1) - back).clamp(min=0),
        keys >= batch.starts.unsqueeze(-1),
        keys % window,
        keys >= batch.floors.unsqueeze(-1),
        keys >= batch.late_floors.unsqueeze(-1),
    )
