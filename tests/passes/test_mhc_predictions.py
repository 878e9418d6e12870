"""What a boundary predicts is found by later ones, whatever took rows of it in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, ops
from torch.fx import Graph

from tests.invariants import apply, check_pass
from tests.strategies.mhc import PlainStack
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.mhc import boundary
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.mhc_heads import Gate
from v41.passes.mhc_predictions import Coefficients
from v41.passes.outline_mhc import outline_mhc
from v41.passes.replay_seam import outline_seam


@pytest.mark.parametrize("in_a_region", (False, True))
def test_a_boundary_reads_what_one_of_other_rows_predicted(in_a_region: bool) -> None:
    """As where a program keeps some rows from there on, before what takes them is outlined, and after."""
    model = PlainStack(V41Config.preset("tiny"))
    n, T, D = model.config.hc_mult, 5, 8

    def later(X: Tensor, late: Tensor, A: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        X, h, *predicted = boundary(X, None, None, None, A, model.mix(0))
        X, A, C, B, h = (each[kept] for each in (X, *predicted, h))
        return boundary(X, h + late, C, B, A, model.mix(1))

    X, late = torch.randn(T, n, D).bfloat16(), torch.randn(T, D).bfloat16()
    gm = trace(later, X, late, torch.rand(T, n), torch.tensor([0, 1, 2, 2, 4]))  # torch takes one size for all rows
    apply(canonicalize, gm)
    apply(fold_sinkhorn, gm)
    takes = gm.graph.find_nodes(op="call_function", target=ops.aten.index.Tensor)
    if in_a_region:
        (kept,) = {index for take in takes for index in take.args[1]}
        assert outline_seam(gm, takes, kept, 0, {}) is not None
    decisions = check_pass(outline_mhc, gm, rows=(2, 3))  # indices of 0 and 1 are drawn
    assert {each.region.name for each in decisions if each.region} == {"mhc_boundary after_engram", "mhc_boundary seam"}


@pytest.mark.parametrize(
    ("factors", "pre"), [((1.0, 2.0), 0), ((2.0, 1.0), 1), ((2.0, 2.0), 0), ((1.0, 1.0), 0)], ids=str
)
def test_pre_comes_first_unless_the_first_alone_has_a_factor(factors: tuple[float, float], pre: int) -> None:
    node = Graph().placeholder("X")
    gates = tuple(Gate((4 * i, 4 * i + 4), node, factor, 0.0) for i, factor in enumerate(factors))
    assert Coefficients(node, 8, node, None, gates, ()).pre_and_post == (gates[pre], gates[1 - pre])
