"""mhc_heads: how columns of an mHC projection become coefficients: a gate each for pre and post, a softmax for comb.

    gate    factor * sigmoid(columns) + eps
    comb    steps of normalisation after softmax(columns as a matrix) + eps, or exp in place of softmax
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch.fx import Node

from v41.passes.fold_sinkhorn import Step
from v41.passes.matching import aten, shape


@dataclass(frozen=True)
class Gate:
    """factor * sigmoid(columns) + eps."""

    columns: tuple[int, int]
    result: Node
    factor: float
    eps: float


@dataclass(frozen=True)
class Comb:
    """Steps of normalisation after a softmax or an exp plus head_eps. result None: what follows the head is none."""

    columns: tuple[int, int]
    head: Node
    head_kind: str
    head_axis: int | None
    head_eps: float
    result: Node | None = None
    chain: tuple[Step, ...] = ()  # where it is no region yet
    first_axis: int = 0
    steps: int = 0
    eps: float = 0.0


def parts_of_columns(user: Node, low: int, high: int, last: int) -> list[tuple[Node, tuple[int, int]]]:
    """The pieces that a split or a slice along the last axis takes from columns low..high."""
    match user.target, user.args:
        case aten.split_with_sizes.default, (_, list() as sizes, *axis) if (axis or [0])[0] in (-1, last):
            starts = [low + sum(sizes[:i]) for i in range(len(sizes))]
            items = [item for item in user.users if item.target is operator.getitem]
            return [(item, (starts[i], starts[i] + sizes[i])) for item in items if isinstance(i := item.args[1], int)]
        case aten.slice.Tensor, (_, axis, int() as start, int() as end) if axis in (-1, last):
            width = high - low
            start, end = (max(0, each + width) if each < 0 else min(each, width) for each in (start, end))
            return [(user, (low + start, low + end))]
    return []


def gate_of(sigmoid: Node, columns: tuple[int, int]) -> Gate:
    """The sigmoid with the number it is multiplied by and the one added, at most one each, in that order."""
    gate = Gate(columns, sigmoid, 1.0, 0.0)
    for user in gate.result.users:
        match user.target, user.args:
            case aten.mul.Tensor, (_, int() | float() as factor):
                gate = replace(gate, result=user, factor=float(factor))
                break
    added = number_added(gate.result)
    return gate if added is None else replace(gate, result=added[0], eps=added[1])


def number_added(node: Node) -> tuple[Node, float] | None:
    for user in node.users:
        match user.target, user.args:
            case aten.add.Tensor, (_, int() | float() as number) if not user.kwargs:
                return user, float(number)
    return None


def head_of(logits: Node, user: Node) -> tuple[Node, str, int | None] | None:
    """(result, kind, axis from the end) of the softmax, whole or decomposed, or the exp that starts at `user`."""
    last = len(shape(logits))
    match user.target, user.args:
        case aten._softmax.default, (_, int() as axis, _):
            return user, "softmax", axis % last - last
        case aten.exp.default, _:
            return user, "exp", None
        case aten.amax.default, (_, [int() as axis], True):
            for shifted in user.users:
                for power in shifted.users if shifted.args == (logits, user) else ():
                    for quotient in power.users if power.target is aten.exp.default else ():
                        match quotient.target, quotient.args:
                            case aten.div.Tensor, (_, Node(target=aten.sum.dim_IntList, args=(total, [along], True))):
                                if quotient.args[0] is power and total is power and along == axis:
                                    return quotient, "softmax", axis % last - last
    return None
