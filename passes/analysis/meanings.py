"""meanings: what integers say of rows, as far as they are used to index or to decide which rows a write keeps.

    of                                  an element is
    number                              in [low, high]
    row                                 the number of its own row + [low, high]; natural: never negative
    row of chosen                       the same of rows that an input says: by
    position, stop                      the position of its row, or the end of its chunk, + [low, high]
    start, late floor                   the first position of the chunk; see Ragged
    in step, above late floor           true where the position of a key, `offsets` from its row's, is not below these
    last, not last                      true (false) where a row is among the last `low` of its chunk
    kept                                a place for the last `low` rows of a chunk, the number `high` for all others
    pick                                the number of its pick, T * low of them, in the order of a sort
    keys                                what that sort has sorted
    ends                                [low]: where the run of each key ends
    place                               the place that the sort gave to its pick
    last row                            the number of the last row
    ranks                               [low * rows, ..]: what each of `low` ranks has, one behind the other
    request, column of row, first row, column, grid     see Ragged

offsets: what is added along the last dimension, where that is known. Interval arithmetic over exact integers; what is
not known means nothing (None).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import ops
from torch.fx import Node

from v41.passes.matching import shape

aten, prims = ops.aten, ops.prims
FLOORS = {"start": "in step", "late floor": "above late floor"}
NUMBERS = ("row", "row of chosen")
SHIFTED = ("number", *NUMBERS, "position", "stop")  # those that a number may be added to


@dataclass(frozen=True)
class Meaning:
    of: str
    low: int = 0
    high: int = 0
    natural: bool = False
    by: tuple[Node, ...] = ()  # the sort, behind the subgraph calls it happens in; or the input
    offsets: tuple[int, ...] = ()

    def plus(self, low: int, high: int, offsets: tuple[int, ...] = ()) -> Meaning:
        natural = self.of in ("number", *NUMBERS) and self.low + low >= 0
        known: tuple[int, ...] = ()
        if self.offsets and low == high:
            known = tuple(each + low for each in self.offsets)
        elif offsets and not self.offsets and self.low == self.high:
            known = tuple(self.low + each for each in offsets)
        return replace(self, low=self.low + low, high=self.high + high, natural=natural, offsets=known)


def number(value: object) -> Meaning | None:
    return Meaning("number", value, value, value >= 0) if type(value) is int else None


Known = tuple[Meaning | None, ...]  # of the arguments


def _add(node: Node, known: Known) -> Meaning | None:
    match known:
        case (Meaning(of="first row"), Meaning(of="column")) | (Meaning(of="column"), Meaning(of="first row")):
            return Meaning("grid")
        case (Meaning(of=of) as base, Meaning(of="number") as by) if of in SHIFTED and not node.kwargs:
            return base.plus(by.low, by.high, by.offsets)
        case (Meaning(of="number") as by, Meaning(of=of) as base) if of in SHIFTED and not node.kwargs:
            return base.plus(by.low, by.high, by.offsets)
    return None


def _sub(node: Node, known: Known) -> Meaning | None:
    match known:
        case (Meaning(of=of) as base, Meaning(of="number") as by) if of in SHIFTED and not node.kwargs:
            return base.plus(-by.high, -by.low, tuple(-each for each in by.offsets))
    return None


def _at_least(node: Node, known: Known) -> Meaning | None:
    """max with a number: rows and numbers stay what they are when it is 0."""
    match known:
        case (Meaning(of="number") as a, Meaning(of="number") as b):
            low, high = max(a.low, b.low), max(a.high, b.high)
            return Meaning("number", low, high, low >= 0)
        case (Meaning(of=of) as row, Meaning(of="number", low=0, high=0)) | (
            Meaning(of="number", low=0, high=0), Meaning(of=of) as row) if of in NUMBERS:  # fmt: skip
            return replace(row, high=max(row.high, 0), natural=True)
    return None


def _at_most(node: Node, known: Known) -> Meaning | None:
    """min with the number of the last row, where rows and the places of a grid end."""
    match known:
        case (Meaning(of="grid") as grid, Meaning(of="last row")):
            return grid
        case (Meaning(of=of) as row, Meaning(of="last row")) if of in NUMBERS:
            return replace(row, low=min(row.low, 0))
    return None


def _floor_divide(node: Node, known: Known) -> Meaning | None:
    down = node.kwargs.get("rounding_mode") in ("floor", "trunc")  # picks are natural
    match known:
        case (Meaning(of="pick", low=k) as pick, Meaning(of="number", low=by, high=high)) if down and by == high == k:
            return Meaning("row", natural=True, by=pick.by)
    return None


def _compare(node: Node, known: Known) -> Meaning | None:
    """position + a >= stop - b and its spellings. Unequal numbers on one side are no single bound."""
    match known:
        case (Meaning(of="position") as position, Meaning(of="stop") as stop):
            name = str(node.target).split(".")[1]
        case (Meaning(of="stop") as stop, Meaning(of="position") as position):
            name = _MIRRORED[str(node.target).split(".")[1]]
        case (Meaning(of="position") as key, Meaning(of=floor)) if floor in FLOORS and key.offsets:
            is_above = str(node.target).split(".")[1] == "ge"
            return Meaning(FLOORS[floor], offsets=key.offsets) if is_above else None
        case _:
            return None
    if position.low != position.high or stop.low != stop.high:
        return None
    behind = position.low - stop.low  # holds where position + behind >= stop (ge), ...
    match name:
        case "ge":
            return Meaning("last", behind)
        case "gt":
            return Meaning("last", behind - 1)
        case "lt":
            return Meaning("not last", behind)
        case "le":
            return Meaning("not last", behind - 1)
        case "eq":
            return Meaning("last", behind)  # of these, one row: no other is more than the last ones
        case "ne":
            return Meaning("not last", behind)
    return None


_MIRRORED = {"ge": "le", "gt": "lt", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}


def _not(node: Node, known: Known) -> Meaning | None:
    swapped = {"last": "not last", "not last": "last"}
    meant = known[0]
    return replace(meant, of=swapped[meant.of]) if meant is not None and meant.of in swapped else None


def _where(node: Node, known: Known) -> Meaning | None:
    match known:
        case (Meaning(of="last", low=n), _, Meaning(of="number", low=low, high=high)) if low == high:
            return Meaning("kept", n, high)
        case (Meaning(of="not last", low=n), Meaning(of="number", low=low, high=high), _) if low == high:
            return Meaning("kept", n, high)
    return None


def _same(node: Node, known: Known) -> Meaning | None:
    meaning, last = known[0], shape(node)[-1:]
    if meaning is None or not meaning.offsets or last == (len(meaning.offsets),):
        return meaning
    return replace(meaning, offsets=()) if meaning.of in SHIFTED else None


def _cast(node: Node, known: Known) -> Meaning | None:
    return known[0] if node.args[1] in (torch.int32, torch.int64) else None


def _made(node: Node, known: Known) -> Meaning | None:
    """full, scalar_tensor"""
    return number(node.args[1] if node.target is aten.full.default else node.args[0])


MEANINGS: dict[object, Callable[[Node, Known], Meaning | None]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.clamp_min.default: _at_least,
    aten.clamp_min.Tensor: _at_least,
    aten.maximum.default: _at_least,
    aten.relu.default: lambda node, known: _at_least(node, (*known, number(0))),
    aten.clamp_max.default: _at_most,
    aten.div.Tensor_mode: _floor_divide,
    **{getattr(aten, name).Tensor: _compare for name in _MIRRORED},
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.where.self: _where,
    aten.full.default: _made,
    aten.scalar_tensor.default: _made,
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.expand.default,
            aten.clone.default,
            aten.alias.default,
            aten.detach.default,
        ),
        _same,
    ),
    prims.convert_element_type.default: _cast,
}
