"""outline_mhc: every mHC boundary becomes one region, its critical cone and its coefficient cone told apart.

    before   X, y, post, comb, pre -> X' = post y + comb X -> h = pre X' -> norm -> x            (the sublayer waits)
                                      X' -> projection, RMS, sigmoids, Sinkhorn -> pre', post', comb'   (has slack)
    after    region(kind="mhc_boundary", form="seam", outputs=("streams", "input", "pre", "post", "comb"),
                    critical=(0, 1), coefficients=(2, 3, 4), streams=4, steps=39, ...) -> X', x, pre', post', comb'

Sites: every projection of flat streams whose columns go to sigmoids and a Sinkhorn head. form says what is pending in
front of it: "seam" a post map, "after_engram" none but a carried pre, "entry" neither. A post map whose streams go
elsewhere (to an Engram) is kind "mhc_post"; with a collapse and a norm behind it, but no coefficients, "mhc_exit".
Legal when the kind's RULES hold. Exact because outlining moves nodes and rewrites none. Interior values that others
read become further outputs, "extra". The cones are the backward slices of the outputs that the attributes list.

The carried pre is V4.1's change, and what makes coefficients late: in V4 a boundary collapses with the pre it has just
predicted, so its sublayer waits for them, and the site is refused. Needs canonicalize and fold_sinkhorn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41.passes import spans
from v41.passes.analysis.probe import evaluate, integers
from v41.passes.fold_sinkhorn import RULES as SINKHORN_RULES
from v41.passes.fold_sinkhorn import is_read_outside
from v41.passes.matching import between, interface, same_sizes, shape, unviewed
from v41.passes.mhc_heads import Comb, Gate
from v41.passes.mhc_parts import Collapse, Parts, PostMap
from v41.passes.mhc_predictions import BOUNDARY, EXIT, POST, Coefficients
from v41.passes.sites import STAYS, Rule, outline_sites
from v41.regions import invoke_subgraph
from v41.report import Decision


@dataclass(frozen=True)
class Site:
    """One boundary, or the part of one that there is."""

    kind: str
    parts: Parts
    coefficients: Coefficients | None
    collapses: tuple[Collapse, ...]
    post: PostMap | None

    @property
    def anchor(self) -> Node:
        """The node that names the site."""
        if self.coefficients is not None:
            return self.coefficients.projection
        return self.collapses[0].result if self.collapses else self.post.result  # type: ignore[union-attr]

    @property
    def streams(self) -> Node:
        """X: what the collapse and the projection read, or the post map makes."""
        return self.coefficients.streams if self.coefficients is not None else self.post.result  # type: ignore[union-attr]

    @property
    def count(self) -> int:
        return shape(self.streams)[1]  # type: ignore[return-value]

    @property
    def comb(self) -> Comb:
        return self.coefficients.combs[0]  # type: ignore[union-attr]

    @property
    def gates(self) -> tuple[Gate, Gate]:
        return self.coefficients.pre_and_post  # type: ignore[union-attr]

    @cached_property
    def critical(self) -> set[Node]:
        """Nodes of post map, collapse and norm."""
        collapse = self.collapses[0] if self.collapses else None
        nodes = set(self.post.nodes) if self.post is not None else set()
        return self.parts.absorb(nodes | collapse.nodes | collapse.norm_nodes if collapse is not None else nodes)

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        nodes = set(self.critical)
        if self.coefficients is not None:
            results = [gate.result for gate in self.gates] + [self.comb.result]
            nodes |= set(between(self.parts.order, {self.streams}, results))  # type: ignore[arg-type]
        nodes = self.parts.absorb(nodes)
        nodes |= {node.args[0] for node in nodes if node.target is invoke_subgraph}  # type: ignore[misc]
        return sorted(nodes, key=self.parts.order.__getitem__)

    @cached_property
    def carried(self) -> Node | None:
        """The one operand of the collapse beside the streams; None if there are several."""
        return self._other_operand(self.collapses[0].nodes, {self.streams})

    @cached_property
    def pending(self) -> Node | None:
        """y: the one operand of the post map beside coefficients and streams."""
        assert self.post is not None
        return self._other_operand(self.post.nodes, {self.post.post, self.post.comb, self.mixed})

    @cached_property
    def mixed(self) -> Node | None:
        """The streams that the post map reads."""
        assert self.post is not None
        nodes = self.parts.absorb(self.post.nodes)
        outside = [arg for node in nodes for arg in node.all_input_nodes if arg not in nodes]
        wanted = shape(self.post.result)
        matrices = {arg for arg in outside if arg is not self.post.comb and same_sizes(shape(arg), wanted)}
        return matrices.pop() if len(matrices) == 1 else None

    def _other_operand(self, nodes: frozenset[Node], known: set[Node | None]) -> Node | None:
        inside = self.parts.absorb(nodes)
        others = {arg for node in inside for arg in node.all_input_nodes if arg not in inside}
        others = {arg for arg in others if not known.intersection(unviewed(arg))}
        return others.pop() if len(others) == 1 else None

    @cached_property
    def mix(self) -> str | None:
        """How comb [T, n, n] is indexed by the post map, "jk" (from, to) or "kj"; None if the map is another one."""
        if self.post is None or self.mixed is None or self.pending is None:
            return None
        given = {node: integers(node, seed) for seed, node in enumerate(self._mix_operands())}
        post, comb, X, y = (given[node] for node in self._mix_operands())
        found = self._value(self.post.nodes, given, self.post.result)
        if y.numel() * self.count != X.numel() or found.shape != X.shape:
            return None
        pending = post.reshape(-1, self.count, 1) * y.reshape(X.shape[0], 1, -1)
        formulas = {"jk": torch.einsum("tjk,tjd->tkd", comb, X), "kj": torch.einsum("tkj,tjd->tkd", comb, X)}
        return next((axes for axes, mixed in formulas.items() if torch.equal(found, pending + mixed)), None)

    def _mix_operands(self) -> tuple[Node, ...]:
        assert self.post is not None and self.mixed is not None and self.pending is not None
        return self.post.post, self.post.comb, self.mixed, self.pending

    @cached_property
    def collapses_by_pre(self) -> bool:
        """Whether the collapse is the sum of the streams weighted by one operand."""
        if self.carried is None:
            return False
        given = {self.streams: integers(self.streams, 4), self.carried: integers(self.carried, 5)}
        X, pre = given[self.streams], given[self.carried]
        if pre.numel() % self.count or pre.numel() not in (self.count, self.count * X.shape[0]):
            return False
        found = self._value(self.collapses[0].nodes, given, self.collapses[0].h)
        wanted = (pre.reshape(-1, self.count, 1) * X).sum(1)
        return torch.equal(found.reshape(wanted.shape), wanted)

    def _value(self, nodes: frozenset[Node], given: dict[Node, Tensor], result: Node) -> Tensor:
        inside = sorted(self.parts.absorb(nodes) - given.keys(), key=self.parts.order.__getitem__)
        return evaluate(inside, given, result)


# ---- what must hold: each predicate returns the node at fault


def is_not_scaled_by_its_rms(site: Site) -> Node | None:
    assert site.coefficients is not None
    scaling = site.coefficients.scaling
    fits = scaling is not None and site.streams in set(unviewed(scaling.source))
    return None if fits else site.coefficients.projection


def predicts_something_else(site: Site) -> Node | None:
    assert site.coefficients is not None
    gates, combs = site.coefficients.gates, site.coefficients.combs
    if len(gates) == 2 and len(combs) == 1:
        return None
    return gates[2].result if len(gates) > 2 else combs[-1].head if len(combs) > 1 else site.coefficients.projection


def counts_streams_differently(site: Site) -> Node | None:
    assert site.coefficients is not None
    widths = {gate.result: (gate.columns, site.count) for gate in site.gates}
    widths[site.comb.head] = site.comb.columns, site.count**2
    wrong = (node for node, ((low, high), wanted) in widths.items() if high - low != wanted)
    whole = site.coefficients.width == site.count * (site.count + 2)
    return next(wrong, None if whole else site.coefficients.projection)


def is_not_a_sinkhorn_chain(site: Site) -> Node | None:
    if site.comb.result is None:
        return site.comb.head
    chain = list(site.comb.chain)  # none where it is a region: then it is legal
    finds = [find for _, find in SINKHORN_RULES if chain and find is not is_read_outside]
    return next((node for find in finds if (node := find(chain)) is not None), None)


def is_not_collapsed_once(site: Site) -> Node | None:
    if len(site.collapses) == 1:
        return None
    return site.collapses[1].result if site.collapses else site.streams


def collapses_otherwise(site: Site) -> Node | None:
    return None if site.collapses_by_pre else site.collapses[0].h


def carries_its_own_pre(site: Site) -> Node | None:
    """A carried value that depends on these streams is no earlier one."""
    assert site.carried is not None
    below = {site.streams}
    for node in site.parts.nodes[site.parts.order[site.streams] : site.parts.order[site.carried] + 1]:
        if any(arg in below for arg in node.all_input_nodes):
            below.add(node)
    return site.carried if site.carried in below else None


def mixes_otherwise(site: Site) -> Node | None:
    return site.post.result if site.post is not None and site.mix is None else None


def comes_back(site: Site) -> Node | None:
    return spans.comes_back(site.members)


SOUND = (
    ("no path leaves it and comes back", comes_back),
    STAYS,
)
MIX = (("the post map is post_k y + sum_j comb_jk X_j", mixes_otherwise),)
COLLAPSE = (
    ("the streams are collapsed once, for one norm", is_not_collapsed_once),
    ("the collapse is sum_j pre_j X_j", collapses_otherwise),
    ("the carried pre comes from an earlier boundary", carries_its_own_pre),
)
PREDICT = (
    ("one pre, one post and one comb are predicted", predicts_something_else),
    ("the projection is divided by the RMS of the streams it reads", is_not_scaled_by_its_rms),
    ("there are as many streams as pre, post and rows of comb", counts_streams_differently),
    ("comb is one Sinkhorn chain", is_not_a_sinkhorn_chain),
)
RULES: dict[str, tuple[Rule[Site], ...]] = {  # in order: each may rely on those above
    BOUNDARY: (*PREDICT, *COLLAPSE, *MIX, *SOUND),
    EXIT: (*COLLAPSE, *MIX, *SOUND),
    POST: (*MIX, *SOUND),
}


def outline_mhc(gm: GraphModule) -> list[Decision]:
    """Outlines every legal site of `gm` in place. One decision a site, in graph order."""
    return outline_sites(gm, find_sites(gm), lambda site: RULES[site.kind], attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Boundaries, exits and post maps that stand alone, in graph order."""
    parts = Parts(gm)
    posts = {post.result: post for post in parts.posts}
    collapses: dict[Node, list[Collapse]] = {}
    for collapse in parts.collapses:
        collapses.setdefault(collapse.streams, []).append(collapse)
    sites = []
    for each in parts.coefficients:
        found = tuple(collapses.pop(each.streams, ()))
        sites.append(Site(BOUNDARY, parts, each, found, posts.pop(each.streams, None)))
    for result, post in posts.items():
        found = tuple(collapses.get(result, ()))
        sites.append(Site(EXIT if found else POST, parts, None, found, post))
    return sorted(sites, key=lambda site: parts.order[site.anchor])


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    sizes = shape(site.streams)
    found: dict[str, Any] = {"streams": sizes[1], "hidden": sizes[2], **_interface(site)}
    if site.post is not None:
        found["comb_axes"] = site.mix
    if site.collapses:
        collapse = site.collapses[0]
        found |= {"norm_eps": collapse.eps, "norm_weight": collapse.weighted, "form": _form(site)}
    if site.coefficients is not None:
        (pre, post), comb, scaling = site.gates, site.comb, site.coefficients.scaling
        columns = {pre.columns: "pre", post.columns: "post", comb.columns: "comb"}
        found |= {
            "columns": tuple(columns[key] for key in sorted(columns)),
            "rms_eps": scaling.eps if scaling is not None else None,
            "pre": (pre.factor, pre.eps),
            "post": (post.factor, post.eps),
            "head": (comb.head_kind, comb.head_axis, comb.head_eps),
            "sinkhorn": {"first_axis": comb.first_axis, "steps": comb.steps, "eps": comb.eps},
        }
    return found


def _form(site: Site) -> str:
    if site.coefficients is None:
        return "exit"
    if site.post is not None:
        return "seam"
    earlier = site.carried in site.parts.predicted_from or site.carried in site.parts.given
    return "after_engram" if earlier else "entry"


def _interface(site: Site) -> dict[str, tuple[Any, ...]]:
    """Roles of operands and outputs, in order, and which outputs end the critical and which the coefficient cone."""
    roles: dict[Node | None, str] = {site.streams: "streams"}
    if site.collapses:
        roles |= {site.collapses[0].result: "input", site.carried: "carried"}
    if site.post is not None:
        roles |= {site.post.post: "post", site.post.comb: "comb", site.mixed: "streams", site.pending: "pending"}
    results = roles | ({site.comb.result: "comb"} if site.coefficients is not None else {})
    if site.coefficients is not None:
        results |= {gate.result: name for gate, name in zip(site.gates, ("pre", "post"), strict=True)}
    read, outputs = interface(site.members)
    weight = site.parts.is_weight
    return {
        "operands": tuple(roles.get(arg, "weight" if weight(arg) else "other") for arg in read),
        "outputs": tuple(results.get(node, "extra") for node in outputs),
        "critical": tuple(i for i, node in enumerate(outputs) if node in site.critical),
        "coefficients": tuple(i for i, node in enumerate(outputs) if node not in site.critical),
    }
