"""kernel_times: µs of generated kernels on the GPU at hand, each alone, as the graph of a step replays it.

    timed(plan, kernels, rows=(1, 64), device)      [Timed("mhc_boundary_3fa2b1", 1, 6.4), ...]

Inputs are drawn numbers, so none is told of a kernel that reads places (of entries, of slots), nor of a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from v41.backend import kernel_of
from v41.lowering.generated import GeneratedPiece
from v41.overlap import measure_of
from v41.plan import Plan
from v41.runtime.executor import Artifact
from v41.tools.kernels import KernelFacts


@dataclass(frozen=True)
class Timed:
    """us: None where any numbers will not do."""

    kernel: str
    rows: int
    us: float | None


def timed(
    plan: Plan,
    kernels: Sequence[KernelFacts],
    rows: Sequence[int],
    device: torch.device,
    told: Callable[[str], None] = lambda name: None,
) -> list[Timed]:
    """Of each of `kernels`, which are the plan's, at each of `rows`. BodyNotKept for the plan of a saved run. told:
    hears the name of each kernel when its turn comes."""
    bodies = {piece.name: piece.body for piece in plan.pieces}
    measure, found = measure_of(plan.sizes, device, generated), list[Timed]()
    for kernel in kernels:
        told(kernel.name)
        found += [Timed(kernel.name, count, measure(bodies[kernel.pieces[0]], count)) for count in rows]
    return found


def generated(body: GraphModule, key: str) -> Artifact:
    made = kernel_of(body, key)
    assert isinstance(made, GeneratedPiece), made  # those without are none of the kernels
    return made
