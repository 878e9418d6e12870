"""Regions that the pipeline makes of the plain model are generated, or refused with a reason, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import apply
from tests.lowering.rowwise.running import check_contract, check_everywhere, interpret
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.errors import PieceInputMismatch
from v41.lowering.generated import GeneratedPiece, generate_piece, unsupported_device
from v41.lowering.rowwise import Kernel, Unsupported, hold, pass_over
from v41.model_def import mhc
from v41.model_def.config import V41Config
from v41.model_def.norm import rms_norm
from v41.passes.partition import partition
from v41.passes.pipeline import CUT_AT, PIPELINE
from v41.passes.same_values import random_like
from v41.plan import Piece
from v41.regions import outline, region_of, regions

CONFIG = V41Config.preset("tiny")
S, D = CONFIG.hc_mult, CONFIG.hidden_size
FORMS = ("entry", "seam", "mhc_post", "after_engram", "exit")


def stack(x: Tensor, y: Tensor, fn: Tensor, base: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """Every form of boundary that the tiny model has, its sublayers left out: y stands for what they return."""
    norm = lambda x: rms_norm(x, w, CONFIG.rms_norm_eps)
    mix = mhc.Mix(fn, base, scale, norm, CONFIG.hc_sinkhorn_iters, CONFIG.hc_eps, CONFIG.rms_norm_eps)
    X, A = mhc.entry_streams(x, S)
    X, h, A, C, B = mhc.boundary(X, None, None, None, A, mix)
    X, h, A, C, B = mhc.boundary(X, h * y, C, B, A, mix)
    X = mhc.post(X, h * y, C, B) * y[:, None]  # an Engram adds to the streams here
    X, h, A, C, B = mhc.boundary(X, None, None, None, A, mix)
    X = mhc.post(X, h * y, C, B)
    return norm(mhc.collapse(X, A))


@cache
def pieces() -> dict[str, Piece]:
    """The pieces of regions, by form."""
    n = S * (S + 2)
    rows = torch.randn(7, D).bfloat16(), torch.randn(7, D).bfloat16()
    weights = torch.randn(n, S * D), torch.randn(n), torch.rand(3), torch.randn(D).bfloat16()
    gm = trace(stack, *rows, static=weights)
    for each in PIPELINE:
        apply(each.run, gm)
    plan = partition(gm, cut_at=CUT_AT)
    found = {}
    for piece in plan.pieces:
        for call in regions(piece.body):
            region = region_of(call)
            found[region.attrs.get("form", region.kind)] = piece
    return found


def inputs_of(form: str, rows: int) -> list[Any]:
    """Random inputs; what the trace has expanded is expanded."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for node in (node for node in pieces()[form].body.graph.nodes if node.op == "placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and 0 in value.stride():
            found.append(torch.rand(value.shape[1:], generator=generator).expand(rows, *value.shape[1:]))
        else:
            found.append(random_like(value, rows, generator, exact=False))
    return found


def made(form: str) -> GeneratedPiece:
    piece = generate_piece(pieces()[form].body, form, form)
    assert isinstance(piece, GeneratedPiece), piece
    return piece


def test_every_form_is_found() -> None:
    assert sorted(pieces()) == sorted(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_a_region_of_the_model_is_generated_and_computes_the_same(interpreter: Interpreter, form: str) -> None:
    body, kernel = pieces()[form].body, made(form).kernel
    inputs = inputs_of(form, 12)
    whole = interpret(interpreter, kernel, inputs)
    check_contract(body, inputs, whole)
    few = [arg[:3] if isinstance(arg, Tensor) and arg.shape[:1] == (12,) else arg for arg in inputs]
    few = [3 if isinstance(arg, int) else arg for arg in few]
    for a, b in zip(whole, interpret(interpreter, kernel, few), strict=True):
        assert torch.equal(a[:3], b)


def test_inputs_of_another_layout_are_refused_before_anything_runs() -> None:
    piece = made("exit")
    inputs = inputs_of("exit", 4)
    wrong = [arg.to(torch.float16) if isinstance(arg, Tensor) and arg.ndim == 3 else arg for arg in inputs]
    with pytest.raises(PieceInputMismatch, match="exit"):
        piece(*wrong)


def test_no_rows_launch_nothing() -> None:
    (result,) = made("exit")(*inputs_of("exit", 0))
    assert result.shape == (0, D)


def region_piece(fn, *rows: Tensor) -> GraphModule:
    gm = trace(fn, *rows)
    outline(gm, [node for node in gm.graph.nodes if node.op == "call_function"], kind="any")
    (piece,) = partition(gm, cut_at=("any",)).pieces
    return piece.body


def test_a_piece_beyond_the_generator_is_refused_with_node_and_reason() -> None:
    refusal = generate_piece(region_piece(lambda x: x.cumsum(-1), torch.randn(7, 64)), "any", "any")
    assert isinstance(refusal, Unsupported)
    assert refusal.op == "aten.cumsum.default" and "does not know" in refusal.reason


def test_results_that_lie_otherwise_in_memory_are_refused() -> None:
    refusal = generate_piece(region_piece(lambda x: (x * 2).transpose(1, 2), torch.randn(7, 4, 64)), "any", "any")
    assert isinstance(refusal, Unsupported) and "strides" in refusal.reason


@pytest.mark.parametrize("way", [hold, pass_over])
def test_views_and_masks_are_read_where_they_lie(
    interpreter: Interpreter, way: Callable[[GraphModule], Kernel]
) -> None:
    def weighed(x: Tensor) -> Tensor:
        key, value = x.split((2, 1), 1)
        return torch.where(value[..., 0] > 0, (key * value).sum(-1), 0.0)

    gm = trace(weighed, torch.randn(7, 3, 64))
    views = ("split", "slice", "select", "getitem", "gt")
    inside = [n for n in gm.graph.nodes if n.op == "call_function" and not n.name.startswith(views)]
    outline(gm, inside, kind="any")
    piece = next(piece for piece in partition(gm, cut_at=("any",)).pieces if piece.border == "region any")
    metas = [n.meta["val"] for n in piece.body.graph.nodes if n.op == "placeholder"]
    assert any(isinstance(v, Tensor) and v.stride()[0] == 192 for v in metas)
    assert any(isinstance(v, Tensor) and v.dtype == torch.bool for v in metas)
    check_everywhere(interpreter, piece.body, way(piece.body))


def test_there_are_no_kernels_for_a_cpu() -> None:
    assert "cpu" in (unsupported_device(torch.device("cpu")) or "")
    assert unsupported_device(torch.device("cuda")) is None
