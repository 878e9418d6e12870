"""ahead: the generated kernels that a step will launch, compiled side by side, since Triton takes seconds for each.

    compile_ahead(jobs, device)         artifacts, inputs and sizes -> what they will launch is compiled; nothing runs
    Ahead(plan, artifacts, device)      the same of a whole plan, for a step of these sizes

Triton compiles what is launched for the first time, one kernel after the other, while other processors wait. Threads
do: its passes and the assembler run without Python's lock. Tensors are taken to begin at multiples of 16 bytes, as
torch's do. What is launched with others is compiled then, as is what fails here, so that its error is raised there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor

from v41._compat import outside_of_tracing, without_storage
from v41.formulas import evaluate
from v41.lowering.generated import GeneratedPiece
from v41.lowering.rowwise.launch import Arrivals, Kernel
from v41.lowering.templates.all_reduce import SummingKernel
from v41.lowering.templates.index_scores import IndexKernel
from v41.lowering.tuned import TUNING
from v41.plan import NotKept, Plan

Launch = tuple[str, Sequence[int], Sequence[Any], Mapping[str, Any], Mapping[str, Any]]
Job = tuple[Any, Sequence[object], Mapping[str, int]]  # an artifact, what tracing says of its inputs, sizes by symbol


def steps_of(kernel: Kernel, given: Sequence[Any]) -> list[Launch]:
    """Function, grid, arguments, constants and options of each launch."""
    if isinstance(kernel, IndexKernel):
        steps, _ = kernel.steps(given)
        return [(step.kernel, step.grid, step.arguments, step.constants, step.options) for step in steps]
    call = kernel.prepare(given)
    if isinstance(kernel, SummingKernel):
        launched: list[Any] = call.launches
        return [(each.function, each.grid, each.arguments, each.constants, each.options) for each in launched]
    return [(kernel.name, grid, call.arguments, constants, options) for grid, constants, options in call.steps()]


def like(value: object, symbols: Mapping[str, int], device: torch.device | None = None) -> object:
    """A tensor of these sizes and strides, or a number. KeyError for a symbol without a value."""
    if not isinstance(value, Tensor):
        return evaluate(str(value), symbols) if isinstance(value, int | SymInt) else value
    shape, strides = ([evaluate(str(n), symbols) for n in each] for each in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=device)


class Ahead:
    """What a step of `plan` will launch: one that becomes one graph by the plan that is used for its rows, another by
    `plan` itself. A plan from a cache of programs has no bodies, and its kernels are on disk."""

    def __init__(self, plan: Plan, artifacts: Mapping[str, Any], device: torch.device) -> None:
        self.plan, self.artifacts, self.device = plan, artifacts, device

    def __call__(self, sizes: Mapping[str, int], whole: bool) -> None:
        """sizes: of the plan's symbols. whole: it becomes one graph."""
        rows = next((sizes[symbol] for symbol, name in self.plan.sizes.items() if name == "rows"), None)
        used = (each for each in self.plan.sides if whole and rows in each.pays_at)
        bodies = {piece.key: piece.body for piece in next(used, self.plan).pieces}
        jobs = [
            (self.artifacts[key], [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")], sizes)
            for key, body in bodies.items()
            if not isinstance(body, NotKept)
        ]
        compile_ahead(jobs, self.device)


def compile_ahead(jobs: Iterable[Job], device: torch.device) -> None:
    """Compiles what calls of `jobs` would launch on `device` and have not yet. Schedules that are about to be tuned are
    not known."""
    if device.type != "cuda" or TUNING.get():
        return
    wanted: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    with outside_of_tracing(), without_storage():
        for artifact, values, sizes in jobs:
            with suppress(Exception):  # a size that is not known yet, or what its launch raises again
                for name, grid, arguments, named in _launches(artifact, values, sizes, device):
                    function = getattr(artifact.kernel.module, name)
                    told = (artifact.kernel.source, name, *map(_told, arguments), *named.items())
                    wanted.setdefault(told, (function, grid, arguments, named))
    if wanted:
        workers = min(len(wanted), len(os.sched_getaffinity(0)))
        pool = ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,))
        with suppress(RuntimeError), pool:  # no more threads may start, as at the end of the process
            list(pool.map(_compile, wanted.values()))


def _launches(
    artifact: Any, values: Sequence[object], sizes: Mapping[str, int], device: torch.device
) -> Iterator[tuple[str, Sequence[int], list[Any], dict[str, Any]]]:
    """Name, grid, arguments (of a tensor its dtype) and what is named, of each launch that is known now: not of sums
    over ranks, whose memory is bound later. KeyError where it hangs on more than `sizes`."""
    if not isinstance(artifact, GeneratedPiece) or artifact.group is not None:
        return
    given = [like(value, sizes, device) for value in values]
    kernel = replace(artifact.kernel, _arrivals=Arrivals({}, {}))  # these counters have no memory
    for name, grid, arguments, constants, options in steps_of(kernel, given):
        yield name, grid, [a.dtype if isinstance(a, Tensor) else a for a in arguments], {**constants, **options}


def _compile(one: tuple[Any, ...]) -> None:
    function, grid, arguments, named = one
    with suppress(Exception):  # raised again where it is launched
        function.warmup(*arguments, grid=grid, **named)


def _told(argument: Any) -> Any:
    """What Triton's text of a kernel may hang on of an argument: of a number, whether it is 1 or a multiple of 16."""
    return argument if not isinstance(argument, int) else (argument == 1, argument % 16 == 0, argument >= 1 << 31)
