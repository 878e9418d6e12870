"""mhc_predictions: what an mHC boundary predicts for later ones, wherever these read it.

    coefficients found in the graph     X -> pre, post, comb, before their boundary is outlined
    a region mhc_boundary               its outputs of these roles, and the streams X that it returns or reads
    rows of either                      those that an index, or a region of trim_replay, takes of all of them

So a boundary is found whose coefficients lie in another half of a trimmed program, or were outlined before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from torch.fx import GraphModule, Node

from v41.passes.matching import aten, getitems
from v41.passes.mhc_heads import Comb, Gate
from v41.passes.replay_seam import KIND as KEPT_ROWS
from v41.passes.replay_seam import rows_taken
from v41.passes.scalings import Scaling
from v41.regions import is_region, region_of, regions

BOUNDARY, EXIT, POST = "mhc_boundary", "mhc_exit", "mhc_post"  # kinds of regions


@dataclass(frozen=True)
class Coefficients:
    """All that one projection predicts from the streams X [T, n, D]."""

    projection: Node
    width: int  # its columns
    streams: Node
    scaling: Scaling | None
    gates: tuple[Gate, ...]  # by column
    combs: tuple[Comb, ...]

    @property
    def pre_and_post(self) -> tuple[Gate, Gate]:
        """Of two gates, pre first: as their columns lie, unless only the first has a factor."""
        first, second = self.gates
        return (second, first) if first.factor != 1 and second.factor == 1 else (first, second)


@dataclass(frozen=True)
class Prediction:
    """Values that later parts read: of coefficients found here, or of a boundary that is a region already."""

    streams: Node
    pres: tuple[Node, ...]
    posts: tuple[Node, ...]
    comb: Node


def predictions(gm: GraphModule, found: Iterable[Coefficients]) -> list[Prediction]:
    """What the coefficients `found` in `gm` and its boundaries predict, and what is taken of that."""
    whole = [*_of_coefficients(found), *_of_regions(gm)]
    return [*whole, *(taken for each in whole for taken in _with_rows_taken(each))]


def _of_coefficients(found: Iterable[Coefficients]) -> Iterator[Prediction]:
    """What the coefficients predict. Of more gates than two, any but the first may be post."""
    for each in found:
        gates = [gate.result for gate in each.gates]
        pre, posts = [gates[0]], gates[1:]
        if len(gates) == 2:
            pre, posts = ([gate.result] for gate in each.pre_and_post)
        for comb in each.combs:
            if comb.result is not None:
                yield Prediction(each.streams, tuple(pre), tuple(posts), comb.result)


def _of_regions(gm: GraphModule) -> Iterator[Prediction]:
    """What boundaries predict that were outlined before."""
    for call in regions(gm, BOUNDARY):
        attrs, taken = region_of(call).attrs, getitems(call)
        made = {role: taken[i] for i, role in enumerate(attrs["outputs"]) if i in taken}
        read = dict(zip(attrs["operands"], call.args[2:], strict=True))
        if "comb" in made:
            pres, posts = (tuple(made[role] for role in (name,) if role in made) for name in ("pre", "post"))
            yield Prediction(made.get("streams") or read["streams"], pres, posts, made["comb"])


def _with_rows_taken(whole: Prediction) -> Iterator[Prediction]:
    """What is predicted, of the rows that an index takes of all of it (trim_replay.py)."""
    wanted = (whole.streams, *whole.pres, *whole.posts, whole.comb)
    taken: dict[Node, dict[Node, Node]] = {}
    for value in wanted:
        for user in value.users:
            if user.target is aten.index.Tensor and user.args[0] is value:
                index, *others = cast("list[Node]", user.args[1])
                taken.setdefault(index, {}).update({} if others else {value: user})
            elif is_region(user, KEPT_ROWS) and (kept := rows_taken(user).get(value)) is not None:
                taken.setdefault(user, {})[value] = kept
    for rows in taken.values():
        if rows.keys() >= {whole.streams, *whole.posts, whole.comb}:
            pres = tuple(rows[pre] for pre in whole.pres if pre in rows)
            yield Prediction(rows[whole.streams], pres, tuple(rows[post] for post in whole.posts), rows[whole.comb])
