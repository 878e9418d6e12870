"""engram_gates: where a canonical graph adds to residual streams what a gate made of them lets through.

    X + sigmoid(signed_sqrt(<X, w key> / rms(X) / rms(key) * scale)) value, 0 where a mask is off

Found by a sigmoid that weighs what is added to the streams it was made of. What it computes is read by running the
nodes on numbers (analysis/probe.py): spelling does not matter. Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.matching import VIEWS, absorb, aten, cone, fake, is_narrowing, is_pointwise, same_sizes, shape, unviewed
from v41.passes.norms import is_free

GATE = "engram_gate"
FLOORS = (aten.clamp_min.default, aten.clamp.default, aten.maximum.default)
FAR = 64  # nodes behind a sigmoid that are looked at
SIZES = (1.0, 1.0), (1e-10, 1.0), (1e-3, 1.0), (1.0, 1e-9), (0.0, 1.0)  # of rows, of a weight, each draw


class Formula(NamedTuple):
    """sigmoid(sign(d) sqrt(max(|d|, floor))), d = scale <X, w key> / rms(X) / rms(key); eps is under both roots."""

    eps: float
    scale: float
    floor: float


@dataclass(frozen=True)
class Gate:
    """total: the sum of the streams X and of what the gate lets through."""

    order: Mapping[Node, int]
    sigmoid: Node
    total: Node
    streams: Node
    kind = GATE

    @property
    def anchor(self) -> Node:
        return self.total

    @cached_property
    def result(self) -> Node:
        """The streams after their rounding, if that is all that reads the sum."""
        (user, *others) = self.total.users or [self.total]
        return user if not others and is_narrowing(user) else self.total

    @cached_property
    def inner(self) -> tuple[list[Node], list[Node]]:
        """From what it reads to the result, and what it reads, but for the streams."""
        nodes, read = cone(self.order, self.result, (self.streams,), _may_gate)
        return nodes, [node for node in read if node is not self.streams]

    @cached_property
    def operands(self) -> dict[str, list[Node]]:
        """What it reads beside the streams, by role."""
        _, weighed = cone(self.order, self.sigmoid, (self.streams,), _may_gate)
        found: dict[str, list[Node]] = {}
        for node in self.inner[1]:
            value = fake(node)
            assert value is not None
            alike = same_sizes(shape(node), shape(self.streams))
            other = "mask" if value.dtype is torch.bool else "value"
            role = "key" if alike and node in weighed else "weight" if node in weighed else other
            found.setdefault(role, []).append(node)
        return found

    @property
    def is_complete(self) -> bool:
        count = {role: len(nodes) for role, nodes in self.operands.items()}
        return count.get("key") == count.get("value") == 1 and count.get("mask", 0) <= 1

    @cached_property
    def formula(self) -> Formula | None:
        """The numbers of the gate; None where it is another."""
        if not self.is_complete or not isinstance(shape(self.streams)[-1], int):
            return None
        eps, floors, scales = {0.0}, {0.0}, {1.0, int(shape(self.streams)[-1]) ** -0.5}
        for node in self.inner[0]:
            held = {float(arg) for arg in node.args if isinstance(arg, (int, float))}
            (eps if node.target is aten.add.Tensor else floors if node.target in FLOORS else scales).update(held)
        told = map(Formula._make, product(sorted(eps), sorted(scales), sorted(floors)))
        try:
            return next((each for each in told if self._is(each)), None)
        except (RuntimeError, AssertionError, TypeError):  # it works on bits, or on sizes that are not there
            return None

    def _is(self, formula: Formula) -> bool:
        return all(torch.allclose(found, self._gated(given, formula), 1e-7, 1e-12) for given, found in self._runs)

    @cached_property
    def _runs(self) -> list[tuple[dict[Node, Tensor], Tensor]]:
        """Drawn operands and what becomes of them: as they come, so small that eps or the floor shows, and zeros."""
        runs = []
        weights = self.operands.get("weight", [])
        for seed, (rows, weight) in enumerate(SIZES):
            given = {node: numbers(node, 9 * seed + i) for i, node in enumerate((self.streams, *self.inner[1]))}
            with outside_fake_mode():
                given[self.streams] *= rows
                given[self.operands["key"][0]] *= rows
                for node in weights[:1]:
                    given[node] *= weight
                for node in self.operands.get("mask", ()):
                    given[node] = given[node] > 0
            runs.append((given, evaluate(self.inner[0], given, self.result)))
        return runs

    def _gated(self, given: dict[Node, Tensor], formula: Formula) -> Tensor:
        with outside_fake_mode():
            X, key = given[self.streams], given[self.operands["key"][0]]
            weighed = X * key
            for weight in self.operands.get("weight", ()):
                weighed = weighed * given[weight]
            rms = [(each.square().mean(-1) + formula.eps).rsqrt() for each in (X, key)]
            d = weighed.sum(-1) * rms[0] * rms[1] * formula.scale
            gate = torch.sigmoid(d.sign() * d.abs().clamp(min=formula.floor).sqrt())
            for mask in self.operands.get("mask", ()):
                gate = torch.where(given[mask].reshape(gate.shape[0], -1), gate, 0.0)
            value = given[self.operands["value"][0]]
            return X + gate.unsqueeze(-1) * value.reshape(X.shape[0], 1, -1)

    @cached_property
    def members(self) -> list[Node]:
        """From the streams to the streams, with what only it reads, in graph order."""
        return sorted(absorb(self.inner[0], is_free), key=self.order.__getitem__)

    @property
    def exits(self) -> set[Node | None]:
        return {self.result}


def _may_gate(node: Node) -> bool:
    views = VIEWS - {aten.slice.Tensor, aten.select.int}  # these cut keys and values out of a projection
    bits = node.target in (aten.ge.Scalar, aten.gt.Scalar)  # a mask is an operand
    sums = node.target in (aten.sum.dim_IntList, aten.mean.dim, aten.bmm.default)
    return (node.target in views or sums or is_pointwise(node)) and not bits


def gates(order: Mapping[Node, int]) -> list[Gate]:
    """Sums of streams [T, S, D] and what a sigmoid made of them weighs, in graph order."""
    found = []
    for sigmoid in order:
        if sigmoid.target is aten.sigmoid.default and (total := _total(order, sigmoid)) is not None:
            inside = set(cone(order, sigmoid, (total[1],), _may_gate)[1])
            if total[1] in inside:
                found.append(Gate(order, sigmoid, *total))
    return found


def _total(order: Mapping[Node, int], sigmoid: Node) -> tuple[Node, Node] | None:
    """The first sum of three axes that `sigmoid` leads to, and what else it adds up."""
    ahead, seen = [sigmoid], {sigmoid}
    for node in ahead:  # grows as it is walked
        for user in node.users:
            other = [arg for arg in user.all_input_nodes if arg not in seen]
            if user.target is aten.add.Tensor and len(shape(user)) == 3 and len(other) == 1 and not user.kwargs:
                *_, streams = unviewed(other[0])
                return (user, streams) if same_sizes(shape(streams), shape(user)) else None
            if user not in seen and len(ahead) < FAR and (is_pointwise(user) or user.target in VIEWS):
                seen.add(user)
                ahead.append(user)
    return None
