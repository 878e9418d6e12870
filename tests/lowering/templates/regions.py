"""Pieces that are one attention, made by the passes from a spelling of it, and inputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import apply, copy_program
from tests.strategies.attention import Spelling
from tests.strategies.record_gathers import Lying, prepared
from tests.strategies.tracing import trace
from v41.lowering.templates.attention import AttentionKernel, generate
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_attention import KIND, outline_attention
from v41.passes.partition import partition
from v41.passes.take_in_gathers import take_in_gathers
from v41.regions import region_of, regions


@cache
def piece(spelling: Spelling) -> GraphModule:
    """The one piece of `spelling` that is its region."""
    torch.manual_seed(0)
    fn, rows, weights = spelling.to_trace()
    gm = trace(fn, *rows, static=weights)
    for run in (canonicalize, outline_attention):
        apply(run, gm)
    (found,) = [each.body for each in partition(gm, cut_at=(KIND,)).pieces if list(regions(each.body, KIND))]
    return found


def kernel_of(spelling: Spelling) -> AttentionKernel:
    made = generate(piece(spelling))
    assert isinstance(made, AttentionKernel), made
    return made


@cache
def lying_piece(case: Lying) -> GraphModule:
    """The one piece of `case` that is its region."""
    gm = copy_program(prepared(case))
    apply(take_in_gathers, gm)
    (found,) = [each.body for each in partition(gm, cut_at=(KIND,)).pieces if list(regions(each.body, KIND))]
    return found


def lying_kernel(case: Lying) -> AttentionKernel:
    made = generate(lying_piece(case))
    assert isinstance(made, AttentionKernel), made
    return made


def inputs_of(body: GraphModule, spelling: Spelling, rows: int, seed: int = 0, seen: float = 0.6) -> list[Any]:
    """As the model would give them, in the order of the placeholders of `body`; a key is seen with this probability."""
    generator = torch.Generator().manual_seed(seed)
    (call,) = regions(body, KIND)
    roles = dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    def keys(branch: int, count: int) -> Tensor:
        return spelling.stored(spelling.formats[branch], normal(rows, count, spelling.width).bfloat16())

    picked = spelling.picked or 0
    angle = normal(rows, spelling.rotary // 2)
    shown = torch.rand(rows, spelling.window + picked, generator=generator) < seen
    given = {
        "queries": 3 * normal(rows, spelling.heads, spelling.width).bfloat16(),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "window": keys(0, spelling.window),
        "picked": keys(1, picked),
        "visible": shown[:, : spelling.window],
        "picks": torch.where(shown[:, spelling.window :], torch.randint(0, 9, (rows, picked), generator=generator), -1),
        "sink": normal(spelling.heads),
        "size": rows,
    }
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    return [fitted(given[roles[node]], node.meta["val"]) if node in roles else rows for node in placeholders]


def by_role(body: GraphModule, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors of `inputs`, by what they are to the region that is all of `body`."""
    (call,) = regions(body, KIND)
    roles = dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    return {roles[node]: value for node, value in zip(placeholders, inputs, strict=True) if node in roles}


def fitted(value: Any, meta: Any) -> Any:
    """`value` in the shape and type of a placeholder."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape([-1 if not isinstance(size, int) else size for size in meta.shape]).to(meta.dtype).contiguous()
