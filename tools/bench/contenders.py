"""contenders of `bench program`: eager, torch.compile as good as a user can make it, and v41.

    eager             the plain model
    compile           torch.compile, Inductor, static shapes
    reduce-overhead   the same in CUDA graphs
    max-autotune      the same, and every GEMM and schedule tuned: minutes a case
    v41-uncaptured    backend="v41", capture off
    v41               backend="v41", its graphs, past Dynamo's guards

What Inductor gets: reorder_for_locality off, which else copies the cache; a model without regions, so that it fuses
all it can; a cache of static address, without which it makes no graph of a step that writes one; each case alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

import v41
from v41._compat import mark_static_address
from v41.model_def import attention, mhc, moe
from v41.model_def.model import V41ForCausalLM
from v41.report import CompileReport
from v41.runtime.past_guards import PastGuards
from v41.tools.bench.program_cases import Case, tensors_of
from v41.tools.captures_view import capture_values

Step = Callable[[], Tensor]
MARK = "__marked_compile_region_fn__"  # what nested_compile_region leaves on the function it returns
INDUCTOR: dict[str, dict[str, Any]] = {
    "compile": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"triton.cudagraphs": True, "max_autotune": True, "coordinate_descent_tuning": True},
}
NAMES = ("eager", *INDUCTOR, "v41-uncaptured", "v41")


class Contender(Protocol):
    """One way to run the model."""

    def around(self) -> AbstractContextManager[object]:
        """Holds while it compiles and runs."""

    def step(self, case: Case) -> Step:
        """What runs `case` once. Logits, those of pads behind the others. May compile."""

    def alone(self) -> dict[str, Callable[[], object]]:
        """Parts of the last case's step that are worth a time of their own, by name."""

    def kernels(self) -> tuple[str, ...]:
        """Names of kernels of ours that it launched."""

    def facts(self) -> dict[str, Any]:
        """What it says of itself, once its cases have run."""


def contender(name: str, model: V41ForCausalLM, codegen: str) -> Contender:
    if name == "eager":
        return Eager(model)
    if name in INDUCTOR:
        return Inductor(model, INDUCTOR[name])
    return Ours(model, codegen, "off" if name == "v41-uncaptured" else "auto")


class Eager:
    def __init__(self, model: V41ForCausalLM) -> None:
        self.model = model

    def around(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self, case: Case) -> Step:
        return lambda: self.model(case.plain, case.cache)

    def alone(self) -> dict[str, Callable[[], object]]:
        return {}

    def kernels(self) -> tuple[str, ...]:
        return ()

    def facts(self) -> dict[str, Any]:
        return {}


class Inductor(Eager):
    """torch.compile, afresh for each case."""

    def __init__(self, model: V41ForCausalLM, options: dict[str, Any]) -> None:
        super().__init__(model)
        self.options = {"reorder_for_locality": False, **options}

    def around(self) -> AbstractContextManager[object]:
        return without_regions(attention, mhc, moe)

    def step(self, case: Case) -> Step:
        torch.compiler.reset()
        for tensor in tensors_of(case.cache):
            mark_static_address(tensor)
        compiled = torch.compile(self.model, options=self.options, dynamic=False, fullgraph=True)
        return lambda: compiled(case.plain, case.cache)

    def facts(self) -> dict[str, Any]:
        return {"options": self.options, "dynamic": False}


class Ours(Eager):
    """backend="v41", compiled once for all cases. options: further ones."""

    def __init__(self, model: V41ForCausalLM, codegen: str, capture: str, **options: Any) -> None:
        super().__init__(model)
        self.options: dict[str, Any] = {"codegen": codegen, "capture": capture, **options}
        self.compiled = torch.compile(model, backend="v41", fullgraph=True, options=self.options)
        self.fast = v41.past_guards(self.compiled) if capture == "auto" else None
        self.reports: list[CompileReport] = []
        self.last: Case | None = None

    def step(self, case: Case) -> Step:
        self.last = case
        run: Callable[..., Tensor] = self.fast or self.compiled
        with v41.collect() as reports:
            run(case.batch, case.cache)
        self.reports += reports
        return lambda: run(case.batch, case.cache)

    def alone(self) -> dict[str, Callable[[], object]]:
        """The parts of the last case's step past Dynamo, and the step as it is behind the guards."""
        case = self.last
        if not isinstance(self.fast, PastGuards) or case is None or case.kind != "decode" or not self.fast.routes:
            return {}
        guarded: dict[str, Callable[[], object]] = {"guarded": lambda: self.compiled(case.batch, case.cache)}
        return guarded | self.fast.parts(case.batch, case.cache)

    def kernels(self) -> tuple[str, ...]:
        return tuple(launched_so_far())

    def facts(self) -> dict[str, Any]:
        return {"options": self.options, "compiles": [values_of(report) for report in self.reports]}


def launched_so_far() -> set[str]:
    """Names of Triton functions that this process launched and neither Inductor nor Triton wrote. A region's kernel may
    launch several of names of their own, and some operators have kernels without a region."""
    from triton.runtime import JITFunction  # type: ignore[import-untyped]

    functions = [each for each in gc.get_objects() if type(each) is JITFunction and each.device_caches]
    return {each.__name__ for each in functions if each.__module__.partition(".")[0] not in ("torch", "triton")
            and not each.__name__.startswith("triton_")}  # fmt: skip


def values_of(report: CompileReport) -> dict[str, Any]:
    """What a bench keeps of a report."""
    return {
        "options": report.options,
        "pieces": report.pieces,
        "artifacts": report.artifacts,
        "kernels": len(report.kernels),
        "fallbacks": report.fallbacks,
        "refused": {run.name: run.refused for run in report.passes if run.refused},
        "failed": {run.name: run.failure for run in report.passes if run.failure},
        "cache": report.cache,
        "seconds": {phase: round(seconds, 2) for phase, seconds in report.seconds.items()},
        "captures": None if report.captures is None else capture_values(report.captures),
    }


@contextmanager
def without_regions(*modules: ModuleType) -> Iterator[None]:
    """Inside, functions and methods of `modules` marked by nested_compile_region are what they were before."""
    holders = [holder for module in modules for holder in (module, *classes_of(module))]
    named = [(holder, name, value) for holder in holders for name, value in vars(holder).items()]
    marked = [each for each in named if hasattr(each[2], MARK)]
    for holder, name, value in marked:
        setattr(holder, name, getattr(value, MARK))
    try:
        yield
    finally:
        for holder, name, value in marked:
            setattr(holder, name, value)


def classes_of(module: ModuleType) -> list[type]:
    return [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
