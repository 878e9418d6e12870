"""Step: what all layers of one forward share, computed once: rotations, and where each row's window keys lie.

    row at position p sees window keys p - W + 1 .. p:   those of its chunk from the rows of this step,
                                                         those before it from the ring as the steps before left it

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
    """The W window keys of each row, oldest first. All [T, W]."""

    rows: Tensor  # row of this step that holds the key, if one does
    in_step: Tensor  # bool: one does
    places: Tensor  # the key's place in the ring otherwise
    visible: Tensor  # bool: not before the request's first token, nor below the floor
    late_visible: Tensor  # the same in layers that SWA bounded replay truncates


class Step(NamedTuple):
    batch: Batch
    cache: Cache
    plain: Turn  # rotation of each row in layers that see the window only
    compressed: Turn  # and in the others
    entries: dict[int, Turn]  # ratio -> rotation of the entry that the row's group becomes
    window: Window
    row_before: Tensor  # [T] the row in front; 0 for the first
    rows_of_request: Tensor  # [R, Q]; beyond the end of a chunk, rows of others


def plan_step(batch: Batch, cache: Cache, window: int, plain: Tensor, compressed: Tensor) -> Step:
    """plain, compressed: the frequencies of both kinds of layer."""
    at = batch.positions
    row = torch.arange(at.shape[0], device=at.device)
    return Step(
        batch,
        cache,
        turn(at, plain),
        turn(at, compressed),
        {m: turn(at // m * m, compressed) for m in batch.blocks},  # an entry stands at its group's first token
        window_of(batch, row, window),
        (row - 1).clamp(min=0),
        (batch.first_rows.unsqueeze(-1) + batch.longest).clamp(max=at.shape[0] - 1),
    )


def window_of(batch: Batch, row: Tensor, window: int) -> Window:
    """Where the W keys of each row lie."""
    back = torch.arange(window - 1, -1, -1, device=row.device)  # how far behind the row
    key = batch.positions.unsqueeze(-1) - back  # [T, W] positions
    return Window(
        (row.unsqueeze(-1) - back).clamp(min=0),
        key >= batch.starts.unsqueeze(-1),
        key % window,
        key >= batch.floors.unsqueeze(-1),
        key >= batch.late_floors.unsqueeze(-1),
    )
