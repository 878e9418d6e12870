"""attention_core: what lies between the two products of an attention, and what it computes.

    scores = scale q.k, hidden ones -inf        p = exp(scores - max)        o = p.k / (sum p + exp(sink - max))

`find_cores` walks from each softmax up to the product that makes its scores and down to the one that reads values. Its
operands are where that walk ends: what works element by element, moves or reduces belongs to it, all else does not.
`meaning_of` runs the core on random numbers, with random keys hidden, and compares with the formula above, in fp64;
again with large scores, for what bounds them shows there alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers, shape_drawn
from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    aten,
    cone,
    fake,
    is_constant,
    is_narrowing,
    is_part,
    is_pointwise,
    is_widening,
    shape,
    source_of_view,
    unviewed,
)

SOFTMAXES = (aten.exp.default, aten._softmax.default)
REDUCTIONS = (aten.amax.default, aten.max.dim, aten.sum.dim_IntList, aten._softmax.default)
MOVES = (aten.cat.default, aten.clone.default)
FAR = 64  # nodes behind a softmax that are looked at
LARGE = 2.0**17  # times the scores that were drawn: beyond what a clamp leaves
SELDOM = 2.0**-32  # how often a key is seen, where only the first of each branch is
CUTS = (aten.slice.Tensor, aten.select.int)
OF_MASKS = (aten.bitwise_not.default, aten.logical_not.default, aten.cat.default)
AT_LEAST = {(aten.ge.Scalar, 0), (aten.gt.Scalar, -1)}  # what makes a mask of picks


@dataclass(frozen=True)
class Core:
    """One softmax between two products. probabilities: the operand of `pv` that it becomes."""

    order: Mapping[Node, int]
    soft: Node
    qk: Node
    pv: Node
    probabilities: Node

    @cached_property
    def latent(self) -> tuple[Node, Node] | None:
        """The queries, and the keys that are values too; None where they are not."""
        (values,) = [arg for arg in self.pv.all_input_nodes if arg is not self.probabilities][:1] or [self.pv]
        seen = set(unviewed(values))
        for left in (0, 1):
            common = next((node for node in unviewed(self._factor(1 - left)) if node in seen), None)
            if common is not None:
                return unscaled(self._factor(left)), common
        return None

    def _factor(self, index: int) -> Node:
        return cast(Node, self.qk.args[index])

    @property
    def queries(self) -> Node:
        assert self.latent is not None
        return self.latent[0]

    @cached_property
    def sizes(self) -> tuple[object, object, object]:
        """Heads, width, keys."""
        a, b = (shape(self._factor(index)) for index in (0, 1))
        left = self.queries in set(unviewed_and_unscaled(self._factor(0)))
        return (a[1], a[2], b[2]) if left else (b[2], b[1], a[1])

    @cached_property
    def branches(self) -> list[Node]:
        """The keys that were put one behind the other, each before hidden ones were set to 0."""
        assert self.latent is not None
        return list(self._branches(self.latent[1]))

    def _branches(self, keys: Node) -> Iterator[Node]:
        chain = [node for node in unviewed(keys) if len(shape(node)) == 3]
        for node in chain:
            if node.target is aten.cat.default and (node.args[1:] or (0,))[0] == 1:
                for part in cast(Sequence[Node], node.args[0]):
                    yield from self._branches(part)
                return
            shown = [arg for arg in node.args[1:] if isinstance(arg, Node) and not is_constant(arg)]
            if node.target is aten.where.self and len(shown) == 1:
                yield from self._branches(shown[0])
                return
        yield (chain or [keys])[-1]

    @cached_property
    def result(self) -> Node:
        """What the second product becomes when it is divided by the total and rounded."""
        node = result = self.pv
        while len(node.users) == 1:
            (node,) = node.users
            others = [arg for arg in node.all_input_nodes if arg not in (result, *unviewed(node))]
            if node.target in RESHAPES:
                continue
            if node.target in (aten.div.Tensor, aten.mul.Tensor) and any(map(self._is_total, others)):
                result = node
            elif is_narrowing(node):
                return node
            elif not is_widening(node):
                break
        return result

    def _is_total(self, node: Node) -> bool:
        return fake(node) is not None and self.soft in cone(self.order, node, {self.pv}, is_of_core)[0]

    @cached_property
    def _cone(self) -> tuple[list[Node], list[Node]]:
        return cone(self.order, self.result, {self.queries, *self.branches}, is_of_core)

    @property
    def nodes(self) -> list[Node]:
        return self._cone[0]

    @property
    def masks(self) -> list[Node]:
        """What says which keys are seen: bools, and picks, of which the negative ones are none."""
        return [leaf for leaf in self._cone[1] if not fake(leaf).is_floating_point()]  # type: ignore[union-attr]

    @property
    def others(self) -> list[Node]:
        """What it reads beside queries, keys and masks: a sink."""
        known = {self.queries, *self.branches, *self.masks}
        return [leaf for leaf in self._cone[1] if leaf not in known]


def unviewed_and_unscaled(node: Node) -> Iterator[Node]:
    """`node`, then what it is up to views, widening casts and products with a number."""
    current: Node | None = node
    while current is not None:
        yield current
        scaled = current.target in (aten.mul.Tensor, aten.div.Tensor) and not isinstance(current.args[1], Node)
        current = cast(Node, current.args[0]) if scaled else source_of_view(current)


def unscaled(node: Node) -> Node:
    return list(unviewed_and_unscaled(node))[-1]


def is_of_core(node: Node) -> bool:
    """Whether `node` may lie between queries, keys, masks and the result."""
    value = fake(node)
    if node.target in CUTS:  # a piece of what is computed here; a piece of an operand is the operand
        base = cast(Node, node.args[0])
        while base.target in VIEWS:
            base = cast(Node, base.args[0])
        return base.op == "call_function" and is_of_core(base)
    if value is not None and value.dtype is torch.bool:
        makes = len(node.args) == 2 and (node.target, node.args[1]) in AT_LEAST
        return node.target in VIEWS or node.target in OF_MASKS or makes
    if value is not None and not value.is_floating_point():
        return False
    moves = node.target in VIEWS or node.target in MOVES or is_part(node) or node.target is aten.bmm.default
    if node.target is operator.getitem:  # the values of a maximum that also says where it lies
        moves = moves or cast(Node, node.args[0]).target is aten.max.dim
    return moves or is_pointwise(node) or node.target in REDUCTIONS


def find_cores(gm: GraphModule) -> list[Core]:
    """Softmaxes between two products, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    found = []
    for node in order:
        if node.target in SOFTMAXES and (node.target is not aten.exp.default or _is_summed(node)):
            read = _read_by(node)
            scores = _made_by(order, node) if read is not None else None
            if scores is not None and read is not None:
                found.append(Core(order, node, scores, *read))
    return found


def _is_summed(node: Node) -> bool:
    """Whether a sum reads it, up to views and casts."""
    again = (user for user in node.users if user.target in RESHAPES or is_widening(user) or is_narrowing(user))
    return any(user.target is aten.sum.dim_IntList for user in node.users) or any(map(_is_summed, again))


def _made_by(order: Mapping[Node, int], soft: Node) -> Node | None:
    """The one product whose values `soft` works on."""
    _, leaves = cone(order, soft, (), lambda node: is_of_core(node) and node.target is not aten.bmm.default)
    products = [leaf for leaf in leaves if leaf.target is aten.bmm.default]
    return products[0] if len(products) == 1 else None


def _read_by(soft: Node) -> tuple[Node, Node] | None:
    """The first product that reads what becomes of `soft`, element by element, and its operand that does."""
    stack, seen = [soft], {soft}
    while stack and len(seen) < FAR:
        node = stack.pop()
        for user in node.users:
            if user.target is aten.bmm.default:
                return user, node
            if user not in seen and (user.target in VIEWS or user.target in MOVES or is_pointwise(user)):
                seen.add(user)
                stack.append(user)
    return None


# ---- what it computes


@dataclass(frozen=True)
class Meaning:
    """scale: of the scores. over: what p is relative to, "max" of the scores, "max_and_sink" or "total".

    masks: role of each mask, in the order of the branches they hide: "visible", "hidden" or "picks".
    reads_hidden: whether a hidden key that is NaN shows. empty: what a row gets that sees no key, "zero", "nan" or, as
    where large numbers stand for -inf, "other".
    """

    scale: float
    over: str
    masks: dict[Node, str]
    reads_hidden: bool
    empty: str


def meaning_of(core: Core) -> Meaning | None:
    """What `core` computes; None where it is anything else than attention as above."""
    try:
        with outside_fake_mode():
            return _read(core)
    except (RuntimeError, AssertionError, IndexError):  # its sizes are not those of an attention
        return None


def _read(core: Core) -> Meaning | None:
    for masks in permutations(core.masks):
        for roles in product(*(("picks",) if _counts(mask) else ("visible", "hidden") for mask in masks)):
            trial = Trial(core, dict(zip(masks, roles, strict=True)))
            over = trial.over()
            if over is not None:
                return Meaning(trial.scale, over, trial.masks, trial.shows_hidden(), trial.empty())
    return None


def _counts(mask: Node) -> bool:
    return fake(mask).dtype is not torch.bool  # type: ignore[union-attr]


@dataclass(frozen=True)
class Trial:
    """`core` under the assumption that these masks, in this order, hide keys in these ways."""

    core: Core
    masks: dict[Node, str]

    def draw(self, seen: float) -> dict[Node, Tensor]:
        """Numbers for all operands; a key is seen with this probability, the first of each branch, unless it is 0, in
        any case."""
        leaves = [self.core.queries, *self.core.branches, *self.core.others]
        given = {node: numbers(node, seed) for seed, node in enumerate(leaves)}
        for seed, (mask, role) in enumerate(self.masks.items()):
            shown = torch.rand(shape_drawn(mask), generator=torch.Generator().manual_seed(seed)) < seen
            shown[..., 0] = seen > 0
            given[mask] = shown if role == "visible" else ~shown if role == "hidden" else shown.long() * 3 - 2
        return given

    def visible(self, given: Mapping[Node, Tensor]) -> Tensor:
        """[T, K]"""
        meant: dict[str, Callable[[Tensor], Tensor]] = {
            "visible": lambda mask: mask, "hidden": torch.logical_not, "picks": lambda picks: picks >= 0
        }  # fmt: skip
        rows = given[self.core.queries].shape[0]
        return torch.cat([meant[role](given[mask]).reshape(rows, -1) for mask, role in self.masks.items()], -1)

    def output(self, given: Mapping[Node, Tensor], node: Node | None = None) -> Tensor:
        return evaluate(self.core.nodes, dict(given), node or self.core.result)

    @cached_property
    def scale(self) -> float:
        """Of a query of ones and keys of zeros, a 1 in the first: the largest score less the least."""
        drawn = self.draw(1.0)
        given = {node: value if node in self.masks else torch.zeros_like(value) for node, value in drawn.items()}
        given[self.core.queries][...] = 1.0
        for branch in self.core.branches:
            given[branch][:, :1, :1] = float(branch is self.core.branches[0])
        scores = self.output(given, cast(Node, self.core.soft.args[0]))
        return float(scores.amax() - scores.amin())

    def over(self) -> str | None:
        """What p is relative to, where both p and output are those of an attention: the output of large scores, too,
        and of those that are far below 0 for all keys that are seen."""
        given, scored = self.draw(0.6), {self.core.queries, *self.core.others}
        for some in (given, self.draw(SELDOM)):
            large = {node: value * LARGE if node in scored else value for node, value in some.items()}
            if not _close(self.output(large), self.wanted(large)[1]):
                return None
        forms, o = self.wanted(given)
        if not _close(self.output(given), o):
            return None
        p = self.output(given, self.core.probabilities)
        p = p if self.core.pv.args[0] is self.core.probabilities else p.mT
        return next((name for name, form in forms.items() if p.shape[1:] == form.shape[1:] and _close(p, form)), None)

    def wanted(self, given: Mapping[Node, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """p in each form, and o."""
        q, visible = given[self.core.queries], self.visible(given)
        heads, width, _ = (int(size) for size in self.core.sizes)  # type: ignore[call-overload]
        k = torch.cat([given[branch].reshape(len(q), -1, width) for branch in self.core.branches], 1)
        sink = given[self.core.others[0]].reshape(-1, 1) if self.core.others else torch.tensor(-torch.inf)
        return attend(q.reshape(len(q), heads, width), k, visible, self.scale, sink)

    def empty(self) -> str:
        found = self.output(self.draw(0.0))
        return "nan" if found.isnan().any() else "other" if found.any() else "zero"

    def shows_hidden(self) -> bool:
        given = self.draw(0.6)
        start, visible = 0, self.visible(given)
        for branch in self.core.branches:
            count = given[branch].shape[1]
            given[branch][~visible[:, start : start + count]] = torch.nan
            start += count
        return bool(self.output(given).isnan().any())


def attend(q: Tensor, k: Tensor, visible: Tensor, scale: float, sink: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """q [T, H, D], k [T, K, D], visible [T, K], sink [H, 1] -> p in each form, and o [T, H, D]."""
    scores = (q @ k.mT * scale).masked_fill(~visible.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p, of_sink = (scores - top).exp(), (sink - top).exp()
    total = p.sum(-1, keepdim=True) + of_sink
    return {"max": p, "max_and_sink": p / of_sink.clamp(min=1), "total": p / total}, p @ k / total


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.numel() == wanted.numel() and torch.allclose(found.reshape(wanted.shape), wanted, 1e-9, 1e-12)
