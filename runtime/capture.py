"""capture: a run is recorded once and repeated without Python, as a CUDA graph. Two calls, so tests can stand in.

    results = graphs.warm_up(run)                  uncaptured, on the stream that captures: workspaces, lazy compilation
    graph, results = graphs.capture(run, borders)  `run(buffers)` is recorded, not executed
    copy the borders into graph.buffers; graph.replay()  ->  graph.results

All graphs share one pool of memory. A graph may overwrite whatever in the pool nobody held when it was captured, so the
results that `capture` returns are held as long as a later capture must not touch them, and `graph.results` are the
same memory without holding it: to be read before anything replays that was captured after they were let go.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from v41._compat import without_ownership

Result = TypeVar("Result")
FIRST = -1  # a stream's priority above the default's


class Graph(Protocol):
    """One recorded run."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Where the borders are copied before a replay."""

    @property
    def results(self) -> tuple[Any, ...]:
        """What the run returned, tensors without ownership of their memory."""

    def replay(self) -> None:
        """Runs it again, on the current stream."""


class Graphs(Protocol):
    """Records runs."""

    def warm_up(self, run: Callable[[], Result]) -> Result:
        """Runs it for its results, as a capture would find the device."""

    def capture(
        self, run: Callable[[Sequence[Tensor]], tuple[Any, ...]], borders: Sequence[Tensor]
    ) -> tuple[Graph, tuple[Any, ...]]:
        """Records `run` on buffers like `borders`. What it raises goes through; nothing was executed then."""

    def follow(self) -> None:
        """What the current stream gets next comes after all steps before: they share buffers, whichever stream ran
        them."""

    def capturing(self) -> bool:
        """Whether the caller records a graph of its own just now: then nothing may be captured or replayed."""

    def apart(self) -> Graphs:
        """Records into a pool of its own, for graphs that others may not overwrite whenever they were captured."""

    def pool_bytes(self) -> int:
        """Device memory that all graphs hold together, those recorded apart too."""


@dataclass(frozen=True)
class CudaGraph:
    graph: torch.cuda.CUDAGraph
    buffers: tuple[Tensor, ...]
    results: tuple[Any, ...]

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """CUDA graphs of one device, captured on one stream into one pool.

    The stream is of high priority, which its kernels keep in the graph: those of side streams, which are of the default
    priority, take the multiprocessors that are left over (up to 128 rows decode steps were up to 50 µs shorter so, and
    none more than 1.1 longer: overlap-cut-*.json, where that way is called yields).
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = torch.cuda.Stream(device, priority=FIRST) if stream is None else stream
        self.latest: torch.cuda.Stream | None = None  # that ran a step
        self.pool = torch.cuda.graph_pool_handle()
        self.pools = [self.pool]

    def warm_up(self, run: Callable[[], Result]) -> Result:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = run()
        current.wait_stream(self.stream)
        return results

    def capture(
        self, run: Callable[[Sequence[Tensor]], tuple[Any, ...]], borders: Sequence[Tensor]
    ) -> tuple[CudaGraph, tuple[Any, ...]]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.stream.device)
        with no_collection(), torch.cuda.stream(self.stream):
            # thread_local: what other threads do meanwhile (a data loader, a profiler) is no part of this step
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                buffers = tuple(torch.empty_like(border) for border in borders)
                results = run(buffers)
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken, and says so once more
                    graph.capture_end()
                raise
            graph.capture_end()
        return CudaGraph(graph, borrowed(buffers), borrowed(results)), results

    def follow(self) -> None:
        if self.capturing():  # no graph may wait for what is outside of it, and no step of ours runs there
            return
        current = torch.cuda.current_stream(self.stream.device)
        if self.latest is not None and self.latest != current:
            current.wait_stream(self.latest)
        self.latest = current

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def apart(self) -> CudaGraphs:
        other = CudaGraphs(self.stream.device, self.stream)
        self.pools.append(other.pool)
        return other

    def pool_bytes(self) -> int:
        blocks, pools = torch.cuda.memory_snapshot(), [tuple(pool) for pool in self.pools]
        return sum(b["total_size"] for b in blocks if tuple(b.get("segment_pool_id", ())) in pools)


@contextmanager
def no_collection() -> Iterator[None]:
    """Under it Python collects no cycles: freeing a graph or an event while another is captured would break that one.

    torch.cuda.graph collects ahead of a capture instead, and empties the allocator: a tenth of a second for each.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def borrowed(values: Sequence[Any]) -> tuple[Any, ...]:
    """The same values, tensors without ownership of their memory."""
    with torch.inference_mode(False):  # a later step may run outside of that mode
        return tuple(without_ownership(value) if isinstance(value, Tensor) else value for value in values)
