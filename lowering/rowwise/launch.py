"""launch: a generated kernel as a callable. It allocates outputs and scratch, picks the schedule by the number of
rows, launches.

    kernel = generate(body)                 the text is kernel.source
    outputs = kernel.launch(*inputs)        in the order of the body's placeholders; no rows, no launch

One text serves every schedule: rows a program, programs a row and warps are arguments of the launch, compiled on first
use of a bucket of row counts. Results are the same bits in every bucket.

Of two launches the second comes up early (programmatic dependent launch) where the device can do it: its programs may
start as soon as all of the first have, and wait in front of what the first stores. That is right because
    the first is an ordinary launch: all before it has ended, so inputs may be read ahead of the wait
    every program of the second waits, none leaves before, and the wait ends when the first has ended and its stores
    are seen; only behind it are partial sums read, scratch read or written, and results stored
    the second lets nothing come up early, and what follows it is an ordinary launch (or waits itself): it starts when
    the second has ended, which is after the first has
A stream that is captured keeps this: the edge between the two is programmatic, all others are full.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from v41._compat import fake_mode_of
from v41.errors import KernelsNotWritten
from v41.lowering.gpu import gpu_of
from v41.lowering.kept import told
from v41.lowering.rowwise.read import Tensor as Described
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER, Schedule, fit, tried
from v41.lowering.tuned import Tuned

DEEP = 200_000  # bytes of shared memory a program, below which more than two stages of large tiles may not fit
SPARE, TILES = 8, 1 << 14  # sets of arrival counters made at once, and tiles of rows in each


@dataclass(frozen=True)
class Call:
    """One or two launches, in order: grid and tl.constexpr arguments of each; for all, arguments in order, Triton's own
    options, and what they will have written. `late`: options of the last launch that differ."""

    launches: list[tuple[tuple[int, int], dict[str, int]]]
    arguments: list[Any]
    options: dict[str, Any]
    outputs: tuple[Tensor, ...]
    counters: Tensor | None = None  # of arrivals, among the arguments
    late: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> list[tuple[tuple[int, int], dict[str, int], dict[str, Any]]]:
        """Grid, tl.constexpr arguments and Triton's options of each launch."""
        last = len(self.launches) - 1
        return [(grid, constants, self.options | self.late if i == last else self.options)
                for i, (grid, constants) in enumerate(self.launches)]  # fmt: skip


@dataclass
class Kernel:
    """`source` is a Python file; the kernel in it is called `name`."""

    name: str
    source: str
    inputs: list[Described | None]  # None: a number that the kernel does not need
    outputs: list[Described]
    _module: Any = field(default=None, kw_only=True)
    _arrivals: Arrivals = field(default_factory=lambda: Arrivals({}, {}), kw_only=True)
    _tuned: Tuned = field(default_factory=Tuned, kw_only=True)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: not the module that was loaded, nor counters and schedules of a device."""
        return self.__dict__ | {"_module": None, "_arrivals": Arrivals({}, {}), "_tuned": Tuned()}

    @property
    def path(self) -> Path:
        """The file that holds `source`, written if it is not there: Triton reads kernels from files. KernelsNotWritten
        where none can be."""
        try:
            path = kernel_directory() / f"{self.name}_{hashlib.sha256(self.source.encode()).hexdigest()[:16]}.py"
            if not path.exists() or path.read_text() != self.source:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
                    file.write(self.source)
                os.replace(file.name, path)
        except RuntimeError as error:
            raise KernelsNotWritten("~/.cache/v41/kernels", problem=str(error)) from error  # a user without a home
        except OSError as error:
            raise KernelsNotWritten(kernel_directory(), problem=told(error)) from error
        return path

    @property
    def module(self) -> Any:
        """The file, loaded."""
        if self._module is None:
            spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
            assert spec is not None and spec.loader is not None
            self._module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._module)
        return self._module

    @property
    def function(self) -> Any:
        """The jitted kernel."""
        return getattr(self.module, self.name)

    def launch(self, *tensors: Any, schedule: Any = None) -> tuple[Tensor, ...]:
        """The body's outputs. `schedule` overrides the one that was tuned for so many rows, or is reckoned."""
        call = self.prepare(tensors, schedule)
        self.run(call)
        return call.outputs

    def run(self, call: Call) -> list[Any]:
        """Launches `call`; what Triton compiled for each launch: registers, spills, shared memory, text."""
        return [
            self.function[grid](*call.arguments, **constants, **options) for grid, constants, options in call.steps()
        ]

    def prepare(self, tensors: Sequence[Any], schedule: Any = None) -> Call:
        """The launch for `tensors`, outputs and scratch allocated."""
        raise NotImplementedError

    def schedule_for(self, rows: int, device: torch.device) -> Any:
        """A schedule by reckoning."""
        raise NotImplementedError

    def candidates(self, rows: int, device: torch.device) -> Sequence[Any]:
        """Schedules of which one may be the fastest for `rows`, and which give a row the same bits."""
        raise NotImplementedError

    def chosen(self, tensors: Sequence[Any], rows: int, device: torch.device) -> Any:
        """The schedule that was tuned for so many rows, else the reckoned one."""
        return self._tuned.schedule(self, tensors, rows, device) or self.schedule_for(rows, device)

    def given(self, tensors: Sequence[Any]) -> tuple[list[Tensor], int, torch.device]:
        """The inputs that the kernel reads, the number of rows, and where they are."""
        pairs = [(tensor, what) for tensor, what in zip(tensors, self.inputs, strict=True) if what is not None]
        rows, device = next((tensor.shape[0], tensor.device) for tensor, what in pairs if what.per_row)
        return [tensor for tensor, _ in pairs], rows, device

    def results(self, rows: int, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for the outputs."""
        return tuple(
            torch.empty([rows if size is None else size for size in what.shape], dtype=what.dtype, device=device)
            for what in self.outputs
        )


@dataclass
class GeneratedKernel(Kernel):
    """A kernel that passes over chunks of its rows. `schedules` is ascending by rows: see `schedule_for`."""

    scratch: list[tuple[torch.dtype, int]]  # dtype and elements a row of every spilled tile
    partial_width: int
    total_width: int
    runs: tuple[int, int]  # a row is so many runs of so many chunks
    width: int
    shareable: bool  # whether programs may share the columns of its later passes
    schedules: tuple[tuple[int, Schedule], ...]

    def schedule_for(self, rows: int, device: torch.device) -> Schedule:
        """The schedule of the first bucket that holds `rows`."""
        return next((schedule for most, schedule in self.schedules if rows <= most), self.schedules[-1][1])

    def candidates(self, rows: int, device: torch.device) -> list[Schedule]:
        return list(dict.fromkeys(fit(each, *self.runs, self.width) for each in tried(rows)))

    def prepare(self, tensors: Sequence[Any], schedule: Schedule | None = None) -> Call:
        """The launch for `tensors`, outputs and scratch allocated."""
        read, rows, device = self.given(tensors)
        wanted = self.chosen(tensors, rows, device) if schedule is None else schedule
        chosen = fit(wanted, *self.runs, self.width)
        if chosen.stages > 2 and shared_memory(device) < DEEP:
            chosen = replace(chosen, stages=2)
        tiles = -(-rows // chosen.rows)
        kept = self.runs[0] if chosen.group % self.runs[1] == 0 else self.runs[0] * self.runs[1]

        def empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        outputs = self.results(rows, device)
        scratch = [empty(rows * width, dtype) for dtype, width in self.scratch]
        partials = empty(tiles * kept * self.partial_width * chosen.rows)
        totals = empty(tiles * self.total_width * chosen.rows)
        counters = self._arrivals.on(device, tiles)
        limit = {"maxnreg": chosen.registers} if chosen.registers else {}
        early = comes_up_early(device)
        launches = self._launches(tiles, chosen, early)
        late = {"launch_pdl": True} if early and len(launches) == 2 else {}
        options = {"num_warps": chosen.warps, "enable_fp_fusion": False, **limit}
        given = [*read, *outputs, *scratch, partials, totals, counters, rows]
        return Call(launches, given, options, outputs, counters, late)

    def _launches(
        self, tiles: int, chosen: Schedule, early: bool = False
    ) -> list[tuple[tuple[int, int], dict[str, int]]]:
        """Everything at once, or the first phase and then what is later; nothing for no rows."""
        parts = self.runs[0] * self.runs[1] // chosen.group
        shares = chosen.shares if self.shareable else 0
        share = -(-self.width // (max(shares, 1) * chosen.tail)) * chosen.tail
        constants = {"ROWS": chosen.rows, "GROUP": chosen.group, "PARTS": parts, "TAIL": chosen.tail,
                     "STAGES": chosen.stages, "SHARE": share}  # fmt: skip
        steps = ((FIRST, parts), (LATER, -(-self.width // share))) if shares else ((ALL, parts),)
        constants["PDL"] = int(early and len(steps) == 2)
        return [((tiles, programs), {**constants, "STEP": step}) for step, programs in steps if tiles]


GIVES = Lock()  # spare counters, to one thread at a time


@dataclass
class Arrivals:
    """Counters, one a tile of rows, that every launch leaves at zero. Launches on two streams must not share them.

    They are made outside of graph capture, where zeroing is work of the graph and not yet done: for a capturing
    stream that has none, a spare set is taken.
    """

    of_stream: dict[tuple[torch.device, int], Tensor]
    spare: dict[torch.device, list[Tensor]]

    def on(self, device: torch.device, tiles: int) -> Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        counters = self.of_stream.get((device, stream))
        if counters is None or counters.numel() < tiles:
            with GIVES:
                spare = self.spare.setdefault(device, [])
                if not spare or spare[-1].numel() < tiles:
                    spare += torch.zeros(SPARE, max(tiles, TILES), dtype=torch.int32, device=device).unbind()
                    if device.type == "cuda" and fake_mode_of(spare) is None:
                        _finish(device)
                counters = self.of_stream[device, stream] = spare.pop()
        return counters


def _finish(device: torch.device) -> None:
    """What was launched on the current stream is done: other streams take spare counters without waiting for it. A
    stream that captures launches nothing yet."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; no limit off the GPU, where nothing is launched."""
    gpu = gpu_of(device)
    return 1 << 62 if gpu is None else gpu.shared


def comes_up_early(device: torch.device) -> bool:
    """Whether the second of two launches may start while the first runs: on CUDA devices from Hopper on. ROCm goes by
    the same name, with capabilities of its own."""
    gpu = gpu_of(device)
    return gpu is not None and not gpu.hip and gpu.capability >= (9, 0)


def kernel_directory() -> Path:
    """Where generated files lie, for readers, debuggers and profilers."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "v41" / "kernels"
