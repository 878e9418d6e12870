"""A step costs the same whatever a cache holds: bytes allocated at 1 and 64 fold capacity agree, for every codegen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import v41
from v41.lowering.inductor import supported

ROWS, WIDTH, CAPACITY = 5, 16, 64


def step(cache: Tensor, slots: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Two layers write rows into one cache, directly and through a view, and read them back."""
    cache[slots, 0] = (x @ w).to(torch.uint8)
    y = x + cache[slots].float().sum(1)
    cache.view(-1, WIDTH)[2 * slots + 1] = y.to(torch.uint8)
    return y + cache.view(-1, WIDTH)[2 * slots].float()


def inputs(capacity: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    cache = torch.zeros(capacity, 2, WIDTH, dtype=torch.uint8)
    return cache, torch.randperm(CAPACITY)[:ROWS], torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDTH)


def bytes_allocated(function: object, capacity: int) -> int:
    """Of one warm call, everything any operator asks the allocator for."""
    args = inputs(capacity)
    function(*args)  # type: ignore[operator]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function(*args)  # type: ignore[operator]
    return sum(event.nbytes() for event in _memory_events(trace) if event.nbytes() > 0)


def _memory_events(trace: profile) -> list:  # type: ignore[type-arg]
    events = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [event for event in events if event.name() == "[memory]"]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_bytes_do_not_grow_with_the_capacity(codegen: str) -> None:
    if codegen == "inductor" and (reason := supported(torch.device("cpu"))):
        pytest.skip(reason)
    function = torch.compile(step, backend="v41", dynamic=False, options={"codegen": codegen, "verify": True})
    with v41.collect() as reports:
        small, large = (bytes_allocated(function, capacity) for capacity in (CAPACITY, 64 * CAPACITY))
    assert not reports[0].fallbacks
    assert 0 < small < 64 * CAPACITY * 2 * WIDTH, "the measure sees allocations, and less than the large cache"
    assert large <= small * 1.05, (small, large)
    ours, theirs = inputs(CAPACITY), inputs(CAPACITY)
    assert torch.equal(function(*ours), step(*theirs))
    assert torch.equal(ours[0], theirs[0])


def test_the_measure_sees_a_copy_of_the_cache() -> None:
    def copies(cache: Tensor, slots: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return cache + 1

    assert bytes_allocated(copies, 64 * CAPACITY) >= 64 * CAPACITY * 2 * WIDTH
    assert bytes_allocated(step, 64 * CAPACITY) <= 1.05 * bytes_allocated(step, CAPACITY)
