"""bench capacity: what a step of a small model costs on this GPU at 1 and 64 fold cache capacity: it should not differ.

    us          a decode step from the first launch to the last, CUDA events, median; both capacities in turn
    device_us   its kernels alone, by the profiler
    bytes       the most it allocates while it runs

A cache that a step copies shows in all three: at 64 fold it is close to a gigabyte. The JSON is written after every
codegen, of which Inductor's takes minutes to compile.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU
from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.report import collect
from v41.tools.bench import timing
from v41.tools.inspect import first_layers

FOLDS, CAPACITY = (1, 64), 8192  # entries a request
LENGTHS = (23, 40, 1)  # rows that each request has read before the step
REPEATS, PROFILED = 30, 5
LIMIT = 1.05

Step = Callable[[], object]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench capacity` does; 1 where a ratio is above LIMIT."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench capacity", found="torch sees no CUDA device")
    result: dict[str, Any] = {
        "case": "capacity", **timing.provenance(), "shape": f"preset tiny, 4 layers, {len(LENGTHS)} requests",
        "capacity": [fold * CAPACITY for fold in FOLDS], "records": {}, "ratios": {},
    }  # fmt: skip
    for codegen in arguments.codegen:
        result["records"][codegen] = costs = measure(codegen)
        result["ratios"][codegen] = each = ratios_of(costs)
        result["holds"] = all(ratio <= LIMIT for ratios in result["ratios"].values() for ratio in ratios.values())
        print(f"{codegen:<10}" + "".join(f"{name:>12} x {ratio:.3f}" for name, ratio in each.items()), flush=True)
        path = timing.save(result, arguments.out)
    print(f"written to {path}")
    return 0 if result["holds"] else 1


def ratios_of(costs: dict[int, dict[str, float]]) -> dict[str, float]:
    """Each cost at the larger capacity over that at the smaller."""
    small, large = (costs[fold] for fold in FOLDS)
    return {name: round(large[name] / small[name], 4) for name in small}


@torch.no_grad()
def measure(codegen: str, capacity: int = CAPACITY) -> dict[int, dict[str, float]]:
    """By fold: us, device_us and bytes of a step."""
    torch.compiler.reset()
    positions = max(FOLDS) * capacity  # as many as the largest cache has room for
    config = first_layers(V41Config.preset("tiny").replace(max_position_embeddings=positions), 4)
    model = V41ForCausalLM.random(config, 0, "cuda")
    options: dict[str, Any] = {"codegen": codegen, "capture": "off"}  # a graph's memory is its own, and no step's
    compiled = torch.compile(model, backend="v41", fullgraph=True, options=options)
    with collect() as reports:
        steps = {fold: prepared(compiled, config, fold * capacity) for fold in FOLDS}
    assert all(bool(report.kernels) == (codegen == "triton") and not report.fallbacks for report in reports)
    times: dict[int, list[float]] = {fold: [] for fold in FOLDS}
    peaks: dict[int, list[int]] = {fold: [] for fold in FOLDS}
    for _ in range(REPEATS):
        for fold, step in steps.items():
            us, most = cost(step)
            times[fold].append(us)
            peaks[fold].append(most)
    return {
        fold: {
            "us": round(statistics.median(times[fold]), 1),
            "device_us": round(statistics.median(kernel_us(step) for _ in range(PROFILED)), 1),
            "bytes": statistics.median(peaks[fold]),
        }
        for fold, step in steps.items()
    }


def prepared(forward: Callable[[Batch, Cache], Tensor], config: V41Config, capacity: int) -> Step:
    """A step of decoding on a cache that holds what LENGTHS says. It may run again and again: it writes the same."""
    cache = Cache.zeros(config, len(LENGTHS), capacity, "cuda")
    prefill = [Chunk(list(range(n)), 0, slot) for slot, n in enumerate(LENGTHS)]
    decode = [Chunk(list(range(n + 1)), n, slot) for slot, n in enumerate(LENGTHS)]
    forward(build_batch(config, cache, prefill), cache)
    batch = build_batch(config, cache, decode)
    forward(batch, cache)
    return lambda: forward(batch, cache)


def cost(step: Step) -> tuple[float, int]:
    """µs between the first launch and the last, and the most bytes allocated meanwhile."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000, torch.cuda.max_memory_allocated() - before


def kernel_us(step: Step) -> float:
    """µs of all kernels of a step."""
    return sum(split["us"] for split in timing.launches(step, "mhc").values())
