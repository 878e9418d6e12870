"""What a boundary predicts is found by later ones, whatever took rows of it in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, ops
from torch.fx import Graph, GraphModule

from tests.invariants import apply, check_pass, copy_program
from tests.strategies.mhc import PlainStack
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.mhc import boundary
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.mhc_heads import Gate
from v41.passes.mhc_predictions import BOUNDARY, Coefficients
from v41.passes.outline_mhc import outline_mhc
from v41.passes.replay_seam import outline_seam
from v41.regions import inline, regions
from v41.report import Decision

MODEL = PlainStack(V41Config.preset("tiny"))
Taking = Callable[..., tuple[Tensor, ...]]
TAKEN: dict[str, Taking] = {  # X, A, C, B of all rows, kept, then A, C, B of those -> X, A, C, B
    "all": lambda X, A, C, B, kept, *own: (X[kept], A[kept], C[kept], B[kept]),
    "all but pre": lambda X, A, C, B, kept, *own: (X[kept], own[0], C[kept], B[kept]),
    "streams alone": lambda X, A, C, B, kept, *own: (X[kept], *own),
    "nothing": lambda X, A, C, B, kept, *own: (X, A, C, B),
}
KINDS = ["mhc_boundary after_engram", "mhc_boundary seam", "mhc_boundary seam"]


@cache
def traced(taken: str) -> GraphModule:
    """Three boundaries, of which the last may read rows of what the one before predicted."""
    n, T, D = MODEL.config.hc_mult, 5, 8

    def run(X: Tensor, y: Tensor, late: Tensor, A: Tensor, kept: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        X, h, A, C, B = boundary(X, None, None, None, A, MODEL.mix(0))
        X, h, *predicted = boundary(X, h + y, C, B, A, MODEL.mix(1))
        X, A, C, B = TAKEN[taken](X, *predicted, kept, *own)
        return h, *predicted, *boundary(X, late, C, B, A, MODEL.mix(0))

    X, y, late = torch.randn(T, n, D).bfloat16(), *(torch.randn(T, D).bfloat16() for _ in range(2))
    own = torch.rand(T, n), torch.rand(T, n), torch.rand(T, n, n)
    kept = torch.tensor([0, 1, 2, 2, 4])  # torch takes one size for all rows
    gm = trace(run, X, y, late, torch.rand(T, n), kept, *own)
    apply(canonicalize, gm)
    apply(fold_sinkhorn, gm)
    return gm


def prepared(taken: str) -> GraphModule:
    return copy_program(traced(taken))


def kinds(decisions: Sequence[Decision]) -> list[str]:
    return [each.region.name if each.region else str(each.rule) for each in decisions]


@pytest.mark.parametrize("taken", TAKEN)
def test_a_boundary_reads_what_one_of_other_rows_predicted(taken: str) -> None:
    """As where a program keeps some rows from there on, before what takes them is outlined."""
    gm = prepared(taken)
    assert kinds(check_pass(outline_mhc, gm, rows=(2, 3))) == KINDS  # indices of 0 and 1 are drawn


def test_what_takes_rows_may_be_a_region() -> None:
    gm = prepared("all")
    takes = gm.graph.find_nodes(op="call_function", target=ops.aten.index.Tensor)
    (kept,) = {index for take in takes for index in take.args[1]}
    assert outline_seam(gm, takes, kept, 0, {}) is not None
    assert kinds(apply(outline_mhc, gm)) == KINDS


@pytest.mark.parametrize("taken", TAKEN)
def test_a_boundary_may_be_a_region_already(taken: str) -> None:
    gm = prepared(taken)
    apply(outline_mhc, gm)
    *_, last = regions(gm, BOUNDARY)
    inline(gm, last)
    assert kinds(apply(outline_mhc, gm)) == KINDS[-1:]


@pytest.mark.parametrize(
    ("factors", "pre"), [((1.0, 2.0), 0), ((2.0, 1.0), 1), ((2.0, 2.0), 0), ((1.0, 1.0), 0)], ids=str
)
def test_pre_comes_first_unless_the_first_alone_has_a_factor(factors: tuple[float, float], pre: int) -> None:
    node = Graph().placeholder("X")
    gates = tuple(Gate((4 * i, 4 * i + 4), node, factor, 0.0) for i, factor in enumerate(factors))
    assert Coefficients(node, 8, node, None, gates, ()).pre_and_post == (gates[pre], gates[1 - pre])
