"""turns: RoPE, found by what it computes: some channels of every head turned by the angles of their row.

    x -> split -> (a cos - b sin, a sin + b cos) of each pair -> cat -> y          or any other spelling of it

Pairs are adjacent channels, or channels of two halves; they are the last channels of a head or the first. A run of
nodes is a rotation if its values on random numbers are those of one of the formulas, so neither the order of operations
nor the way a head is cut matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import known_equal
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.matching import VIEWS, aten, cone, fake, is_narrowing, is_part, prims, shape, source_of_view, unviewed

TURNS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)
MOVES = (aten.cat.default, aten.neg.default, aten.clone.default, prims.convert_element_type.default)
FAR = 64  # nodes that one rotation may take; one of model_def takes 22


@dataclass(frozen=True)
class Rotation:
    """y = x with `width` channels of each head turned; sign -1 is the turn back."""

    source: Node  # x
    result: Node
    cos: Node  # [T, width / 2]
    sin: Node
    nodes: tuple[Node, ...]  # in graph order
    width: int
    pairs: str  # "adjacent" or "halves"
    channels: str  # "last" or "first"
    sign: int

    @property
    def tables(self) -> tuple[Node, ...]:
        """What both turns of a row have in common."""
        return tuple(list(unviewed(table))[-1] for table in (self.cos, self.sin))

    @property
    def form(self) -> tuple[int, str, str]:
        return self.width, self.pairs, self.channels


def may_turn(node: Node) -> bool:
    """Whether `node` may be part of a rotation."""
    return node.target in VIEWS or node.target in TURNS or node.target in MOVES or is_part(node)


def rotation_to(order: Mapping[Node, int], result: Node, width: int) -> Rotation | None:
    """The rotation that ends in `result`, of heads of `width` channels."""
    nodes, leaves = cone(order, result, (), may_turn)
    near = [node for node in (*leaves, *nodes) if _as_many(node, result) and node is not result]
    for source in sorted(near, key=order.__getitem__, reverse=True)[:FAR]:
        found = _rotation(order, source, result, width)
        if found is not None:
            first = list(unviewed(source))[-1]
            return _rotation(order, first, result, width) or found
    return None


def rotation_from(order: Mapping[Node, int], source: Node, width: int) -> Rotation | None:
    """The rotation that all of `source` goes into."""
    ahead, seen = [source], {source}
    for node in ahead:  # grows as it is walked
        users = [user for user in node.users if user not in seen and may_turn(user)][: FAR - len(ahead)]
        seen.update(users)
        ahead += users
    near = sorted((node for node in ahead[1:] if _as_many(node, source)), key=order.__getitem__)
    found = None
    for result in near:
        if source_of_view(result) is None:
            found = _rotation(order, source, result, width) or found
    return found


def _as_many(node: Node, other: Node) -> bool:
    a, b = fake(node), fake(other)
    return a is not None and b is not None and bool(known_equal(a.numel(), b.numel()))


def _rotation(order: Mapping[Node, int], source: Node, result: Node, width: int) -> Rotation | None:
    nodes, leaves = cone(order, result, (source,), may_turn)
    tables = [leaf for leaf in leaves if leaf is not source]
    if len(tables) != 2 or source not in leaves or len(nodes) > FAR or not shape(source):
        return None
    given = {node: numbers(node, seed) for seed, node in enumerate((source, *tables))}
    rows = len(given[source])
    try:
        x = given[source].reshape(rows, -1, width)
        found = evaluate(nodes, given, result).reshape(x.shape)
        cos, sin = (given[table].reshape(rows, 1, -1) for table in tables)
    except (RuntimeError, AssertionError):  # it has other sizes than a rotation
        return None
    turned = 2 * cos.shape[-1]
    if cos.shape != sin.shape or not 0 < turned <= width:
        return None
    for (a, b), pairs, channels, sign in product(
        permutations(tables), ("adjacent", "halves"), ("last", "first"), (1, -1)
    ):
        by = given[a].reshape(cos.shape), sign * given[b].reshape(cos.shape)
        if torch.allclose(found, turn(x, *by, pairs, channels), 1e-9, 1e-12):
            return Rotation(source, result, a, b, tuple(nodes), turned, pairs, channels, sign)
    return None


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, channels: str) -> Tensor:
    """x [..., D] with 2P of its channels turned by cos and sin [..., P]."""
    kept = x.shape[-1] - 2 * cos.shape[-1]
    front = kept if channels == "last" else 0
    before, turned, after = x.split((front, x.shape[-1] - kept, kept - front), -1)
    axis = -1 if pairs == "adjacent" else -2
    a, b = turned.unflatten(-1, (-1, 2) if axis == -1 else (2, -1)).unbind(axis)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)
    return torch.cat((before, both, after), -1)


def rounds_early(rotation: Rotation) -> Node | None:
    """Arithmetic of less than fp32, or on what was rounded already."""
    late: set[Node] = set()
    for node in rotation.nodes:
        value, after = fake(node), not late.isdisjoint(node.all_input_nodes)
        if node.target in TURNS and value is not None and (after or value.dtype.itemsize < 4):
            return node
        if is_narrowing(node) or after:
            late.add(node)
    return None
