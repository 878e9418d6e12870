"""take_in_gathers: attention reads records where they lie; what gathers them for it becomes part of its region.

    before   cache[slots, max(picks, 0)] -> records [T, K, bytes] -> region(kind="attention", sources=("rows", "rows"))
    after    region(kind="attention", sources=("step", "slots"), operands=("picked", "slots", "picks", ...))
             whose body begins with these nodes: what was gathered is in no memory

    sources, one a branch of keys
    "rows"   [T, K, bytes], as the region was handed them
    "slots"  of a cache [S, E, bytes] the record at the slot of the row and the place of the key. Places are the picks,
             of which negative ones are hidden and read some record, or an operand of their own
    "step"   where a bool says so, one of the records of this step [T, bytes], by number of row; else as "slots"
    Slots, rows and places that are no picks count from the end where they are negative, as in eager.

Site: a branch of keys of each attention. A subgraph that layers share is opened first where it is handed what was
gathered outside. Legal when all RULES hold. Exact because inlining and outlining move nodes and rewrite none. What is
written over the records in front of the region moves behind it: the program is functional, so the region reads the
version that it read, and reinplace_cache_writes, which comes later, finds no reader behind a write.

Not taken in: records of this step that are others than the region's rows, as in the layer that trim_replay's inner seam
cuts in two: a region that works with two numbers of rows could be in no captured segment.
Needs outline_attention; comes before writes are put in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.analysis.effects import bases, effect_of, viewed_args
from v41.passes.matching import aten, interface, programs, shape, unviewed
from v41.passes.norms import role_of
from v41.passes.outline_attention import KIND
from v41.passes.record_gathers import Gather, gather_of
from v41.passes.reinplace_cache_writes import IN_PLACE, PART
from v41.passes.sites import STAYS, Rule, broken_rule, is_read_inside
from v41.regions import body_of, inline, invoke_subgraph, is_region, outline, region_of, regions
from v41.report import Decision, applied, refused

BRANCHES = ("window", "picked")  # roles of the records of each
ROWS = "rows"
GATHERS = (aten.index.Tensor, aten.where.self)


@dataclass(frozen=True)
class Site:
    """The records that `call`, an attention, is handed as its branch `name`. first: the site of the branch before."""

    order: Mapping[Node, int] = field(repr=False)
    call: Node
    name: str
    first: Site | None

    @cached_property
    def operands(self) -> dict[str, Node]:
        """By role; of constants and sizes any."""
        return dict(zip(region_of(self.call).attrs["operands"], self.call.args[2:], strict=True))

    @property
    def records(self) -> Node:
        return self.operands[self.name]

    @cached_property
    def gather(self) -> Gather | None:
        picks = self.operands.get("picks") if self.name == "picked" else None
        hidden = region_of(self.call).attrs["reads_hidden"]
        return gather_of(self.order, self.records, self.name, picks, shows_hidden=hidden)

    @cached_property
    def members(self) -> list[Node]:
        """The gather, the call and what belongs to it, in graph order."""
        nodes = () if self.gather is None else self.gather.nodes
        return sorted({*nodes, *_with_results(self.call)}, key=self.order.__getitem__)

    @cached_property
    def written_over(self) -> list[Node]:
        """Writes on top of what is read, in front of the region, and all there that follows from them; in order."""
        assert self.gather is not None
        cache = self.gather.of(self.name)
        assert cache is not None
        stack, found = bases(cache), dict[Node, None]()
        while stack:
            node = stack.pop()
            for user in node.users:
                if viewed_args(user) == [node]:
                    stack.append(user)
                elif user.args[:1] == (node,) and (user.target in IN_PLACE or user.target in PART):
                    found[user] = None
        stack = list(found)
        while stack:
            new = [user for user in stack.pop().users if user not in found]
            found |= dict.fromkeys(new)
            stack += new
        early = (node for node in found if self.order[node] < self.order[self.call])
        return sorted(early, key=self.order.__getitem__)


def _with_results(call: Node) -> list[Node]:
    return [call.args[0], call, *call.users]  # type: ignore[list-item]


# ---- what must hold: each predicate returns the node at fault


def is_made_otherwise(site: Site) -> Node | None:
    return site.records if site.gather is None else None


def is_read_elsewhere(site: Site) -> Node | None:
    return is_read_inside(site.members, _with_results(site.call))


def counts_other_rows(site: Site) -> Node | None:
    assert site.gather is not None
    now = site.gather.of(f"{site.name}_records")
    return None if now is None or known_equal(shape(now)[0], shape(site.records)[0]) else now


def lies_in_other_slots(site: Site) -> Node | None:
    assert site.gather is not None
    slots = site.gather.of("slots")
    known = site.operands.get("slots")
    if known is None and site.first is not None and broken_rule(site.first, RULES) is None:
        known = site.first.gather.of("slots")  # type: ignore[union-attr]
    return None if known in (None, slots) else slots


def is_two_things(site: Site) -> Node | None:
    """Whoever reads the region finds its operands by what they are to it; each has one role, and each role one."""
    assert site.gather is not None
    known = {node: role for role, node in site.operands.items() if role != "size"}
    if site.first is not None and broken_rule(site.first, RULES) is None:
        known |= site.first.gather.operands  # type: ignore[union-attr]
    return next((node for node, role in site.gather.operands.items() if known.get(node, role) != role), None)


def is_overwritten_for_it(site: Site) -> Node | None:
    """What would have to move behind the region and cannot: the region reads it, or it is no operator that computes."""
    late = set(site.written_over)
    read = (arg for node in site.members for arg in node.all_input_nodes if arg in late)
    stays = (node for node in site.written_over if effect_of(node) is not None or node.target is invoke_subgraph)
    return next(read, None) or next(stays, None)


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("its records are gathered from a cache by a slot a row and a place a key, or are of this step", is_made_otherwise),
    ("what gathers them is read there alone", is_read_elsewhere),
    ("records of this step are those of its rows", counts_other_rows),
    ("all its records lie in one slot a row", lies_in_other_slots),
    ("each of its operands is one thing to attention", is_two_things),
    ("what is written over them meanwhile can wait", is_overwritten_for_it),
    STAYS,  # nothing comes back: what gathers is read there alone, and what the region returns comes later
)


def take_in_gathers(gm: GraphModule) -> list[Decision]:
    """Takes what gathers records into every legal attention of `gm`, and of the subgraphs the model asked for, in
    place. One decision a branch of keys that is handed records."""
    open_shared_attention(gm)
    return [decision for program in programs(gm) for decision in _take_in(program)]


def _take_in(gm: GraphModule) -> list[Decision]:
    judged = [[(site, broken_rule(site, RULES)) for site in sites] for sites in find_sites(gm)]
    legal = [[site for site, broken in sites if broken is None] for sites in judged]
    facts = [attributes(sites) if sites else {} for sites in legal]
    made = [_taken_in(gm, sites, each) if sites else None for sites, each in zip(legal, facts, strict=True)]
    return [
        refused(site.records, *broken) if broken is not None else applied(call)  # type: ignore[arg-type]
        for sites, call in zip(judged, made, strict=True)
        for site, broken in sites
    ]


def open_shared_attention(gm: GraphModule) -> None:
    """Inlines, in place, every subgraph call that hands an attention in it what may be a gather."""
    while calls := [call for call in gm.graph.nodes if call.target is invoke_subgraph and _hands_on(call)]:
        for call in calls:
            inline(gm, call)


def _hands_on(call: Node) -> bool:
    if is_region(call):
        return False
    body = body_of(call)
    inputs = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    handed = (inputs.get(list(unviewed(node))[-1]) for node in _handed_records(body))
    return any(isinstance(node, Node) and list(unviewed(node))[-1].target in GATHERS for node in handed)


def _handed_records(gm: GraphModule) -> Iterator[Node]:
    """What attention in `gm` is handed as records, and so on in the subgraphs that it calls."""
    for call in gm.graph.nodes:
        if call.target is not invoke_subgraph:
            continue
        if is_region(call, KIND):
            operands = zip(call.args[2:], region_of(call).attrs["operands"], strict=True)
            yield from (arg for arg, role in operands if role in handed(call))
        elif not is_region(call):
            inner = body_of(call)
            inputs = dict(zip(inner.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
            yield from (inputs[node] for node in _handed_records(inner) if node in inputs)


def handed(call: Node) -> list[str]:
    """The branches of an attention whose records it is handed."""
    return [name for name, source in zip(BRANCHES, region_of(call).attrs["sources"], strict=False) if source == ROWS]


def find_sites(gm: GraphModule) -> list[list[Site]]:
    """The branches of each attention that are handed records, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    found = []
    for call in regions(gm, KIND):
        sites: list[Site] = []
        for name in handed(call):
            sites.append(Site(order, call, name, sites[-1] if sites else None))
        found.append(sites)
    return found


def attributes(sites: list[Site]) -> dict[str, Any]:
    """What the region of these sites says of itself then."""
    call, gathers = sites[0].call, {site.name: site.gather for site in sites}
    attrs = region_of(call).attrs
    roles = dict(zip(call.args[2:], attrs["operands"], strict=True))
    for gather in gathers.values():
        assert gather is not None
        roles |= gather.operands  # type: ignore[arg-type]
    members = sorted({node for site in sites for node in site.members}, key=sites[0].order.__getitem__)
    read, _ = interface(members)
    sources = [gather.source if (gather := gathers.get(name)) else source
               for name, source in zip(BRANCHES, attrs["sources"], strict=False)]  # fmt: skip
    return {
        **attrs,
        "sources": tuple(sources),
        "operands": tuple(role_of(node, roles) for node in read),  # type: ignore[arg-type]
    }


def _taken_in(gm: GraphModule, sites: list[Site], attrs: dict[str, Any]) -> Node:
    order = sites[0].order.__getitem__
    gathers = sorted({node for site in sites for node in site.gather.nodes}, key=order)  # type: ignore[union-attr]
    late = sorted({node for site in sites for node in site.written_over}, key=order)
    before = set(gm.graph.nodes)
    inline(gm, sites[0].call)
    told = [*gathers, *(node for node in gm.graph.nodes if node not in before)]
    call = outline(gm, told, kind=KIND, in_order=told, **attrs)
    last = call
    while last.next in call.users:
        last = last.next
    for node in late:
        last.append(node)
        last = node
    return call
