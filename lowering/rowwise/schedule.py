"""schedule: how rows and columns of one kernel are spread over programs. Data, chosen by the number of rows; never part of the result.

    few rows      a row a program and chunk: many programs a row, so that reading the weights keeps the whole chip busy
    many rows     tiles of rows, each program all or much of their columns: weights are read once a tile
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """`rows` a program; `group` chunks a program (chunks / group programs share a row); `tail` columns at a time in a later pass
    that totals nothing; `stages` of software pipelining; `batch` partial totals under way at once; `registers` a thread at most (0: any)."""

    rows: int
    group: int
    warps: int
    tail: int
    stages: int = 1
    batch: int = 8
    registers: int = 0


def fit(schedule: Schedule, chunks: int, width: int) -> Schedule:
    """`schedule` for a row of `chunks` chunks and `width` columns: group and batch divide the chunks, tail is no longer than a row."""
    divisor = lambda most: max(d for d in range(1, chunks + 1) if chunks % d == 0 and d <= max(most, 1))
    row = 1 << (max(width, 1) - 1).bit_length()
    return Schedule(schedule.rows, divisor(schedule.group), schedule.warps, min(schedule.tail, row), schedule.stages,
                    divisor(schedule.batch), schedule.registers)  # fmt: skip


FEW_TO_MANY = (  # most rows, schedule; for rows of about 80 chunks
    (4, Schedule(1, 1, 4, 8192, batch=80)),
    (32, Schedule(2, 2, 4, 4096, batch=40)),
    (128, Schedule(8, 4, 4, 1024, batch=20)),
    (512, Schedule(16, 10, 4, 512, batch=16)),
    (2048, Schedule(32, 20, 4, 256, batch=16)),
    (1 << 62, Schedule(64, 20, 8, 128, batch=8)),
)


def schedules(chunks: int, width: int) -> tuple[tuple[int, Schedule], ...]:
    """A schedule for every row count, ascending."""
    return tuple((most, fit(schedule, chunks, width)) for most, schedule in FEW_TO_MANY)
