"""run: what one capture found, as values: made of an inspection, or read from a folder that `v41 capture` wrote.

    run_of(inspection, "preset tiny")     a live one: its graphs are there, and what is asked of them is worked out then
    run.report, run.layers                small, and always there
    run.nodes, run.work, run.kernels ...  large: worked out, or read from their files, when first asked for

Every command that shows something reads a Run, so it shows the same of a model and of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch

from v41 import __version__
from v41.model_def.config import V41Config
from v41.plan import Plan
from v41.report import Change, CompileReport
from v41.tools.expected import regions_expected
from v41.tools.inspect import Inspection, LayerView, layers
from v41.tools.kernels import KernelFacts, kernels_of, taken
from v41.tools.nodes import NodeFacts, WorkFacts, nodes_of, work_of
from v41.tools.predicted import Predicted, predicted


@dataclass(frozen=True)
class Run:
    """`parts`: what gives the large things, by the names of the properties below."""

    source: str  # "preset flash, 3 layers"
    versions: dict[str, str]
    config: V41Config | None  # None of another model than V4.1
    report: CompileReport
    layers: list[LayerView]
    parameters: dict[str, str]  # input of the plan -> what the model calls it
    seconds: dict[str, float]
    cpu_seconds: float
    peak_mib: float
    parts: Mapping[str, Callable[[], Any]] = field(repr=False, compare=False)

    @property
    def plan(self) -> Plan:
        assert self.report.plan is not None
        return self.report.plan

    @property
    def by_config(self) -> dict[str, int] | None:
        """The regions that the config asks for; None where there is no config."""
        shared = bool(self.plan.groups)
        return regions_expected(self.config, shared=shared) if self.config is not None else None

    @property
    def codegen(self) -> str:
        """How pieces run, or would on a device that need not be here."""
        return str(self.report.options["codegen"][0])

    @cached_property
    def layer_of(self) -> dict[str, int | None]:
        """Piece -> layer."""
        return {piece.name: view.layer for view in self.layers for piece in view.pieces}

    @cached_property
    def changes(self) -> dict[str, list[Change]] | None:
        """What each pass changed; None where that was not kept."""
        return cast("dict[str, list[Change]] | None", self.parts["changes"]())

    @cached_property
    def nodes(self) -> list[NodeFacts]:
        return cast("list[NodeFacts]", self.parts["nodes"]())

    @cached_property
    def work(self) -> list[WorkFacts]:
        return cast("list[WorkFacts]", self.parts["work"]())

    @cached_property
    def predicted(self) -> Predicted:
        """How long pieces take, and the plans with side streams."""
        return cast("Predicted", self.parts["predicted"]())

    @cached_property
    def kernels(self) -> list[KernelFacts]:
        return cast("list[KernelFacts]", self.parts["kernels"]())


def run_of(inspection: Inspection, source: str) -> Run:
    views, plan, codegen = layers(inspection), inspection.plan, str(inspection.report.options["codegen"][0])
    kernels = cache(lambda: kernels_of(plan, codegen, inspection.config))
    layer_of = {piece.name: view.layer for view in views for piece in view.pieces}
    runs = inspection.report.passes
    kept = all(run.changes is not None for run in runs)
    return Run(
        source,
        versions(),
        inspection.config,
        inspection.report,
        views,
        inspection.parameters,
        inspection.seconds,
        inspection.cpu_seconds,
        inspection.peak_mib,
        {
            "changes": lambda: {run.name: run.changes for run in runs} if kept else None,
            "nodes": lambda: nodes_of(plan),
            "work": lambda: work_of(plan, layer_of, taken(kernels())),
            "kernels": kernels,
            "predicted": lambda: predicted(plan),
        },
    )


def versions() -> dict[str, str]:
    """Of what the run was made with."""
    found = {"v41": __version__, "torch": torch.__version__}
    try:
        from triton import __version__ as triton  # type: ignore[import-untyped]
    except ImportError:
        return found
    return found | {"triton": str(triton)}
