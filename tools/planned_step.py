"""PlannedStep: a step of a model as its plan, what runs its pieces and what goes in, so that it can run in other ways.

    step, report = step_of(model, batch, cache, rungs)
    run = step.on(plan, lanes)               run(inputs): the step by one of its plans, on side streams with lanes
    step.inputs, step.fed(batch, cache)      what it takes: as it was captured; for another batch and cache

On a GPU the model is compiled, with the side streams that the compiler finds to pay; on a CPU pieces run their ATen
nodes, with those that are predicted to pay.

A batch's tensors and a cache's are known among the inputs by where they lie; numbers are sizes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from v41.backend import v41
from v41.errors import StepNotCaptured
from v41.lowering.ahead import Ahead
from v41.model_def.batch import Batch, tensors_of
from v41.model_def.cache import Cache
from v41.passes.assign_streams import assign_streams
from v41.passes.plan_passes import run_plan_pass
from v41.plan import Plan
from v41.report import CompileReport, collect
from v41.runtime.executor import Artifact, LanesOf, Run, eager_artifact, executor
from v41.runtime.replay import WATCHER, Replayer, Seen
from v41.runtime.static_inputs import dimensions, place_of
from v41.tools.inspect import Captured

Memory = tuple[int, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class PlannedStep:
    plan: Plan
    artifacts: Mapping[str, Artifact]
    inputs: list[Any]
    device: torch.device
    places: Mapping[int, str]  # of inputs -> which tensor of batch or cache lies there

    def alone(self, plan: Plan) -> Plan:
        """`plan`, one of the step's, without others that it holds."""
        return replace(plan, overlapped=None, buckets=self.plan.buckets, whole=self.plan.whole)

    def on(self, plan: Plan, lanes: LanesOf | None = None) -> Run:
        """What runs `plan`, one of the step's, and no other that it holds."""
        return executor(self.alone(plan), self.artifacts, lanes)

    def compile_ahead(self, plan: Plan, inputs: Sequence[Any]) -> None:
        """Compiles what `plan`, one of the step's, launches for `inputs`, as far as nothing launched it before."""
        places = {symbol: place_of(self.plan, symbol) for symbol in self.plan.sizes}
        sizes = {symbol: inputs[i] if axis is None else inputs[i].shape[axis] for symbol, (i, axis) in places.items()}
        Ahead(self.alone(plan), self.artifacts, self.device)(sizes, whole=True)

    def sides_at(self, rows: int) -> Plan | None:
        """The plan with side streams that is used with so many rows; of those where none is, the first."""
        used = (each for each in self.plan.sides if rows in each.pays_at)
        return next(used, self.plan.overlapped)

    def fed(self, batch: Batch, cache: Cache) -> list[Any]:
        """The inputs of the step for another batch, of any sizes, and another cache of the same model."""
        tensors = named_tensors(batch, cache)
        inputs = [tensors[self.places[i]] if i in self.places else value for i, value in enumerate(self.inputs)]
        sizes: dict[str, int] = {}
        for name, value in zip(self.plan.inputs, inputs, strict=True):
            if isinstance(value, Tensor):
                sizes |= dict(zip(dimensions(self.plan.values[name]) or (), value.shape, strict=True))
        told = [self.plan.values[name].removeprefix("int ") for name in self.plan.inputs]
        return [sizes.get(size, value) if isinstance(value, int) else value
                for size, value in zip(told, inputs, strict=True)]  # fmt: skip


def named_tensors(batch: Batch, cache: Cache) -> dict[str, Tensor]:
    """All tensors that a step is given, by names of their own."""
    named = dict(tensors_of(batch)) | {f"blocks of ratio {m}": blocks for m, blocks in batch.blocks.items()}
    named |= {f"ring {i}": ring for i, ring in enumerate(cache.rings)}
    for kind in ("entries", "index_keys", "tails"):
        named |= {f"{kind} {at}": tensor for at, tensor in getattr(cache, kind).items()}
    return named


def places_of(inputs: Sequence[Any], batch: Batch, cache: Cache) -> dict[int, str]:
    """Where tensors of `batch` and `cache` lie among `inputs`."""
    named = {_memory(tensor): name for name, tensor in named_tensors(batch, cache).items()}
    found = {i: named.get(_memory(value)) for i, value in enumerate(inputs) if isinstance(value, Tensor)}
    return {i: name for i, name in found.items() if name is not None}


def _memory(value: Tensor) -> Memory:
    return value.data_ptr(), tuple(value.shape), value.dtype


def step_of(
    model: nn.Module, batch: Batch, cache: Cache, rungs: Sequence[int], codegen: str = "auto"
) -> tuple[PlannedStep, CompileReport]:
    """A decode step of `model` on the device of `cache`, with side streams, and the report of its compilation.

    rungs: numbers of rows for which side streams are judged on a CPU. StepNotCaptured where it became no graph.
    """
    if cache.device.type == "cpu":
        return step_on_cpu(model, batch, cache, rungs)
    options: dict[str, Any] = {"codegen": codegen, "overlap": "on", "cache": False}
    with collect() as reports:
        compiled = torch.compile(model, backend="v41", fullgraph=True, options=options)
        step = step_on_gpu(compiled, batch, cache)
    return step, reports[-1]


def step_on_gpu(compiled: Callable[[Batch, Cache], Tensor], batch: Batch, cache: Cache) -> PlannedStep:
    """A step of what torch.compile(model, backend="v41") returned: warmed up, captured, replayed once."""
    with watched() as seen:
        for _ in range(3):
            compiled(batch, cache)
    last = seen[-1]
    if last.whole is None:
        raise StepNotCaptured("step_on_gpu", rows=batch.host.rows)
    owner: Replayer = last.whole.owner
    device = batch.tokens.device
    return PlannedStep(owner.plan, owner.artifacts, last.inputs, device, places_of(last.inputs, batch, cache))


@contextmanager
def watched() -> Iterator[list[Seen]]:
    seen: list[Seen] = []
    token = WATCHER.set(seen)
    try:
        yield seen
    finally:
        WATCHER.reset(token)


def step_on_cpu(
    model: nn.Module, batch: Batch, cache: Cache, rungs: Sequence[int]
) -> tuple[PlannedStep, CompileReport]:
    """A step of a plain model on the CPU, which is captured and planned here but not run, and the report of that."""
    inputs: list[Any] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        v41(gm, examples, options={"codegen": "eager", "capture": "off", "overlap": "off", "cache": False})

        def stop(*given: Any) -> Any:
            inputs.extend(given)
            raise Captured

        return stop

    torch.compiler.reset()
    with torch.no_grad(), collect() as reports, suppress(Captured):
        torch.compile(model, backend=backend, fullgraph=True)(batch, cache)
    (report,) = reports
    assert report.plan is not None and len(inputs) == len(report.plan.inputs)
    plan = report.plan
    made, run = run_plan_pass("assign_streams", lambda plan: assign_streams(plan, sorted(rungs)), plan, strict=True)
    report.passes.append(run)
    if made is not plan:
        plan = replace(plan, overlapped=made)
    pieces = [piece for each in (plan, *plan.sides) for piece in each.pieces]
    artifacts = {piece.key: eager_artifact(piece.body) for piece in pieces}
    step = PlannedStep(plan, artifacts, inputs, torch.device("cpu"), places_of(inputs, batch, cache))
    return step, report
