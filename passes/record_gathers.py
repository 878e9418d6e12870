"""record_gathers: where the keys of an attention come from, read from the nodes that gather their records.

    cache[slots, places]                                          [S, E, bytes] -> [T, K, bytes]     "slots"
    where(in_step, records[rows], cache[slots, places])           [T, bytes] for some keys           "step"

Slots are one a row, all else is one a key. Nothing here judges: where a part is something else, there is no Gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import SymInt
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, shape_drawn
from v41.passes.matching import RESHAPES, aten, cone, fake, is_constant, prims, same_sizes, shape

IN_ORDER = RESHAPES - {aten.permute.default, aten.transpose.int, aten.t.default}  # views that move no element
TRIED = (1 << 40, -1, 2, 0, -(1 << 40), 1)  # picks; the largest lies beyond every cache
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
CHOOSE = {  # each element is one of those that it reads in its place, or says how these compare
    aten.where.self,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.relu.default,
    *(getattr(aten, name).Scalar for name in COMPARED),
    *(getattr(aten, name).Tensor for name in COMPARED),
}
LOGIC = {aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
         aten.logical_not.default, aten.logical_and.default, aten.logical_or.default}  # fmt: skip
NUMBERS = {aten.full.default: 1, aten.scalar_tensor.default: 0}  # which argument says what all elements are


@dataclass(frozen=True)
class Gather:
    """`nodes`, in graph order, make the records of the branch `name`; operands: what they read, by role.

    roles: the branch's name for the cache; "slots"; "picks" where those are the places, else "{name}_places"; and of
    "step" "{name}_in_step", "{name}_records" and "{name}_rows".
    """

    source: str  # "slots" or "step"
    name: str
    nodes: tuple[Node, ...]
    operands: dict[Node, str]

    def of(self, role: str) -> Node | None:
        return next((node for node, each in self.operands.items() if each == role), None)


class Other(Exception):
    """A part that is no part of a gather."""


def gather_of(
    order: Mapping[Node, int], records: Node, name: str, picks: Node | None, *, shows_hidden: bool
) -> Gather | None:
    """What makes `records`, [T, K, bytes] of the branch `name`; None where it is none of the forms above.

    picks: what the places may be made of, of which negative ones are hidden. shows_hidden: what is hidden shows all
    the same, so the record that a negative one reads matters.
    """
    try:
        return Reader(order, records, name, picks, shows_hidden).gather()
    except Other:
        return None


class Reader:
    """Walks up from the records of one branch."""

    def __init__(
        self, order: Mapping[Node, int], records: Node, name: str, picks: Node | None, shows_hidden: bool
    ) -> None:
        self.order, self.records, self.name, self.picks, self.shows_hidden = order, records, name, picks, shows_hidden
        self.sizes = shape(records)
        self.nodes: dict[Node, None] = {}
        self.operands: dict[Node, str] = {}

    def gather(self) -> Gather:
        made, source = self._unviewed(self.records), "slots"
        if made.target is aten.where.self:
            made, source = self._behind_step(made), "step"
        cache, (slots, places) = self._index(made, indices=2, axes=3)
        self._is(cache, self.name)
        self._is(self._slot(slots), "slots")
        if not self._is_made_of_picks(places):
            self._is(self._of_keys(places), f"{self.name}_places")
        return Gather(source, self.name, tuple(sorted(self.nodes, key=self.order.__getitem__)), self.operands)

    def _behind_step(self, made: Node) -> Node:
        """The gather from the cache, where `made` chooses it for keys that are not of this step."""
        mask, now, then = cast("Sequence[Node]", made.args)
        if not same_sizes(shape(mask), (*self.sizes[:2], 1)):
            raise Other
        self.nodes[made] = None
        records, (rows,) = self._index(self._unviewed(now), indices=1, axes=2)
        self._is(self._unviewed(mask), f"{self.name}_in_step")
        self._is(records, f"{self.name}_records")
        self._is(self._of_keys(rows), f"{self.name}_rows")
        return self._unviewed(then)

    def _index(self, made: Node, *, indices: int, axes: int) -> tuple[Node, Sequence[Node]]:
        """What `made` gathers from, of so many axes, and by what."""
        if made.target is not aten.index.Tensor or not same_sizes(shape(made), self.sizes):
            raise Other
        source, by = cast("tuple[Node, Sequence[Node | None]]", made.args)
        numbers = [each for each in by if each is not None]
        counted = all(fake(each).dtype in (torch.int64, torch.int32) for each in numbers)  # type: ignore[union-attr]
        if not counted or len(shape(source)) != axes or len(by) != indices or len(numbers) != indices:
            raise Other
        self.nodes[made] = None
        return source, numbers

    def _is(self, node: Node, role: str) -> None:
        if node in self.operands:
            raise Other
        self.operands[node] = role

    def _unviewed(self, node: Node) -> Node:
        """What `node` is but for views, which are the gather's own."""
        while node.target in IN_ORDER:
            self.nodes[node] = None
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _slot(self, index: Node) -> Node:
        """[T], which `index` has for every key: [T, 1], or that expanded."""
        rows = self.sizes[0]
        if index.target is aten.expand.default:
            self.nodes[index] = None
            index = index.args[0]  # type: ignore[assignment]
        node = self._unviewed(index)
        if not same_sizes(shape(index), (rows, 1)) or not same_sizes(_long(node), (rows,)):
            raise Other
        return node

    def _of_keys(self, index: Node) -> Node:
        """[T, K]"""
        node = self._unviewed(index)
        if not same_sizes(shape(index), self.sizes[:2]) or not same_sizes(_long(node), self.sizes[:2]):
            raise Other
        return node

    def _is_made_of_picks(self, index: Node) -> bool:
        """Whether `index` is the picks where these are not negative, and somewhere in the cache elsewhere; then what
        makes it is part of the gather. Where others read that, too, it is an operand like any."""
        if self.picks is None:
            return False
        nodes, leaves = cone(self.order, index, {self.picks}, self._chooses)
        inside = {*nodes, *self.nodes}
        if leaves != [self.picks] or not all(inside.issuperset(node.users) for node in nodes):
            return False
        tried = _worth_trying(nodes)
        if tried is None or not all(self._reads(pick, nodes, index) for pick in tried):
            return False
        self.nodes |= dict.fromkeys(nodes)
        self._is(self.picks, "picks")
        return True

    def _chooses(self, node: Node) -> bool:
        """Whether each element of `node` hangs on the same element of the picks, by choices and comparisons alone. A
        float holds no large pick."""
        assert self.picks is not None
        value = fake(node)
        if value is None or value.is_floating_point():
            return False
        chooses = (
            node.target in IN_ORDER | CHOOSE
            or (node.target in LOGIC and value.dtype == torch.bool)
            or (node.target is prims.convert_element_type.default and node.args[1] == torch.int64)
        )
        return chooses and same_sizes(_long(node), _long(self.picks))

    def _reads(self, pick: int, nodes: Sequence[Node], index: Node) -> bool:
        """Whether `index` says, where all picks are this one, what attention may read of it."""
        assert self.picks is not None
        with outside_fake_mode():
            picks = torch.full(shape_drawn(self.picks), pick)
            found = evaluate(nodes, {self.picks: picks}, index, keep_types=True)
            told = found.clamp(max=0) if pick < 0 and not self.shows_hidden else found
            return torch.equal(told.reshape(picks.shape), picks.clamp(min=0))


def _worth_trying(nodes: Sequence[Node]) -> set[int] | None:
    """Picks that tell what `nodes`, which choose among picks and numbers, make of any: what they choose changes next to
    one of these numbers alone. None where one does not stand in the graph, such as an iota's."""
    tried = set(TRIED)
    for node in nodes:
        numbers: list[object] = []
        if node.target in NUMBERS:
            numbers = [node.args[NUMBERS[node.target]]]
        elif node.target in CHOOSE:
            given = (each for each in (*node.args, *node.kwargs.values()) if each is not None)
            numbers = [each for each in given if not isinstance(each, Node) or fake(each) is None]
        elif is_constant(node):
            return None
        if not all(isinstance(each, int) for each in numbers):
            return None
        tried |= {each + step for each in numbers for step in (-1, 0, 1)}  # type: ignore[operator]
    return tried


def _long(node: Node) -> tuple[int | SymInt, ...]:
    """Sizes other than 1."""
    return tuple(size for size in shape(node) if not (isinstance(size, int) and size == 1))
