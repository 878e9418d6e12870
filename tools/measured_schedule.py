"""measured_schedule: when each piece of a step ran on its stream, by torch's profiler, under the plan's names.

    slots = measured_schedule(step, plan, lanes)      [Slot("piece_4", 0, 96.1, 101.0, "region mhc_boundary"), ...]

On a GPU the step runs uncaptured behind a spin kernel that holds the device until the host has issued all of it: so it
is the device's schedule, gaps between launches included, not the host's. What one piece launches lies within a range of
its name, and the profiler says when the first of it began and the last ended, on which stream. On a CPU the ranges
themselves are the schedule. A piece that launches nothing has no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from v41.plan import Plan
from v41.runtime.executor import Artifact, LanesOf, executor
from v41.tools.planned_step import PlannedStep
from v41.tools.timeline import Slot

WARM = 3  # steps before the one that counts
HOLD_US = 400  # for which the spin kernel holds the device, for each piece: what its launches may take on the host
CYCLES_A_US = 2_000  # at most, on any GPU so far
RANGE = "v41 "  # in front of a piece's name


class Event(Protocol):
    """What the profiler says of a range: on the host, or of what was launched under it."""

    name: str
    device_type: DeviceType
    device_resource_id: int
    is_user_annotation: bool | None

    @property
    def time_range(self) -> Any: ...


@dataclass(frozen=True)
class Measured:
    """slots: in the plan's order. ahead: whether the host had issued all before the device began."""

    slots: list[Slot]
    ahead: bool


def measured_schedule(step: PlannedStep, plan: Plan, lanes: LanesOf | None = None) -> Measured:
    """One step of `plan`, which is one of the step's."""
    run = executor(_by_name(plan), _named(plan, step.artifacts), lanes)
    on_gpu = step.device.type == "cuda"
    for _ in range(WARM):
        run(list(step.inputs))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        if on_gpu:
            torch.cuda.synchronize(step.device)
            torch.cuda._sleep(HOLD_US * CYCLES_A_US * len(plan.pieces))
        run(list(step.inputs))
        if on_gpu:
            torch.cuda.synchronize(step.device)
    return schedule_of(plan, profiled.events() or [], DeviceType.CUDA if on_gpu else DeviceType.CPU)


def schedule_of(plan: Plan, events: Iterable[Event], device: DeviceType) -> Measured:
    """The slots of `plan` among what the profiler saw, from when its first piece began."""
    found: dict[str, Event] = {}
    issued = 0.0
    for event in events:
        if event.name.startswith(RANGE):
            if event.device_type == device:
                found[event.name.removeprefix(RANGE)] = event
            if event.device_type == DeviceType.CPU:
                issued = max(issued, event.time_range.end)
    streams = _streams(plan, found) if device != DeviceType.CPU else {}
    first = min((event.time_range.start for event in found.values()), default=0.0)
    ran = [(piece, found[piece.name]) for piece in plan.pieces if piece.name in found]
    slots = [
        Slot(piece.name, streams.get(event.device_resource_id, 0), event.time_range.start - first,
             event.time_range.end - first, piece.border)
        for piece, event in ran
    ]  # fmt: skip
    return Measured(slots, device == DeviceType.CPU or issued <= first)


def _streams(plan: Plan, found: Mapping[str, Event]) -> dict[int, int]:
    """The device's number of a stream -> the plan's: that of most pieces that ran there."""
    votes: dict[int, dict[int, int]] = {}
    for piece in plan.pieces:
        if piece.name in found:
            of = votes.setdefault(found[piece.name].device_resource_id, {})
            of[piece.stream] = of.get(piece.stream, 0) + 1
    return {number: max(of, key=of.__getitem__) for number, of in votes.items()}


def _by_name(plan: Plan) -> Plan:
    """`plan` whose pieces have keys of their own, so that each has a range of its name."""
    return replace(plan, overlapped=None, pieces=tuple(replace(piece, key=piece.name) for piece in plan.pieces))


def _named(plan: Plan, artifacts: Mapping[str, Artifact]) -> dict[str, Artifact]:
    return {piece.name: _in_a_range(piece.name, artifacts[piece.key]) for piece in plan.pieces}


def _in_a_range(name: str, artifact: Callable[..., tuple[Any, ...]]) -> Artifact:
    def run(*args: Any) -> tuple[Any, ...]:
        with record_function(RANGE + name):
            return artifact(*args)

    return run
