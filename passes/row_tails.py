"""row_tails: what becomes of a row that was normalised: turned by RoPE, then quantised; or one of the two, or neither.

    v -> split, a cos - b sin, ..., cat -> r        a Rotation (turns.py)
    r -> amax of groups, scale, values, cat -> q    a Format (number_formats.py)
    r -> amax of groups -> s;  r / s -> q           the same, values and scales apart

Found by walking from v through what works on numbers and bits, in graph order, and by running the nodes that lead to a
value of the right shape and type. What a walk may cross is a list, so it ends at products with weights, gathers, writes
and regions. It may read, beside v, what stood there before v: so no path leaves a tail and comes back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    aten,
    between,
    cone,
    fake,
    is_constant,
    is_part,
    is_pointwise,
    prims,
    shape,
)
from v41.passes.number_formats import WHOLE, Format, formats_of, read_format
from v41.passes.turns import Rotation, rotation_from

REACH = 200  # nodes behind a value that are looked at: twice what the longest tail has
CROSSED = VIEWS | {  # beside what works element by element. Not here: `sum` (a tail sums nothing), `index`, `repeat`
    aten.view.dtype,
    aten.clone.default,
    aten.cat.default,
    aten.amax.default,
}

MOVED = RESHAPES | {  # what may be done to a table of angles on its way
    aten.expand.default,
    aten.clone.default,
    aten.neg.default,
    aten.cat.default,
    prims.convert_element_type.default,
}


@dataclass(frozen=True)
class Tail:
    """What becomes of `source`. nodes: on the way to the ends, each in graph order; not `source`."""

    order: Mapping[Node, int]
    source: Node

    @cached_property
    def rotation(self) -> Rotation | None:
        width, ahead = shape(self.source)[-1], set(reach(self.order, self.source))
        found = rotation_from(self.order, self.source, width) if isinstance(width, int) else None
        return found if found is not None and found.result in ahead else None

    @property
    def turned(self) -> Node | None:
        return self.rotation.result if self.rotation is not None else None

    @cached_property
    def _row(self) -> tuple[Node, dict[Node, None]]:
        """What may be quantised, and the nodes within reach of it."""
        row = self.turned or self.source
        return row, dict.fromkeys(reach(self.order, row))

    def _formats(self, forms: Collection[str]) -> Iterator[tuple[Node, Format]]:
        row, walk = self._row
        for node in walk:
            if node.target in RESHAPES or not formats_of(row, node, forms):
                continue
            nodes, read = cone(self.order, node, (row,), walk.__contains__)
            if read == [row] and (found := read_format(nodes, row, node, forms)) is not None:
                yield node, found

    @cached_property
    def _quantised(self) -> dict[Node, Format]:
        """The end in a format; of what is apart the values, and all that is their scales in one type or another.

        Scales in e8m0 are cast, and bytes are viewed, outside: no kernel of ours has that type, and a view is free.
        """
        if (whole := next(self._formats(WHOLE), None)) is not None:
            return dict([whole])
        for node, found in self._formats(("values",)):
            by = replace(found, form="scales")
            scales = {node: each for node, each in self._formats((by.form,)) if each == by and not _shows_bytes(node)}
            if scales:
                return {node: found, **scales}
        return {}

    @property
    def format(self) -> Format | None:
        return next(iter(self._quantised.values()), None)

    @property
    def quantised(self) -> Node | None:
        return next(iter(self._quantised), None)

    @property
    def scales(self) -> list[Node]:
        """Of values that lie apart from them."""
        return list(self._quantised)[1:]

    @cached_property
    def nodes(self) -> list[Node]:
        ends = [(self.source, self.turned), *((self._row[0], end) for end in self._quantised)]
        return [node for start, end in ends if end is not None for node in way(self.order, start, end)]

    @property
    def then(self) -> tuple[str, ...]:
        """The steps by name."""
        return ("rope",) * (self.rotation is not None) + ((self.format.name,) if self.format is not None else ())

    @cached_property
    def tables(self) -> frozenset[Node]:
        """What is made of cos and sin alone, or of numbers, before they meet the row."""
        return frozenset(self.rotation.nodes).difference(self.nodes) if self.rotation is not None else frozenset()

    @cached_property
    def roles(self) -> dict[Node, str]:
        """What it reads and makes, by name."""
        found = {self.source: "normed"}
        if (by := self.rotation) is not None:
            found |= {by.result: "turned", by.cos: "cos", by.sin: "sin"}
        return found | {node: "scales" if at else "quantised" for at, node in enumerate(self._quantised)}

    @cached_property
    def astray(self) -> Node | None:
        """Bytes of values, made of the row and nothing but scales, and read beyond reach, whose format is not known."""
        row = self._row[0]
        scales = lambda arg: bool(formats_of(row, arg, ("scales",)))
        walk = dict.fromkeys(reach(self.order, row, scales)) if self.format is None else {}
        for node in walk:
            if not formats_of(row, node, ("values",)) or not _leaves(node, walk):
                continue
            nodes, read = cone(self.order, node, (row,), walk.__contains__)
            found = any(each.target is aten.amax.default for each in nodes) or len(read) > 1
            if found and all(each is row or scales(each) for each in read):
                return node
        return None


def _leaves(node: Node, walk: Collection[Node]) -> bool:
    """Whether `node`, or a view of it, is read by something outside of `walk`."""
    views = [user for user in node.users if user.target in VIEWS or user.target is aten.view.dtype]
    return any(user not in walk for user in node.users) or any(_leaves(view, walk) for view in views)


def _shows_bytes(node: Node) -> bool:
    """Whether `node` is another's memory, as bytes."""
    value = fake(node)
    return node.target is aten.view.dtype and value is not None and value.dtype is torch.uint8


def reach(
    order: Mapping[Node, int], source: Node, may_read: Callable[[Node], bool] = lambda arg: False
) -> list[Node]:
    """Nodes that are made of `source`, constants, what stood before it and what they `may_read`, in graph order; REACH
    of them at most."""
    found: dict[Node, None] = {}
    queue = [(order[user], user) for user in source.users]
    heapq.heapify(queue)
    seen = set(source.users)
    while queue and len(found) < REACH:
        _, node = heapq.heappop(queue)  # in graph order: what it reads was seen
        if not is_pointwise(node) and node.target not in CROSSED and not is_part(node):
            continue
        known = (arg is source or arg in found or _stood_before(order, arg, source) for arg in node.all_input_nodes)
        if all(one or may_read(arg) for one, arg in zip(known, node.all_input_nodes, strict=True)):
            found[node] = None
            for user in node.users:
                if user not in seen and user in order:
                    seen.add(user)
                    heapq.heappush(queue, (order[user], user))
    return list(found)


def _stood_before(order: Mapping[Node, int], arg: Node, source: Node) -> bool:
    """Whether `arg` stands before `source`, or is a constant, or such a value moved, negated or in another type."""
    if order[arg] < order[source] or is_constant(arg) or arg.op != "call_function":
        return True
    value = arg.meta.get("val")
    if arg.target in MOVED or not isinstance(value, (Tensor, tuple, list)):
        return all(_stood_before(order, each, source) for each in arg.all_input_nodes)
    return False


def way(order: Mapping[Node, int], source: Node, end: Node) -> list[Node]:
    """The nodes within reach of `source` that lead from it to `end`, that included, in graph order."""
    return between(order, {source}, [end], may=set(reach(order, source)).__contains__)
