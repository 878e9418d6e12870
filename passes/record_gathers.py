"""record_gathers: where the keys of an attention come from, read from the nodes that gather their records.

    cache[slots, places]                                          [S, E, bytes] -> [T, K, bytes]     "slots"
    where(in_step, records[rows], cache[slots, places])           [T, bytes] for some keys           "step"

Slots are one a row, all else is one a key. Nothing here judges: where a part is something else, there is no Gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import SymInt
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, shape_drawn
from v41.passes.matching import RESHAPES, VIEWS, aten, cone, fake, is_pointwise, same_sizes, shape

IN_ORDER = RESHAPES - {aten.permute.default, aten.transpose.int, aten.t.default}  # views that move no element
TRIED = (1 << 40, -1, 2, 0, -(1 << 40), 1)  # picks; the largest lies beyond every cache


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
        mask, now, then = (each if isinstance(each, Node) else None for each in made.args)
        if mask is None or now is None or then is None or not same_sizes(shape(mask), (*self.sizes[:2], 1)):
            raise Other
        self.nodes[made] = None
        records, (rows,) = self._index(self._unviewed(now), indices=1, axes=2)
        self._is(self._unviewed(mask), f"{self.name}_in_step")
        self._is(records, f"{self.name}_records")
        self._is(self._of_keys(rows), f"{self.name}_rows")
        return self._unviewed(then)

    def _index(self, made: Node, *, indices: int, axes: int) -> tuple[Node, Sequence[Node]]:
        """What `made` gathers from, of so many axes, and by what."""
        source, by = made.args if made.target is aten.index.Tensor else (None, ())
        numbers = [each for each in by if isinstance(each, Node)]  # type: ignore[union-attr]
        counted = all(fake(each).dtype in (torch.int64, torch.int32) for each in numbers)  # type: ignore[union-attr]
        fits = isinstance(source, Node) and len(shape(source)) == axes and same_sizes(shape(made), self.sizes)
        if not fits or not counted or len(by) != indices or len(numbers) != indices:  # type: ignore[arg-type]
            raise Other
        self.nodes[made] = None
        return source, numbers  # type: ignore[return-value]

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
        nodes, leaves = cone(self.order, index, {self.picks}, lambda node: is_pointwise(node) or node.target in VIEWS)
        inside = {*nodes, *self.nodes}
        if leaves != [self.picks] or not all(inside.issuperset(node.users) for node in nodes):
            return False
        with outside_fake_mode():
            sizes = shape_drawn(self.picks)
            picks = torch.tensor(TRIED).repeat(sizes[0] * sizes[-1])[: sizes[0] * sizes[-1]].reshape(sizes)
            try:
                found = evaluate(nodes, {self.picks: picks}, index, keep_types=True)
            except (RuntimeError, AssertionError):
                return False
            told = found if self.shows_hidden else torch.where(picks < 0, found.clamp(max=0), found)
            if found.shape != picks.shape or not torch.equal(told, picks.clamp(min=0)):
                return False
        self.nodes |= dict.fromkeys(nodes)
        self._is(self.picks, "picks")
        return True


def _long(node: Node) -> tuple[int | SymInt, ...]:
    """Sizes other than 1."""
    return tuple(size for size in shape(node) if not (isinstance(size, int) and size == 1))
