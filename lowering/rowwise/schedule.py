"""schedule: how rows and columns of one kernel are spread over programs. Data, chosen by the number of rows; never
part of the result.

few rows      a row a program and chunk: many programs a row, so that reading the weights keeps the whole chip busy
many rows     tiles of rows, each program much of their columns: weights are read once a tile; what follows the totals
              is a launch of its own, where one program a tile would leave most of the chip idle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

ALL, FIRST, LATER = 0, 1, 2  # what a launch does: everything, the first phase, what is later
RUNS = 16  # of chunks in a row, at most; a power of two


@dataclass(frozen=True)
class Schedule:
    """`rows` a program; `group` chunks a program (chunks / group programs share a row); `tail` columns at a time in a
    later pass that totals nothing; `stages` of software pipelining; `registers` a thread at most (0: any). `shares`
    above 0: later passes are a second launch, in which so many programs share the columns of a tile of rows."""

    rows: int
    group: int
    warps: int
    tail: int
    stages: int = 1
    registers: int = 0
    shares: int = 0


def runs(chunks: int) -> tuple[int, int]:
    """How many runs a row of `chunks` chunks is cut into, and chunks a run; where that comes out even, no chunk is
    padding."""
    count = max(n for n in (1, 2, 4, 8, RUNS) if n <= max(chunks, 1) and (chunks % n == 0 or n == RUNS))
    return count, max(-(-chunks // count), 1)


def fit(schedule: Schedule, runs: int, run: int, width: int) -> Schedule:
    """`schedule` for rows of `runs` runs of `run` chunks: a program has whole runs, or a divisor of all chunks that
    is less."""
    groups = [n for n in range(1, runs * run + 1) if runs * run % n == 0 and (n <= run or n % run == 0)]
    group = max(n for n in groups if n <= max(schedule.group, 1))
    return replace(schedule, group=group, tail=min(schedule.tail, 1 << (max(width, 1) - 1).bit_length()))


FEW_TO_MANY = (  # most rows, schedule: the fastest of those tried on an H200, on rows of 80 chunks
    (4, Schedule(1, 1, 4, 8192)),
    (24, Schedule(2, 1, 4, 2048, shares=5)),
    (48, Schedule(8, 1, 4, 2048, shares=5)),
    (128, Schedule(16, 2, 4, 1024, stages=2, shares=5)),
    (512, Schedule(16, 5, 4, 512, stages=2, shares=10)),
    (2048, Schedule(32, 10, 4, 512, stages=2, shares=10)),
    (1 << 62, Schedule(64, 20, 8, 256, stages=3, shares=10)),
)


def schedules(runs: int, run: int, width: int) -> tuple[tuple[int, Schedule], ...]:
    """A schedule for every row count, ascending."""
    return tuple((most, fit(schedule, runs, run, width)) for most, schedule in FEW_TO_MANY)


SPACE: dict[int, tuple[tuple[Any, ...], ...]] = {  # rows: rows, group, warps, tail, stages, shares that are tried
    1: ((1,), (1,), (2, 4), (2048, 8192), (1,), (0, 3, 5)),
    16: ((2, 4, 8, 16), (1, 2), (4,), (2048,), (1,), (0, 5)),
    64: ((8, 16), (2, 5), (4,), (1024,), (1, 2), (0, 5)),
    256: ((16, 32), (5,), (4,), (512,), (2,), (0, 5, 10)),
    1024: ((32, 64), (5, 10, 20), (4,), (512,), (2,), (0, 10)),
    4096: ((32, 64), (20, 40), (4, 8), (256,), (2, 3), (0, 10)),
}
PER_WARP = 16  # rows of a tile that one warp holds without spilling


def tried(rows: int) -> Iterator[Schedule]:
    """What may be the fastest at `rows`, without what surely spills."""
    near = SPACE[min(SPACE, key=lambda known: abs(known - rows))]
    for tile, group, warps, tail, stages, shares in product(*near):
        if tile <= PER_WARP * warps:
            yield Schedule(tile, group, warps, tail, stages, shares=shares)
