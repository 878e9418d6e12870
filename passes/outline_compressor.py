"""outline_compressor: the pooling of a group of tokens becomes one region, with the norm behind it and what follows.

    before   values, gates [T, m, D] -> softmax of gates over m -> sum_s p_s value_s -> round -> norm -> RoPE -> record
    after    region(kind="compressor", ratio=2, width=512, normed=True, eps=1e-20, then=("rope", "fp4_record"), ...,
                    operands=("tokens", "tokens", "weight", "cos", "sin"), outputs=("normed", "quantised"))

Site: a softmax over an axis of a few tokens, channel by channel, that weighs values of the same shape. Softmax and sum
are read by running their nodes on numbers (analysis/probe.py), so spelling does not matter; norm and tail as in
outline_norm_quantise, which finds those that follow no pooling (a ratio of 1). How values and gates are cut out of what
the tokens project to comes along; the tokens of steps before are read from a cache, and written to it, outside. Legal
when all RULES hold. Exact because outlining moves nodes and rewrites none. Needs canonicalize.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.fold_sinkhorn import match_step
from v41.passes.matching import (
    VIEWS,
    absorb,
    aten,
    cone,
    fake,
    interface,
    is_narrowing,
    is_part,
    is_widening,
    same_sizes,
    shape,
    unviewed,
)
from v41.passes.norms import Norm, is_free, norm_of, role_of
from v41.passes.scalings import Scaling, find_scalings
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND = "compressor"
LONGEST = 64  # tokens of a group: an axis of more is a context
FAR = 48  # nodes between gates and the pooled row; the longest spelling of two tokens takes half
POOLING = VIEWS | {
    aten._softmax.default,
    aten.exp.default,
    aten.sub.Tensor,
    aten.amax.default,
    aten.div.Tensor,
    aten.reciprocal.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sum.dim_IntList,
    aten.bmm.default,
    aten.clone.default,
}


@dataclass(frozen=True)
class Site:
    """One pooling. weights: the softmax of `gates` over `axis`; values: what it is multiplied with."""

    order: Mapping[Node, int]
    scalings: Mapping[Node, Scaling]  # by what they normalise
    weights: Node
    gates: Node
    axis: int
    values: Node
    pooled: Node
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.pooled

    @cached_property
    def inner(self) -> list[Node]:
        """From gates and values to the pooled row, constants included, in graph order."""
        return cone(self.order, self.pooled, (self.gates, self.values), may_pool)[0]

    @cached_property
    def is_pooling(self) -> bool:
        """Whether the pooled row is sum_s softmax_s(gates) values."""
        given = {self.gates: numbers(self.gates, 0), self.values: numbers(self.values, 1)}
        try:
            found = evaluate(self.inner, given, self.pooled)
        except (RuntimeError, AssertionError, TypeError):  # it needs what is not given
            return False
        with outside_fake_mode():
            wanted = (given[self.gates].softmax(self.axis) * given[self.values]).sum(self.axis)
            same = found.numel() == wanted.numel()
            return same and torch.allclose(found.reshape(wanted.shape), wanted, 1e-9, 1e-12)

    @cached_property
    def rounded(self) -> Node:
        """The pooled row after its rounding, if it has one of its own."""
        (user, *others) = self.pooled.users or [self.pooled]
        return user if not others and is_narrowing(user) else self.pooled

    @cached_property
    def norm(self) -> Norm | None:
        """The norm that reads the pooled row."""
        ahead = [self.rounded]
        for node in ahead:  # grows: views and wider forms
            ahead += [user for user in node.users if is_free(user)]
        found = next((self.scalings[node] for node in ahead if node in self.scalings), None)
        return norm_of(self.order, found) if found is not None else None

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        nodes = {*self.inner, self.rounded}
        if self.norm is not None:
            front = {node for node in unviewed(self.norm.row) if self.order[node] > self.order[self.rounded]}
            nodes = set(self.norm.closed(nodes | self.norm.nodes | front))
        nodes = absorb(nodes, lambda node: is_free(node) or _cuts(node))
        loose = {node for node in nodes if node.target is operator.getitem and node.args[0] not in nodes}
        return sorted(nodes - loose, key=self.order.__getitem__)

    @property
    def exits(self) -> set[Node | None]:
        """What outsiders may read."""
        return self.norm.exits if self.norm is not None else {self.rounded}


def _cuts(node: Node) -> bool:
    """Whether `node` takes values and gates out of what tokens project to, or lays tokens side by side."""
    return node.target in VIEWS or node.target in (aten.cat.default, aten.clone.default) or is_part(node)


def may_pool(node: Node) -> bool:
    return node.target in POOLING or is_widening(node) or is_narrowing(node)


# ---- what must hold: each predicate returns the node at fault


def pools_otherwise(site: Site) -> Node | None:
    return None if site.is_pooling else site.pooled


def rounds_inside(site: Site) -> Node | None:
    narrow = (n for n in site.inner if fake(n) is not None and fake(n).dtype.itemsize < 4)  # type: ignore[union-attr]
    return next((node for node in narrow if fake(node).is_floating_point()), None)  # type: ignore[union-attr]


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the row is the sum of values by the softmax of gates over the group", pools_otherwise),
    ("gates and values are pooled in fp32", rounds_inside),
    (
        "only the row when normed, turned or quantised is read outside",
        lambda site: is_read_inside(site.members, site.exits),
    ),
    STAYS,
)


def outline_compressor(gm: GraphModule) -> list[Decision]:
    """Outlines every legal pooling of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Softmaxes over a few tokens, channel by channel, that weigh values, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    softmaxes = [(node, *found) for node in order if (found := softmax_of(node)) is not None]
    if not softmaxes:
        return []
    scalings = {each.operand: each for node in order for each in find_scalings(node)}
    sites = []
    for weights, gates, axis in softmaxes:
        ends = pooled_from(order, weights, gates, axis)
        if ends is not None:
            sites.append(Site(order, scalings, weights, gates, axis, *ends))
    return sites


def softmax_of(node: Node) -> tuple[Node, int] | None:
    """What `node` is the softmax of, and the axis: a few tokens before the channels of a row. None for another node."""
    match node.target, node.args:
        case aten._softmax.default, (Node() as gates, int() as axis, *_):
            pass
        case _ if (step := match_step(node)) is not None and step.source.target is aten.exp.default:
            gates, axis = step.source.args[0], step.axis  # type: ignore[assignment]
            if gates.target is aten.sub.Tensor:
                gates = gates.args[0]  # type: ignore[assignment]
        case _:
            return None
    sizes = shape(gates)
    axis %= max(len(sizes), 1)
    tokens = sizes[axis] if sizes else None
    few = isinstance(tokens, int) and 1 < tokens <= LONGEST
    return (gates, axis) if few and 0 < axis < len(sizes) - 1 else None


def pooled_from(order: Mapping[Node, int], weights: Node, gates: Node, axis: int) -> tuple[Node, Node] | None:
    """The values that `weights` weigh, and the first row without the axis of tokens that both lead to."""
    sizes = shape(gates)
    wanted = (*sizes[:axis], *sizes[axis + 1 :])
    ahead, seen = [weights], {weights}
    for node in ahead:  # grows as it is walked
        users = [user for user in node.users if user not in seen and may_pool(user)][: FAR - len(ahead)]
        seen.update(users)
        ahead += users

    def may(node: Node) -> bool:  # what has the shape of gates and no weights in it is values
        return may_pool(node) and (node in seen or not same_sizes(shape(node), sizes))

    latest = 0
    for node in sorted(seen, key=order.__getitem__):
        if latest == order[node] and same_sizes(shape(node), wanted):  # all ways from the weights come together here
            values = [each for each in cone(order, node, (weights,), may)[1] if each is not weights]
            return (values[0], node) if len(values) == 1 else None
        latest = max([latest, *(order[user] for user in node.users if user in seen)])
    return None


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    inside, norm = set(site.members), site.norm
    cut = {role: set(cone(site.order, node, (), inside.__contains__)[1]) for role, node in _pooled(site)}
    roles = norm.roles if norm is not None else {site.rounded: "pooled"}
    read, returned = interface(site.members)

    def role(arg: Node) -> str:
        found = [name for name, leaves in cut.items() if arg in leaves]
        return "tokens" if len(found) == 2 else found[0] if found else role_of(arg, roles)

    facts = norm.facts if norm is not None else {"width": shape(site.pooled)[-1]}
    return {
        "ratio": shape(site.gates)[site.axis],
        "normed": norm is not None,
        **facts,
        "operands": tuple(map(role, read)),
        "outputs": tuple(roles[node] for node in returned),
    }


def _pooled(site: Site) -> tuple[tuple[str, Node], ...]:
    return ("values", site.values), ("gates", site.gates)
