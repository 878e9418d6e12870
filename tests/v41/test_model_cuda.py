"""On a GPU, for every codegen: a step of a small model costs the same at 1 and 64 fold cache capacity."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import v41
from tests.v41.test_model import small, steps
from v41.model_def.batch import build_batch
from v41.model_def.cache import Cache
from v41.model_def.model import V41ForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAPACITY = 64


@pytest.mark.parametrize("codegen", ["eager", "inductor", "triton"])
@torch.no_grad()
def test_cuda_step_costs_the_same_at_any_capacity(codegen: str) -> None:
    torch.compiler.reset()
    config = small()
    model = V41ForCausalLM.random(config, 0, "cuda")
    function = torch.compile(model, backend="v41", fullgraph=True, options={"codegen": codegen})
    with v41.collect() as reports:
        found = {fold: cost(function, config, fold * CAPACITY) for fold in (1, 64)}
    print(codegen, found, reports[0].options["codegen"], reports[0].fallbacks, dict(reports[0].kernels))
    assert all(bool(report.kernels) == (codegen == "triton") for report in reports)  # a graph a capacity
    (small_bytes, small_us), (large_bytes, large_us) = found[1], found[64]
    assert large_bytes <= 1.05 * small_bytes
    assert large_us <= 1.05 * small_us + 20


def cost(function: object, config: object, capacity: int) -> tuple[int, float]:
    """Peak bytes and device µs of a decode step, median of several."""
    cache = Cache.zeros(config, 3, capacity, "cuda")  # type: ignore[arg-type]
    prefill, decode, again, _ = steps()
    for chunks in (prefill, decode):
        function(build_batch(config, cache, chunks), cache)  # type: ignore[operator, arg-type]
    times, peaks = [], []
    for _ in range(5):
        batch = build_batch(config, cache, again)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            function(batch, cache)  # type: ignore[operator]
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        times.append(sum(event.self_device_time_total for event in trace.events()))
    return sorted(peaks)[2], sorted(times)[2]
