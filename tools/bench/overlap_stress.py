"""overlap_stress: a decode loop whose streams are delayed at random, beside the same loop on one stream.

    one      every step in the plan's order on the caller's stream     -> logits, whose likeliest tokens are read next
    delayed  the same step with its side streams, on a cache of its own, spin kernels on either stream

After each step all results are compared bit by bit, after the last the caches. The delayed steps are graphs with delays
baked in, several in turn, and every eighth step runs uncaptured with delays of its own. Tokens are fed back: contexts
grow, groups end, rings turn, and a step that went wrong spoils all that follow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from v41.model_def.batch import Batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.generation import Request, generate
from v41.plan import Plan
from v41.report import Captures
from v41.runtime.capture import CudaGraphs
from v41.runtime.executor import Run, events_of
from v41.runtime.replay import Replayer
from v41.runtime.streams import CudaFlight, CudaLanes
from v41.tools.bench.program_cases import Case, tensors_of
from v41.tools.planned_step import PlannedStep

SPIN = 40_000  # cycles that a delay takes at most: about 20 µs
GRAPHS = 4  # with delays of their own
UNCAPTURED = 8  # one step of so many


class DelayedLanes(CudaLanes):
    """Lanes whose flights wait at random: before an event is recorded, after a wait, at a switch."""

    def __init__(self, device: torch.device, streams: int, events: int, draw: random.Random) -> None:
        super().__init__(device, streams, events)
        self.draw = draw

    def __call__(self) -> DelayedFlight:
        flight = super().__call__()
        return DelayedFlight(self, flight.streams, flight.events)


class DelayedFlight(CudaFlight):
    lanes: DelayedLanes

    def delay(self) -> None:
        if self.lanes.draw.random() < 0.5:
            torch.cuda._sleep(self.lanes.draw.randrange(1, SPIN))

    def mark(self, event: int) -> None:
        self.delay()
        super().mark(event)

    def wait(self, event: int) -> None:
        super().wait(event)
        self.delay()

    def switch(self, stream: int) -> None:
        super().switch(stream)
        self.delay()


def lanes_for(kind: type[CudaLanes], device: torch.device, *more: Any) -> Callable[[Plan], CudaLanes]:
    return lambda plan: kind(device, max(piece.stream for piece in plan.pieces), events_of(plan), *more)


def stressed(step: PlannedStep, config: V41Config, case: Case, count: int, seconds: float) -> dict[str, Any]:
    """So many steps of `case` read on and on, or as many as fit into `seconds`: how many gave other bits.

    On a CPU, which has no streams, the plan of one stream runs against the other's pieces in order.
    """
    made = step.sides_at(case.rows)
    assert made is not None
    one, delayed = in_order(step, made), with_delays(step, made, random.Random(case.rows))
    return loop(step, config, case, one, delayed, count, seconds)


def loop(
    step: PlannedStep,
    config: V41Config,
    case: Case,
    one: Run,
    delayed: Callable[[int], tuple[str, Run]],
    count: int,
    seconds: float,
) -> dict[str, Any]:
    """delayed: of the number of a step, how it runs and what runs it."""
    began = time.perf_counter()
    caches = copy_of(case.cache), copy_of(case.cache)
    wrong, how, found = {"uncaptured": 0, "captured": 0}, "", list[Any]()
    turn = 0

    def forward(batch: Batch, cache: Cache) -> Tensor:
        nonlocal how, found
        wanted = one(step.fed(batch, cache))
        how, run = delayed(turn)
        found = list(run(step.fed(batch, caches[1])))
        wrong[how] += not same(wanted, found)
        return next(value for value in wanted if isinstance(value, Tensor))

    requests = []
    for chunk in case.batch.host.chunks:
        requests.append(Request(list(chunk.ids), len(chunk.ids), len(chunk.ids) + count))
        requests[-1].done = chunk.start
    for _ in generate(forward, config, caches[0], requests, chunk=1, buckets=Buckets()):
        turn += 1
        if turn >= count or time.perf_counter() - began > seconds:
            break
    return {
        "steps": turn, "asked": count, **wrong, "caches_same": same(*map(kept, caches)),
        "tokens": len({tuple(request.ids[request.prompt :]) for request in requests}),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def in_order(step: PlannedStep, plan: Plan) -> Run:
    """`plan` on the caller's stream, captured where there are graphs."""
    if step.device.type == "cpu":
        return step.on(step.plan)
    return Replayer(step.alone(plan), step.artifacts, CudaGraphs(step.device), Captures())


def with_delays(step: PlannedStep, plan: Plan, draw: random.Random) -> Callable[[int], tuple[str, Run]]:
    """`plan` on its streams, with delays; on a CPU in order."""
    if step.device.type == "cpu":
        alone = step.on(plan)
        return lambda turn: ("uncaptured", alone)
    lanes = lanes_for(DelayedLanes, step.device, draw)
    plain, graphs = step.on(plan, lanes), [CudaGraphs(step.device) for _ in range(GRAPHS)]
    captured = [Replayer(step.alone(plan), step.artifacts, each, Captures(), lanes) for each in graphs]

    def of(turn: int) -> tuple[str, Run]:
        return ("uncaptured", plain) if turn % UNCAPTURED == 0 else ("captured", captured[turn % GRAPHS])

    return of


def copy_of(cache: Cache) -> Cache:
    """The same records in memory of their own."""
    copied = {kind: {at: t.clone() for at, t in getattr(cache, kind).items()}
              for kind in ("entries", "index_keys", "tails")}  # fmt: skip
    rings = tuple(ring.clone() for ring in cache.rings)
    return Cache(cache.made_for, cache.slots, cache.capacity, rings, **copied)


def kept(cache: Cache) -> list[Tensor]:
    """Its records but those of the pad slot, which hold whatever wrote last."""
    return [records[: cache.pad_slot] for records in tensors_of(cache)]


def same(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether all tensors have the same bits."""
    pairs = [(a, b) for a, b in zip(wanted, found, strict=True) if isinstance(a, Tensor)]
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)
