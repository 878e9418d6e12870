"""measure: what one call costs on a GPU, without launch latency and with cold inputs.

Many calls go into one CUDA graph, each on the next of several sets of inputs, together larger than the L2 cache; the
graph is replayed and the median divided by the calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

L2_BYTES = 60 << 20
REPLAYS = 40


def sets_needed(bytes_a_call: int) -> int:
    """How many sets of inputs together exceed twice the L2 cache."""
    return max(2, -(-2 * L2_BYTES // bytes_a_call))


def microseconds(
    call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int | None = None, replays: int = REPLAYS
) -> float:
    """Median time of one call, the inputs taken in turn."""
    calls = calls or max(len(inputs), 16 if len(inputs) > 8 else 4)
    for args in inputs[:2]:
        call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(*inputs[i % len(inputs)])
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    del graph
    return statistics.median(times)
