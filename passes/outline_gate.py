"""outline_gate: the router of a mixture of experts becomes one region that gives weights and experts.

    before   x -> product with W -> sqrt(softplus) -> s;  s + bias -> top-k by unique keys -> e;  s[e] / sum(s[e]) * 1.5
    after    region(kind="moe_gate", activation="sqrt_softplus", k=6, experts=256, ties="lower_index", eps=1e-20,
                    scaling=1.5, operands=("input", "weight", "bias"), outputs=("experts", "weights")) -> e, w

Site: scores gathered at what a top-k or a sort of the same scores picked (or taken as the values of that top-k). Legal
when all RULES hold. Activation and choice are read by running their nodes on numbers (analysis/probe.py), so spelling
does not matter; a normalisation or a scaling that is written otherwise stays outside, and the attributes say None or 1.
Exact because outlining moves nodes and rewrites none; convex, as it takes all paths from the product to both results.
A gate in a subgraph that layers share is outlined there, once. Needs canonicalize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.fold_sinkhorn import Step, match_step
from v41.passes.matching import (
    RESHAPES,
    absorb,
    aten,
    between,
    fake,
    getitems,
    interface,
    is_constant,
    is_narrowing,
    is_pointwise,
    is_widening,
    shape,
    unviewed,
)
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND = "moe_gate"
DRAWS = 8  # of scores and bias: a choice that agrees on all of them is the choice
LARGE = 2.0**12  # times a number that was drawn: beyond what a clamp leaves
RANKINGS = (aten.topk.default, aten.sort.default, aten.sort.stable)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt_softplus": lambda z: torch.nn.functional.softplus(z).sqrt(),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Site:
    """One gate. picked: the scores at the picks, before they are normalised."""

    order: Mapping[Node, int]
    scores: Node
    picks: Node
    picked: Node
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.weights[0]

    @cached_property
    def logits(self) -> Node | None:
        """The one value that the scores are made of element by element."""
        sources: dict[Node, None] = {}
        seen, stack = set[Node](), [self.scores]
        while stack:
            node = stack.pop()
            if is_pointwise(node) and not is_constant(node):
                stack += [arg for arg in node.all_input_nodes if arg not in seen and fake(arg) is not None]
                seen.update(node.all_input_nodes)
            elif not is_constant(node):
                sources[node] = None
        return next(iter(sources)) if len(sources) == 1 else None

    @cached_property
    def factors(self) -> tuple[Node, Node] | None:
        """Input and weight of the product; the weight is what has no rows, else what stands right."""
        match self.logits:
            case Node(target=aten.mm.default | aten.bmm.default, args=(Node() as a, Node() as b)):
                pair = a, b
            case Node(target=aten.sum.dim_IntList, args=(Node(target=aten.mul.Tensor) as products, [axis], *_)):
                a, b = products.args  # type: ignore[assignment]
                if axis != len(shape(products)) - 1 or not isinstance(b, Node):
                    return None
                pair = a, b
            case _:
                return None
        return pair[::-1] if _has_rows(pair[1]) and not _has_rows(pair[0]) else pair

    @cached_property
    def activation(self) -> str | None:
        """The name of what makes scores of the logits."""
        if self.logits is None or self.factors is None:
            return None
        z = 12 * numbers(self.logits, 0)
        z[..., ::2] *= LARGE
        found = evaluate(self._run({self.logits}, self.scores), {self.logits: z}, self.scores)
        told = (name for name, f in ACTIVATIONS.items() if torch.allclose(f(z).reshape(found.shape), found, 1e-8, 0))
        return next(told, None)

    @cached_property
    def ranking(self) -> list[Node]:
        """Nodes from the scores to the picks."""
        return between(self.order, {self.scores}, [self.picks])

    @cached_property
    def from_logits(self) -> list[Node]:
        """Nodes from the logits to the picks: all there is where other scores were ranked than are taken."""
        return between(self.order, {self.logits}, [self.picks])  # type: ignore[arg-type]

    @cached_property
    def bias(self) -> Node | None:
        """The one operand of the ranking beside the scores; None if there is none, or several."""
        known = {self.scores, *self.ranking}
        others = {arg for node in self.ranking for arg in node.all_input_nodes if arg not in known}
        found = [arg for arg in others if fake(arg) is not None and not is_constant(arg)]
        return found[0] if len(found) == 1 else None

    @cached_property
    def ties(self) -> str | None:
        """ "lower_index" or "any": which of equal scores is picked. None if the picks are not the best, best first."""
        if any(node.target is aten.topk.default and False in node.args[2:] for node in self.ranking):
            return None
        ranked = next((node.args[0] for node in self.ranking if node.target in RANKINGS), None)
        if ranked is None:
            return None
        unique = not fake(ranked).is_floating_point() or any(node.kwargs.get("stable") for node in self.ranking)  # type: ignore[union-attr]
        ranks = [node for node in (self.scores, self.bias) if node is not None]
        draws = [
            {node: numbers(node, DRAWS * i + seed).float() for i, node in enumerate(ranks)} for seed in range(DRAWS)
        ]
        draws += [{node: LARGE * value for node, value in draws[0].items()}]
        if unique:  # some equal, all equal
            draws += [{node: f(value) for node, value in draws[0].items()} for f in (torch.sign, torch.zeros_like)]
        told = "lower_index" if unique else "any"
        return told if all(map(self._picks_best, draws)) else None

    def _picks_best(self, given: dict[Node, Tensor]) -> bool:
        """Whether the picks are the largest of scores and bias, the lower index first among equals."""
        keys = given[self.scores]
        if self.bias is not None:
            if given[self.bias].numel() != keys.shape[-1]:
                return False
            keys = keys + given[self.bias].flatten()
        try:
            found = evaluate(self._run(given, self.picks), given, self.picks, keep_types=True)
        except (RuntimeError, AssertionError):  # it ranks by what cannot be drawn
            return False
        return torch.equal(found, keys.sort(dim=-1, descending=True, stable=True).indices[..., : self.k])

    def _run(self, given: Any, result: Node) -> list[Node]:
        """The nodes between `given` and `result`, and the constants they read."""
        nodes = between(self.order, given, [result])
        constants = {arg for node in nodes for arg in node.all_input_nodes if is_constant(arg)}
        return sorted({*nodes, *constants}, key=self.order.__getitem__)

    @property
    def k(self) -> int:
        return shape(self.picks)[-1]  # type: ignore[return-value]

    @cached_property
    def weights(self) -> tuple[Node, Step | None, float]:
        """The result, how it was normalised, and what it was multiplied with after that."""
        node = result = self.picked
        step, scaling = None, 1.0
        while True:
            steps = [found for user in node.users if (found := match_step(user)) is not None and found.source is node]
            (user, *others) = node.users or [node]
            if step is None and scaling == 1.0 and len(steps) == 1 and steps[0].axis == -1:
                (step,) = steps
                node = result = step.nodes[-1]
            elif others or user is node:
                break
            elif user.target is aten.mul.Tensor and isinstance(user.args[1], (int, float)):
                scaling *= user.args[1]
                node = result = user
            elif user.target in RESHAPES or is_widening(user):
                node = user
            else:
                break
        return result, step, scaling

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        result, _, _ = self.weights
        nodes = {*between(self.order, {self.logits}, [result, self.picks]), self.logits}  # type: ignore[arg-type]
        if self.logits.target is aten.sum.dim_IntList:  # type: ignore[union-attr]
            nodes |= {self.logits.args[0]}  # type: ignore[union-attr, arg-type]
        return sorted(absorb(nodes, _is_free), key=self.order.__getitem__)  # type: ignore[arg-type]

    @cached_property
    def exits(self) -> tuple[Node, ...]:
        """The nodes that outsiders may read: the weights, and the picks in the first form that one reads."""
        inside = set(self.members)
        forms = [node for node in unviewed(self.picks) if any(user not in inside for user in node.users)]
        return self.weights[0], *forms[-1:]


def _has_rows(node: Node) -> bool:
    return any(not isinstance(size, int) for size in shape(node))


def _is_free(node: Node) -> bool:
    return node.target in RESHAPES or is_widening(node) or is_constant(node)


# ---- what must hold: each predicate returns the node at fault


def activates_otherwise(site: Site) -> Node | None:
    return None if site.activation is not None else site.scores


def ranks_otherwise(site: Site) -> Node | None:
    return None if site.ties is not None else site.picks


def rounds_inside(site: Site) -> Node | None:
    return next((node for node in site.members if is_narrowing(node) and fake(node).is_floating_point()), None)  # type: ignore[union-attr]


def is_read_elsewhere(site: Site) -> Node | None:
    return is_read_inside(dict.fromkeys((*site.members, *site.exits)), site.exits)


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the scores are sqrt(softplus) or sigmoid of one product", activates_otherwise),
    ("nothing is rounded between the product and the weights", rounds_inside),
    ("the picks are the best by score, or by score and bias, the best first", ranks_otherwise),
    ("only weights and picks are read outside", is_read_elsewhere),
    STAYS,
)


def outline_gate(gm: GraphModule) -> list[Decision]:
    """Outlines every legal gate of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Scores taken at picks that were ranked by the same scores, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    if not any(node.target in RANKINGS for node in order):
        return []
    sites = []
    for node in order:
        match node.target, node.args:
            case aten.gather.default, (Node() as scores, axis, Node() as picks) if axis == len(shape(scores)) - 1:
                sites.append(Site(order, scores, picks, node))
            case aten.topk.default, (Node() as scores, int(), *_) if {0, 1} <= getitems(node).keys():
                taken = getitems(node)
                sites.append(Site(order, scores, taken[1], taken[0]))
    return [site for site in sites if _ranks(site.ranking) or (site.logits is not None and _ranks(site.from_logits))]


def _ranks(nodes: list[Node]) -> bool:
    return any(node.target in RANKINGS for node in nodes)


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    result, step, scaling = site.weights
    left, right = site.factors  # type: ignore[misc]
    roles = {left: "input", right: "weight", site.bias: "bias"}
    seen = {view: role for node, role in roles.items() if node is not None for view in unviewed(node)}
    read, outputs = interface(site.members)
    return {
        "activation": site.activation,
        "k": site.k,
        "experts": shape(site.scores)[-1],
        "ties": site.ties,
        "eps": None if step is None else step.eps,  # None: not normalised
        "scaling": scaling,
        "operands": tuple(seen.get(arg, "constant") for arg in read),
        "outputs": tuple("weights" if node is result else "experts" for node in outputs),
    }
