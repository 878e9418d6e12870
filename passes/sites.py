"""sites: what every outlining pass does with the sites it found: judge each by its rules, then outline the legal ones.

    find_sites(gm) -> [site]      no opinion: whatever looks like one, in graph order
    rules                         (a sentence, the predicate that returns the node at fault), in order
    attributes(site)              what the region says of itself, read from the graph

Each rule may rely on those above it. All attributes are read before the first edit, and with them the order of nodes:
where sites lie in each other, outlining one moves nodes of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch.fx import GraphModule, Node

from v41.passes import spans
from v41.passes.matching import named_programs
from v41.regions import members_of, outline
from v41.report import Decision, applied, refused


class Site(Protocol):
    """What may become one region of `kind`. anchor: the node a refusal names; members: all nodes, in graph order."""

    @property
    def kind(self) -> str: ...
    @property
    def anchor(self) -> Node: ...
    @property
    def members(self) -> list[Node]: ...


Found = TypeVar("Found")  # what rules judge: a Site, or what another pass looks for
S = TypeVar("S", bound=Site)
Rule = tuple[str, Callable[[Found], Node | None]]
# What every site must keep, for outlining puts its nodes where the last one stands.
STAYS: Rule[Any] = (
    "nothing is written in between, and no effect reads it there",
    lambda site: spans.moves_an_effect(site.members),
)


def is_read_inside(members: Collection[Node], results: Collection[Node | None]) -> Node | None:
    """The first of `members`, but `results`, that an outsider reads."""
    inside = set(members)
    return next((node for node in members if node not in results and not inside.issuperset(node.users)), None)


def broken_rule(site: Found, rules: Sequence[Rule[Found]]) -> tuple[str, Node] | None:
    """The first rule that does not hold, and the node at fault."""
    return next(((rule, node) for rule, find in rules if (node := find(site)) is not None), None)


def outline_sites(
    gm: GraphModule,
    sites: Sequence[S],
    rules_of: Callable[[S], Sequence[Rule[S]]],
    attributes: Callable[[S], dict[str, Any]],
) -> list[Decision]:
    """Outlines every site of `gm` that breaks no rule, in place. One decision a site, in the order given."""
    judged = [(site, broken_rule(site, rules_of(site))) for site in sites]
    facts = [{"in_order": members_of(gm, site.members), **attributes(site)} if broken is None else {}
             for site, broken in judged]  # fmt: skip
    return [
        refused(site.anchor, *broken)
        if broken is not None
        else applied(outline(gm, found["in_order"], kind=site.kind, **found))
        for (site, broken), found in zip(judged, facts, strict=True)
    ]


def outline_in_programs(
    gm: GraphModule,
    find_sites: Callable[[GraphModule], Iterable[S]],
    rules_of: Callable[[S], Sequence[Rule[S]]],
    attributes: Callable[[S], dict[str, Any]],
) -> list[Decision]:
    """`outline_sites` for `gm` and for the subgraphs the model asked for, innermost first."""
    return in_programs(gm, lambda each: outline_sites(each, list(find_sites(each)), rules_of, attributes))


def in_programs(gm: GraphModule, judge: Callable[[GraphModule], Iterable[Decision]]) -> list[Decision]:
    """What `judge` decides in `gm` and in the subgraphs the model asked for, innermost first: nodes of several may have
    one name, so each decision says where it stands."""
    found = named_programs(gm).items()
    return [replace(decision, body=name) for program, name in found for decision in judge(program)]
