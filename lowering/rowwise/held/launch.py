"""launch: a kernel that holds whole rows, as a callable; see launch.py one folder up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from v41.lowering.rowwise.held.products import BLOCK, Front
from v41.lowering.rowwise.launch import Call, Kernel, comes_up_early, shared_memory
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER

SHORT = 128  # elements that a program should have at least, of several rows where one has fewer
A_THREAD = 8, 32  # elements of a row, at least, and at most where a program has more than USUAL warps
USUAL, MOST_WARPS = 8, 16  # of a program: 8 were the fastest for rows of 2,304 to 20,480, at 1 to 4,096 of them
GROUPS = (1, 2, 4, 16)  # runs of a product's terms, that are tried
A_WARP = 2048  # results of a product, at most, or its sums do not fit the registers
SMALL_TILE = 32  # rows, up to which five stages were ever faster; of larger ones four, where all runs are one loop
PROGRAMS = 64, 2048  # of a first launch that is tried, at least and at most
FEW = 64  # rows, up to which a row's second launch has the chip to itself: four warps were the fastest at each


@dataclass(frozen=True)
class Spread:
    """How rows are spread: `rows` a program. A product in front: `tile` rows and `columns` results a program, `group`
    runs of its terms (all of them, if it has fewer), `split` in two launches, the second of `late` warps."""

    rows: int
    warps: int
    tile: int = 16
    columns: int = 64
    group: int = 1
    stages: int = 2
    split: bool = False
    late: int = 4


FRONTS = (  # most rows, schedule: the fastest tried on an H200 at 22 numbers of rows, 1 to 4,096: many programs of few
    # runs while rows are few, then whole sums, that a second launch has not to gather, with a warp a row there; warps
    # of the first are those of wgmma, whose order of sums all share
    (16, Spread(1, 4, 16, 64, 1, 6, split=True)),
    (128, Spread(1, 4, 32, 64, 1, 5, split=True)),
    (288, Spread(1, 4, 32, 64, 2, 5, split=True)),
    (576, Spread(1, 4, 32, 64, 4, 5, split=True)),
    (2048, Spread(1, 4, 32, 64, 16, 5, split=True, late=1)),
    (3072, Spread(1, 4, 64, 64, 16, 4, split=True, late=1)),
    (1 << 62, Spread(1, 8, 128, 128, 16, 4, split=True, late=1)),
)


@dataclass
class HeldKernel(Kernel):
    """`elements`: of the largest tile of one row, or of one part of it, all its runs taken together."""

    elements: int
    front: tuple[int, int, int, int] | None  # columns, their stride in memory, runs, and chunks a run, of a product
    parts: int = 1  # of a row, each by a program of its own

    def schedule_for(self, rows: int, device: torch.device) -> Spread:
        """One for all batches, unless a product in front has its rows tiled."""
        if self.front is not None:
            return next(schedule for most, schedule in FRONTS if rows <= most)
        count = max(1, SHORT // self.elements)
        return Spread(count, self.warps(count))

    def warps(self, rows: int) -> int:
        """Of a program of so many whole rows. They are part of the order of its sums."""
        least, most = (rows * self.elements // (32 * each) for each in A_THREAD)
        wanted = min(max(USUAL, most), MOST_WARPS, max(least, 1))
        return 1 << (wanted.bit_length() - 1)

    def candidates(self, rows: int, device: torch.device) -> list[Spread]:
        """Ways to tile a product in front. Whole rows have one way, or a row's bits would depend on its batch."""
        if self.front is None:
            return []
        tiles = [tile for tile in (16, 32, 64, 128) if min(rows, 256) // 8 <= tile <= max(16, 2 * rows)]
        ways = [Spread(1, warps, tile, columns, group, stages, True, late)
                for tile in tiles for columns in (64, 128) for group in GROUPS
                for stages in ((3, 5) if tile <= SMALL_TILE else (4,) if group == GROUPS[-1] else (3,))
                for warps in ((4, 8) if tile * columns > 1 << 12 else (4,))
                for late in ((4,) if rows <= FEW else (1, 4))
                if tile * columns <= warps * A_WARP and self._fills(-(-rows // tile), columns, group)]  # fmt: skip
        return list(dict.fromkeys([self.schedule_for(rows, device), *ways]))

    def _fills(self, tiles: int, columns: int, group: int) -> bool:
        """Whether the product of `tiles` of rows, `columns` and `group` runs a program, is neither few programs nor
        very many."""
        assert self.front is not None
        programs = tiles * -(-self.front[0] // columns) * max(1, self.front[2] // group)
        return programs <= PROGRAMS[1] and (programs >= PROGRAMS[0] or group == 1)

    def prepare(self, tensors: Sequence[Any], schedule: Spread | None = None) -> Call:
        read, rows, device = self.given(tensors)
        chosen = self.chosen(tensors, rows, device) if schedule is None else schedule
        if self.front is not None:
            chosen = fitting(chosen, shared_memory(device))
        outputs = self.results(rows, device)
        options = {"num_warps": chosen.warps, "enable_fp_fusion": False}
        if self.front is None:
            launches = [((-(-rows // chosen.rows), self.parts), {"ROWS": chosen.rows})] * bool(rows)
            return Call(launches, [*read, *outputs, rows], options, outputs)
        columns, stride, count, _ = self.front
        group = max(n for n in range(1, count + 1) if n <= chosen.group and count % n == 0)
        kept = 1 if group == count else count
        tiles = -(-rows // chosen.tile)
        step = tiles * chosen.tile * stride
        parts = count // group * -(-columns // chosen.columns)
        partials = torch.empty(kept * step, dtype=torch.float32, device=device)
        constants = {"ROWS": min(chosen.rows, chosen.tile), "TILE": chosen.tile, "COLUMNS": chosen.columns,
                     "GROUP": group, "KEPT": kept, "PARTS": parts, "STAGES": chosen.stages}  # fmt: skip
        steps = ((FIRST, tiles, parts), (LATER, -(-rows // constants["ROWS"]), 1)) if chosen.split else (
            (ALL, tiles, parts),)  # fmt: skip
        early = chosen.split and comes_up_early(device)
        constants["PDL"] = int(early)
        late = {"num_warps": chosen.late, **({"launch_pdl": True} if early else {})} if chosen.split else {}
        launches = [((wide, deep), {**constants, "STEP": step}) for step, wide, deep in steps if rows]
        counters = self._arrivals.on(device, tiles)
        return Call(launches, [*read, *outputs, partials, counters, step, rows], options, outputs, counters, late)


def fitting(spread: Spread, shared: int) -> Spread:
    """`spread` with as many stages as surely find room in `shared` bytes: all but one wait there with a block each."""
    block = (spread.tile + spread.columns) * BLOCK * torch.float32.itemsize
    return replace(spread, stages=max(min(spread.stages, shared // block + 1), 2))


def front_facts(front: Front | None) -> tuple[int, int, int, int] | None:
    """What a launch needs to know of a product in front."""
    if front is None:
        return None
    return front.columns, front.stride, *front.runs
