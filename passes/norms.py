"""norms: an RMSNorm as it lies in a canonical graph: its row, its weight, its result, and the tail behind it.

    x -> x * rsqrt(mean(x^2) + eps) -> * w -> round -> v -> tail (row_tails.py)

A scaling whose x is not what was squared is no norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from v41.passes.matching import (
    RESHAPES,
    absorb,
    between,
    end_of_norm,
    is_constant,
    is_widening,
    same_sizes,
    shape,
    unviewed,
)
from v41.passes.row_tails import Tail
from v41.passes.scalings import Scaling


@dataclass(frozen=True)
class Norm:
    """order: place of each node of the program."""

    order: Mapping[Node, int]
    row: Node
    result: Node
    weight: Node | None
    eps: float

    @cached_property
    def tail(self) -> Tail:
        return Tail(self.order, self.result)

    @cached_property
    def nodes(self) -> set[Node]:
        """From the row, not included, to the end of the tail."""
        return {*between(self.order, {self.row}, [self.result]), *self.tail.nodes}

    def closed(self, nodes: set[Node]) -> list[Node]:
        """`nodes` with the free ones, and the work on tables of angles, that only they read; in graph order."""
        tables = self.tail.tables
        return sorted(absorb(nodes, lambda node: node in tables or is_free(node)), key=self.order.__getitem__)

    @property
    def exits(self) -> set[Node | None]:
        """What outsiders may read: the row when it is normed, turned, quantised."""
        return {self.result, self.tail.turned, self.tail.quantised, *self.tail.scales}

    @cached_property
    def roles(self) -> dict[Node, str]:
        """What it reads beside the row, and makes, by name."""
        return self.tail.roles | (dict.fromkeys(unviewed(self.weight), "weight") if self.weight is not None else {})

    @property
    def facts(self) -> dict[str, Any]:
        """What a region with this norm says of it. then: the steps behind it, () for none."""
        turn, form, width = self.tail.rotation, self.tail.format, shape(self.result)[-1]
        assert isinstance(width, int)
        return {
            "width": width,
            "eps": self.eps,
            "weighted": self.weight is not None,
            "then": self.tail.then,
            "rope": turn.form if turn is not None else None,
            "format": form.facts(width) if form is not None else None,
        }


def norm_of(order: Mapping[Node, int], scaling: Scaling) -> Norm | None:
    """The norm that `scaling` is the heart of; None where it divides another value than was squared."""
    squared = set(unviewed(scaling.source))
    row = next((node for node in unviewed(scaling.operand) if node in squared), None)
    if row is None or not shape(row):
        return None
    width = shape(row)[-1]

    def weighs(node: Node) -> bool:
        sizes = shape(node)
        return bool(sizes) and same_sizes(sizes, (*[1] * (len(sizes) - 1), width))

    result, weight = end_of_norm(scaling.result, weighs)
    return Norm(order, row, result, weight, scaling.eps)


def is_free(node: Node) -> bool:
    """Whether `node` costs nothing where it is read: a view, a wider type, numbers alone."""
    return node.target in RESHAPES or is_widening(node) or is_constant(node)


def role_of(arg: Node, roles: Mapping[Node, str]) -> str:
    """What `arg` is, or what it is a view or a wider form of; "other" for what has no role."""
    return next((roles[node] for node in unviewed(arg) if node in roles), "other")
