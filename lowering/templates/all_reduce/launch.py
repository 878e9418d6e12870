"""launch: a kernel that adds over ranks as a callable; see lowering/rowwise/launch.py for what all kernels share.

    one shot     send and compute in one launch, or two       words: twice the bytes, to every rank
    two shots    scatter, gather, compute in two launches     each row once to its owner and once from it

Which one follows from the number of rows, the width, the ranks and the processors of their GPUs, hence is the same on
all ranks. In two shots it is the reduced rows that go around, not what is computed of them: a seam reads one row of
the sum and returns five or more as wide, a residual with its norm two, and every rank needs all of them. Rows beyond
MOST are a call of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from v41.channels import Channel, Workspace, aligned
from v41.errors import NoWorkspace
from v41.lowering.rowwise.launch import Call, GeneratedKernel
from v41.lowering.rowwise.read import Tensor as Described
from v41.lowering.rowwise.schedule import Schedule, fit

RESIDENT = 4  # programs of WARPS warps that a processor holds, however many registers a thread takes
WARPS = 2
# Rows and chunks a program of one shot: the first whose programs all fit on the GPU at once.
# Measured on two H200s, the critical boundary: beside the boundary alone one shot takes 0.8 µs at 1 row and 0.7 at 16,
# two shots 9.5 at 64, 16 at 256 and 150 at 4096; below 256 rows that is launches and waits more than sending.
# At 64 rows both take 17 µs, and 15.7 where the kernel makes the part; at 102 one shot takes 44, two-shot sums 17.
ONE_SHOT = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
ONE_SHOT_BYTES = 1400 << 10  # that a rank sends in words, 69 rows for two ranks: above it two shots take less time
ALONE = 4  # rows, up to which the last program of a row finishes it: no second launch
MOST = 4096  # rows of one call
FEW = 256  # rows, up to which units are single rows
MANY = (  # most rows, schedule of what follows the sum in two shots
    (128, Schedule(16, 1, 4, 1024, shares=5)),
    (512, Schedule(16, 5, 4, 512, shares=10)),
    (2048, Schedule(32, 10, 4, 512, shares=10)),
    (1 << 62, Schedule(64, 20, 8, 256, shares=10)),
)


@dataclass(frozen=True)
class Units:
    """How two shots cut rows: blocks of `rows`, each in `shares` of its columns; `columns` at a time; up to `most`
    rows."""

    rows: int
    shares: int
    columns: int
    most: int
    warps: int = 4


UNITS = (Units(1, 4, 1024, FEW), Units(4, 1, 1024, MOST))


@dataclass(frozen=True)
class Way:
    """`units` None: one shot."""

    schedule: Schedule
    units: Units | None = None


class Launch(NamedTuple):
    function: str
    grid: tuple[int, int]
    arguments: list[Any]
    constants: dict[str, int]
    options: dict[str, Any]


@dataclass
class SummingKernel(GeneratedKernel):
    """`summed`: what is added over `ranks`; part: which input is this rank's part of it, None where the kernel makes
    it; sent: which inputs it is or is made of; folded: of which inputs a row has so many rows. `tiles`: element offsets
    of the sum in a row."""

    summed: Described
    part: int | None
    sent: tuple[int, ...]
    folded: dict[int, int]
    ranks: int
    tiles: int
    block: int
    workspace: Workspace | None = field(default=None, kw_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"workspace": None}

    def bind(self, workspace: Workspace) -> None:
        """The memory that ranks share, before the first call. All kernels of a group have one."""
        assert workspace.ranks == self.ranks
        self.workspace = workspace

    @property
    def chunks(self) -> int:
        return self.runs[0] * self.runs[1]

    def way_for(self, rows: int) -> Way:
        """One shot or two, and how."""
        given = self._workspace()
        slots = RESIDENT * given.processors
        shapes = (each for each in ONE_SHOT if self._programs(rows, *each) <= slots)
        shape = next(shapes, None)
        words = 2 * rows * self.summed.elements * self.summed.dtype.itemsize * (self.ranks - 1)
        if shape is not None and words <= ONE_SHOT_BYTES:
            alone = rows <= ALONE or not self.shareable
            return Way(Schedule(*shape, WARPS, 8192 if alone else 2048, shares=0 if alone else 5))
        schedule = next(schedule for most, schedule in MANY if rows <= most)
        return Way(schedule, next(units for units in UNITS if rows <= units.most))

    def _programs(self, rows: int, height: int, group: int) -> int:
        """How many programs of one shot there are, each of `height` rows and about `group` chunks of them."""
        chosen = fit(Schedule(height, group, WARPS, 1), *self.runs, self.width)
        return -(-rows // height) * (self.chunks // chosen.group)

    def schedule_for(self, rows: int, device: torch.device) -> Any:
        return self.way_for(rows)

    def candidates(self, rows: int, device: torch.device) -> list[Any]:
        """None: what one rank finds the fastest, another may not, and ranks must go the same way."""
        return []

    def run(self, call: Call) -> list[Any]:
        """Launches `call`; what Triton compiled for each launch."""
        steps: Any = call.launches
        return [getattr(self.module, step.function)[step.grid](*step.arguments, **step.constants, **step.options)
                for step in steps]  # fmt: skip

    def prepare(self, tensors: Sequence[Any], schedule: Any = None) -> Call:
        """The launches for `tensors`, outputs and scratch allocated; `schedule` is a Way. NoWorkspace, ChannelsFull."""
        together = [each.unflatten(0, (-1, self.folded[i])) if i in self.folded else each
                    for i, each in enumerate(tensors)]  # fmt: skip
        read, rows, device = self.given(together)
        outputs = self.results(rows, device)
        launches: list[Launch] = []
        for first in range(0, rows, MOST):
            last = min(first + MOST, rows)
            inside = [each[first:last] if what.per_row else each
                      for each, what in zip(read, filter(None, self.inputs), strict=True)]  # fmt: skip
            results = [each[first:last] for each in outputs]
            way = self.way_for(last - first) if schedule is None else schedule
            launches += self._launches_of(inside, results, last - first, way)
        return Call(launches, [*read, *outputs], {}, outputs)  # type: ignore[arg-type]

    def _launches_of(self, read: list[Tensor], results: list[Tensor], rows: int, way: Way) -> list[Launch]:
        given, device = self._workspace(), read[0].device
        chosen = fit(way.schedule, *self.runs, self.width)
        height, group, parts = chosen.rows, chosen.group, self.chunks // chosen.group
        blocks = -(-rows // height)
        kept = self.runs[0] if group % self.runs[1] == 0 else self.chunks

        def empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        own = [*(empty(rows * width, dtype) for dtype, width in self.scratch),
               empty(blocks * kept * self.partial_width * height), empty(blocks * self.total_width * height),
               self._arrivals.on(device, blocks)]  # fmt: skip
        site = given.site(self.name)
        limit = int(given.patience * 1e9)
        told = [given.record, given.failed]
        launches: list[Launch] = []
        warps = chosen.warps
        if way.units is None:
            warps = min(warps, height * self.block // 32)  # no word is in two threads: see protocol.py
            slots = RESIDENT * given.processors
            most = max(slots, blocks * parts)
            words = most * self.ranks * self.tiles * group * height * self.block * self.summed.dtype.itemsize // 2
            key = ("one shot", self.summed.dtype, self.tiles, group, height, self.block, most)
            channel = given.channel(key, 2 * words, most)
            wide = self.summed.dtype.itemsize == 4
            mails = channel.part(0, 2 * words, torch.int64 if wide else torch.int32)
            mail = mails[given.rank]
            shared = [*mails, mail, mail, mail, channel.counters, *told, most, limit, site, given.rank]
            constants = {"SHOTS": 1, "BLOCK_ROWS": 1, "SHARES": 1}
        else:
            units = way.units
            launches, reduced, settled, channel = self._two_shots(read, rows, units, site, limit)
            mails = channel.part(0, aligned(1))
            shared = [*mails, mails[0], reduced, settled, channel.counters, *told, 0, limit, site, given.rank]
            constants = {"SHOTS": 2, "BLOCK_ROWS": units.rows, "SHARES": units.shares}
        options = {"num_warps": warps, "enable_fp_fusion": False}
        for grid, steps in self._launches(blocks, chosen):
            arguments = [*read, *results, *own, *shared, rows]
            launches.append(Launch(self.name, grid, arguments, steps | constants, options))
        return launches

    def _two_shots(
        self, read: list[Tensor], rows: int, units: Units, site: int, limit: int
    ) -> tuple[list[Launch], Tensor, Tensor, Channel]:
        """Scatter and gather, and what those wait for who read the sum."""
        given, part = self._workspace(), self.summed
        mine = [read[sum(what is not None for what in self.inputs[:i])] for i in self.sent]
        width, size = part.elements, part.dtype.itemsize
        count = -(-units.most // units.rows) * units.shares
        capacity = -(-units.most // units.rows // self.ranks) * units.rows
        lengths = [self.ranks * capacity * width * size // 4, units.most * width * size // 4, count * self.ranks, count]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + aligned(length))
        key = ("two shots", part.dtype, width, units)
        channel = given.channel(key, starts[-1], count)
        dtypes = (part.dtype, part.dtype, torch.int32, torch.int32)
        inboxes, homes, arrived, settled = (
            channel.part(start, length, dtype)
            for start, length, dtype in zip(starts[:-1], lengths, dtypes, strict=True)
        )
        span = -(-width // units.shares // 16) * 16
        constants = {"ROWS": units.rows, "SHARES": units.shares, "SPAN": span,
                     "COLUMNS": min(units.columns, 1 << (span - 1).bit_length()), "CAPACITY": capacity}  # fmt: skip
        blocks, options = -(-rows // units.rows), {"num_warps": units.warps, "enable_fp_fusion": False}
        epochs, rank = channel.counters, given.rank
        scatter = Launch(f"{self.name}_scatter", (blocks, units.shares),
                         [*mine, *inboxes, *arrived, epochs, rank, rows], constants, options)  # fmt: skip
        owned = len(range(rank, blocks, self.ranks))
        gather = Launch(
            f"{self.name}_gather", (owned, units.shares),
            [inboxes[rank], *homes, arrived[rank], *settled, epochs, given.record, given.failed, limit, site, rank,
             rows],
            constants, options,
        )  # fmt: skip
        return [scatter, *([gather] * bool(owned))], homes[rank], settled[rank], channel

    def _workspace(self) -> Workspace:
        if self.workspace is None:
            raise NoWorkspace(self.name, kernel=self.name)
        return self.workspace
