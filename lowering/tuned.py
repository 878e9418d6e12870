"""tuned: the fastest schedule of a kernel for some number of rows on this device, measured once and kept on disk.

    with tuning():
        kernel.launch(*tensors)     rows that nobody has tuned: every candidate is timed on these tensors, the best kept
    kernel.launch(*tensors)         that one, in this process and in later ones; where none is kept, by reckoning

Rows are tuned by bucket, the next power of two. A kernel gives the same bits with each of its candidates, so what is
kept changes times alone; one without candidates is never tuned. One file a kernel, device and set of versions
(kept.py); one of other fields is a miss with a warning, too. Who writes reads again first and replaces the file whole,
so of two processes that tune at once both leave a whole file, and at most the slower one's buckets.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from v41.lowering.kept import TunedWarning, directory, entries, put, unusable
from v41.lowering.measure import microseconds, sets_needed

REPLAYS = 15
MOST_SETS = 32  # of inputs: rows that the kernel before has just written lie in the L2 cache anyway
MOST_BYTES = 1 << 30  # of inputs that are copied
TUNING: ContextVar[bool] = ContextVar("v41_tuning", default=False)
Measure = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], float]


class Tunable(Protocol):
    """What is tuned: a kernel's text, how it is launched, and which schedules may be its fastest."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    def candidates(self, rows: int, device: torch.device) -> Sequence[Any]: ...
    def launch(self, *tensors: Any, schedule: Any = None) -> Any: ...


@contextmanager
def tuning() -> Iterator[None]:
    """Under it kernels are tuned for every bucket of rows that they meet for the first time."""
    token = TUNING.set(True)
    try:
        yield
    finally:
        TUNING.reset(token)


class Tuning:
    """The boxed function `run`, each call of it under `tuning()`."""

    _boxed_call = True

    def __init__(self, run: Callable[[list[Any]], tuple[Any, ...]]) -> None:
        self.run = run

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        with tuning():
            return self.run(inputs)


def bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (max(rows, 1) - 1).bit_length()


@dataclass
class Tuned:
    """Schedules of one kernel by bucket, of each device, read when first asked for."""

    of_device: dict[torch.device, dict[int, Any]] = field(default_factory=dict)

    def schedule(self, kernel: Tunable, tensors: Sequence[Any], rows: int, device: torch.device) -> Any | None:
        """The schedule for `rows`; None where none was tuned. Under `tuning()` it is found now, but never while a CUDA
        graph is captured."""
        if device.type != "cuda" or not rows:
            return None
        known = self.of_device.get(device)
        if known is None:
            known = self.of_device[device] = read(file_of(kernel, device), kernel, device)
        found = known.get(bucket(rows))
        if found is not None or not TUNING.get() or torch.cuda.is_current_stream_capturing():
            return found
        return self.tune(kernel, tensors, rows, device)

    def tune(
        self, kernel: Tunable, tensors: Sequence[Any], rows: int, device: torch.device, measure: Measure | None = None
    ) -> Any | None:
        """The fastest candidate on sets of inputs like `tensors`; kept in memory and on disk."""
        if not (candidates := kernel.candidates(rows, device)):
            return None
        sets, timed = copies_of(tensors), measure or _measure
        tried: dict[Any, float] = {}
        for schedule in candidates:
            with suppress(Exception):  # one that asks for more shared memory than there is, is none of the fastest
                tried[schedule] = timed(partial(kernel.launch, schedule=schedule), sets)
        if not tried:
            warnings.warn(f"{kernel.name} could not be tuned for {rows} rows: no candidate ran", TunedWarning, 2)
            return None
        best = min(tried, key=tried.__getitem__)
        self.of_device.setdefault(device, {})[bucket(rows)] = best
        write(file_of(kernel, device), kernel, device, bucket(rows), best, tried[best])
        return best


def _measure(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    return microseconds(call, sets, replays=REPLAYS)


def copies_of(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """`tensors` and as many copies, laid out alike, as take the L2 cache twice."""
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    count = min(sets_needed(max(size, 1)), MOST_SETS) if size <= MOST_BYTES else 1
    return [tuple(tensors), *(tuple(map(copied, tensors)) for _ in range(count - 1))]


def copied(value: Any) -> Any:
    """A tensor's copy with its strides: numbers in the gaps go with it, and those that several places share, once."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride(), 0)


# ---- on disk


def file_of(kernel: Tunable, device: torch.device) -> Path:
    """Named by everything that a time depends on: text, device, versions."""
    import triton  # type: ignore[import-untyped]

    facts = [kernel.source, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
    told = json.dumps([*map(str, facts), torch.__version__, str(torch.version.cuda), triton.__version__])
    return directory() / f"{kernel.name}_{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"


def read(path: Path, kernel: Tunable, device: torch.device) -> dict[int, Any]:
    """What `path` says, by bucket; nothing where there is no file, and a warning where it is of no use."""
    try:
        return {int(most): made(entry["schedule"], kernel.candidates(int(most), device)[0])
                for most, entry in entries(path).items()}  # fmt: skip
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return unusable(path, f"{type(error).__name__}: {error}")


def made(told: dict[str, Any], like: Any) -> Any:
    """A schedule of the class of `like` from its fields; ValueError if they are other ones."""
    types = {each.name: type(getattr(like, each.name)) for each in fields(like)}
    if {name: type(value) for name, value in told.items()} != types:
        raise ValueError(f"not the fields of a {type(like).__name__}: {told}")
    return type(like)(**told)


def write(path: Path, kernel: Tunable, device: torch.device, most: int, schedule: Any, us: float) -> None:
    """Adds one bucket."""
    kept = entries(path) if read(path, kernel, device) else {}
    put(path, kept | {str(most): {"schedule": asdict(schedule), "us": round(us, 3)}})
