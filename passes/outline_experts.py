"""outline_experts: the experts of a mixture, with their gathers and their sum, become one region.

    before   picks -> sort, ends;  x -> rows by expert -> W1, W3 -> silu(min(., c)) * clamp(., -c, c) * w -> W2
             -> back in the order of the picks -> sum over a row's picks;  + the shared expert of x -> cast
    after    region(kind="experts", experts=384, k=6, hidden=5120, inner=2304, limit=10.0, scaling="before_down",
                    weights="mxfp4/32", activations="fp8/32", shared_inner=2304, shared_weights="fp8/32x32",
                    shared_activations="fp8/32", operands=("input", "w1", ...), outputs=("output",)) -> y

Site: a grouped product (W2) of what is computed from other grouped products. Legal when all RULES hold. How rows find
their expert, what is done between the products, how the outputs of a row are added: these nodes are run on numbers and
compared with what they should give, so spelling does not matter: a sort or counts, an inverse permutation or an
index_add, W1 and W3 apart or in one. Decoding of stored weights moves into the region where its format is known
(stored_weights.py); else it stays outside, and what it makes counts as the weight.

A shared expert belongs to the region if it is the same kind of expert, with the same limit, added in fp32; otherwise
shared_inner is None and the region ends with the routed sum. limit is None without clamps. Exact because outlining
moves nodes and rewrites none; convex, as it takes all paths from the operands to its one result. The gate is another
region. Experts in a subgraph that layers share are outlined there, once. Needs canonicalize.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41.passes.analysis.probe import numbers
from v41.passes.experts_parts import (
    GATHERS,
    GROUPED,
    Expert,
    Routing,
    Rows,
    Swiglu,
    adds_once,
    base_of,
    expert_of,
    gathered,
    only_reader,
    origins,
    picks_of,
    routing,
    rows_of,
    sum_of,
)
from v41.passes.matching import (
    RESHAPES,
    absorb,
    aten,
    between,
    fake,
    interface,
    is_constant,
    is_narrowing,
    is_widening,
    shape,
    unviewed,
)
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND = "experts"
DRAWS = 3  # of picks: rows that find their expert on all of them find it


class Shared(NamedTuple):
    """The expert that takes all rows, which of its products is the gate, and the sum with the routed ones."""

    expert: Expert
    gate: Node
    total: Node


@dataclass(frozen=True)
class Site:
    """One mixture: `expert` holds the grouped products."""

    order: Mapping[Node, int]
    expert: Expert
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.expert.down

    @property
    def ends(self) -> Node:
        """int32 [E]: where each expert's rows end."""
        return self.anchor.args[2]  # type: ignore[return-value]

    @cached_property
    def picks(self) -> Node | None:
        return picks_of(self.order, self.ends, shape(self.anchor)[0])

    @cached_property
    def taken(self) -> Node | None:
        """[T, D]: what the rows of W1 are gathered from, x or x rounded."""
        if self.picks is None:
            return None
        rows = self.expert.inputs[0].source
        return gathered(rows, (shape(self.picks)[0], *shape(rows)[1:]))

    @cached_property
    def before(self) -> Rows:
        """x, and how it is rounded in front of the gathers."""
        return rows_of(self.order, self.taken)  # type: ignore[arg-type]

    @cached_property
    def x(self) -> Node:
        return base_of(self.before.source)

    @property
    def formats(self) -> tuple[str, str] | None:
        """Of the experts' weights, and of what they are multiplied with; None where these are several."""
        return self.expert.formats(self.before.format if self.before.source is not self.taken else None)

    @cached_property
    def weights(self) -> Node | None:
        """[T, k]: the router's weights; None where the activation takes none by row."""
        found = [node for node in origins(self.order, self.expert.activation.source) if node.target in GATHERS]
        return gathered(found[0], shape(self.picks)) if len(found) == 1 else None  # type: ignore[arg-type]

    @cached_property
    def routings(self) -> list[Routing | None]:
        if self.picks is None or self.taken is None:
            return [None]
        rows = [each.source for each in self.expert.inputs]
        return [routing(self.order, self.picks, self.taken, rows, self.ends, seed) for seed in range(DRAWS)]

    @property
    def drawn(self) -> tuple[Routing, dict[Node, Tensor]]:
        """One of the draws, and the value of the picks there."""
        drawn: Routing = self.routings[-1]  # type: ignore[assignment]
        return drawn, {self.picks: drawn.picks}  # type: ignore[dict-item]

    @cached_property
    def swiglu(self) -> Swiglu | None:
        """factor 0: with the router's weight; 1: without."""
        drawn, given = self.drawn
        if self.weights is None:
            return self.expert.swiglu(given, [0.0, 1.0])
        weights = numbers(self.weights, 7).to(fake(self.weights).dtype)  # type: ignore[union-attr]
        factor = weights[drawn.token, drawn.place].unsqueeze(-1)
        return self.expert.swiglu({**given, self.weights: weights}, [factor.double(), 1.0])

    @cached_property
    def routed(self) -> Node | None:
        """[T, D]: the sum over a row's picks, rounded or not."""
        return sum_of(self.order, self.anchor, *self.drawn, shape(self.x))

    @cached_property
    def shared(self) -> Shared | None:
        """None where there is none, or one of another kind."""
        total = only_reader(self.routed) if _is_wide(self.routed) else None  # type: ignore[arg-type]
        if total is None or total.target is not aten.add.Tensor or total.kwargs or len(total.all_input_nodes) != 2:
            return None
        *_, down = unviewed(next(arg for arg in total.all_input_nodes if arg is not self.routed))
        found = expert_of(self.order, down)
        if found is None or found.formats() is None:
            return None
        swiglu = found.swiglu({}, [1.0])
        if swiglu is None or swiglu[:1] + swiglu[2:] != self.swiglu[:1] + self.swiglu[2:]:  # type: ignore[index]
            return None
        return (
            Shared(found, swiglu.gate, total) if all(self.x in unviewed(row.source) for row in found.inputs) else None
        )

    @cached_property
    def result(self) -> Node:
        """The sum, or what it is rounded to."""
        total = last = self.routed if self.shared is None else self.shared.total
        if not _is_wide(total):  # type: ignore[arg-type]
            return total  # type: ignore[return-value]
        while (reader := only_reader(last)) is not None and reader.target in RESHAPES:  # type: ignore[arg-type]
            last = reader
        return reader if reader is not None and is_narrowing(reader) else total  # type: ignore[return-value]

    @cached_property
    def roles(self) -> dict[Node, str]:
        """Operand -> what it is."""
        known = {self.x: "input", self.picks: "experts", self.weights: "weights"}
        named = {node: name for node, name in known.items() if node is not None}
        named |= _weights_of(self.expert, self.swiglu.gate, "")  # type: ignore[union-attr]
        if self.shared is not None:
            named |= _weights_of(self.shared.expert, self.shared.gate, "shared_")
        return named

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order. Views of operands that others read as well stay outside."""
        nodes = between(self.order, self.roles, [self.result])
        inside = absorb(nodes, lambda node: _is_free(node) and node not in self.roles)
        front: dict[Node, None] = {}
        for node in sorted(filter(_is_free, inside), key=self.order.__getitem__):
            if all(arg not in inside or arg in front for arg in node.all_input_nodes):
                front[node] = None
        for node in reversed(front):
            if any(user not in inside for user in node.users):
                inside.remove(node)
        return sorted(inside, key=self.order.__getitem__)


def _is_wide(node: Node) -> bool:
    return torch.finfo(fake(node).dtype).bits >= 32  # type: ignore[union-attr]


def _is_free(node: Node) -> bool:
    return node.target in RESHAPES or is_widening(node) or is_constant(node)


def _weights_of(expert: Expert, gate: Node, prefix: str) -> dict[Node, str]:
    names = {up: "w1" if up is gate else "w3" for up in expert.ups} if len(expert.ups) == 2 else {gate: "w13"}
    return {
        node: f"{prefix}{name}{'_scale' if i else ''}"
        for product, name in {**names, expert.down: "w2"}.items()
        for i, node in enumerate(expert.weights[product].stored)
    }


# ---- what must hold: each predicate returns the node at fault


def routes_otherwise(site: Site) -> Node | None:
    return site.ends if None in site.routings else None


def mixes_formats(site: Site) -> Node | None:
    return None if site.formats is not None else site.anchor


def activates_otherwise(site: Site) -> Node | None:
    return None if site.swiglu is not None else site.expert.activation.source


def weighs_later(site: Site) -> Node | None:
    return None if site.swiglu.factor == 0 else site.expert.activation.source  # type: ignore[union-attr]


def adds_otherwise(site: Site) -> Node | None:
    return None if site.routed is not None else site.anchor


def rounds_inside(site: Site) -> Node | None:
    if not site.swiglu.rounded_once:  # type: ignore[union-attr]
        return site.expert.activation.source
    return None if adds_once(site.order, site.anchor, *site.drawn, site.routed) else site.routed  # type: ignore[arg-type]


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("rows of x are taken by expert, for every pick once", routes_otherwise),
    ("weights, and what they are multiplied with, have one format each", mixes_formats),
    ("W2 reads silu(W1 x) * W3 x, both clamped by one limit or neither", activates_otherwise),
    ("the router's weight enters before W2", weighs_later),
    ("the outputs of a row's picks are added, and nothing else is", adds_otherwise),
    ("only the input of W2 and the sum are rounded", rounds_inside),
    ("only its result is read outside", lambda site: is_read_inside(site.members, [site.result])),
    STAYS,
)


def outline_experts(gm: GraphModule) -> list[Decision]:
    """Outlines all legal experts of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> Iterator[Site]:
    """Grouped products that read an activation of grouped products, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in order:
        if node.target is GROUPED and len(node.args) == 3 and not node.kwargs:
            expert = expert_of(order, node)
            if expert is not None:
                yield Site(order, expert)


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    read, _ = interface(site.members)
    roles = [next((site.roles[form] for form in unviewed(arg) if form in site.roles), "constant") for arg in read]
    shared = site.shared.expert if site.shared is not None else None
    weights, activations = site.formats  # type: ignore[misc]
    shared_weights, shared_activations = shared.formats() or (None, None) if shared is not None else (None, None)
    return {
        "experts": shape(site.ends)[0],
        "k": shape(site.picks)[1],  # type: ignore[arg-type]
        "hidden": shape(site.anchor)[-1],
        "inner": shape(site.expert.activation.source)[-1],
        "limit": site.swiglu.limit,  # type: ignore[union-attr]
        "scaling": "before_down",  # where the router's weight enters
        "weights": weights,
        "activations": activations,
        "shared_inner": None if shared is None else shape(shared.activation.source)[-1],
        "shared_weights": shared_weights,
        "shared_activations": shared_activations,
        "operands": tuple(roles),
        "outputs": ("output",),
    }
