"""A run of the passes on a small program, real, and as `v41 inspect --json` saves it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.pipeline import PIPELINE, Pass, run_pipeline
from v41.report import CompileReport, Decision, PassRun
from v41.tools.expected import regions_found
from v41.tools.report_view import as_json


def steps(m: Tensor, eps: float) -> Tensor:
    for axis in (-1, -2, -1):
        m = m / (m.sum(axis, keepdim=True) + (eps if axis == -2 else 1e-6))
    return m


def fail(gm: GraphModule) -> list[Decision]:
    raise KeyError("val")


def runs() -> list[PassRun]:
    """Two chains that fold, alike, one whose eps changes, which is refused, and a pass that fails."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return steps(x, 1e-6), steps(x + 1, 1e-6), steps(x + 2, 1e-3)

    _, made = run_pipeline(trace(step, torch.rand(3, 4, 4)), [*PIPELINE, Pass(fail)], programs=True)
    return made


def save(path: Path, passes: list[PassRun], *, key: str = "graph", by_config: dict[str, int] | None = None) -> Path:
    """`by_config`: the regions that a config would ask for; without it those that there are."""
    (graph,) = as_json([CompileReport(passes=passes)])
    regions = {"by_config": regions_found(passes) if by_config is None else by_config}
    path.write_text(json.dumps({key: graph if key == "graph" else [graph], "regions": regions}))
    return path
