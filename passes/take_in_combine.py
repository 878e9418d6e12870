"""take_in_combine: where a kernel adds up over ranks, it adds up the outputs of a rank's experts, too, as it sends.

    before   rows, places -> rows[places] -> [T, k, D] -> sum over k, + the shared expert -> cast -> part
             -> region(kind="all_reduce_boundary", part=0, ...)
    after    region(kind="all_reduce_boundary", part=None, operands=("rows", "places", "term", ...), ...)
             whose body begins with these nodes: the part is in no memory, a launch and 4 bytes a channel are saved

Site: every fused all-reduce. Where experts return the part, or it is a sum with what they return, the subgraph that
layers share and the region "experts" in it are opened first: products are the library's, and their pieces end in front
of the gather. Legal when all RULES hold. Exact because inlining and outlining move nodes and rewrite none: the part is
rounded where it was. Needs fuse_all_reduce; comes before writes are put in place.

Not taken in: a product that ends in the part, "product" as its region says. What sends would have to be the product's
kernel, or peers would have to fetch what the library wrote: DESIGN, "What makes the part", has the arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import SymInt
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.analysis.effects import bases, viewed_args
from v41.passes.matching import RESHAPES, aten, fake, interface, is_constant, prims, same_sizes, shape
from v41.passes.norms import role_of
from v41.passes.outline_experts import KIND as EXPERTS
from v41.passes.reinplace_cache_writes import IN_PLACE, PART
from v41.passes.sites import STAYS, Rule, broken_rule, is_read_inside
from v41.regions import REDUCED, inline, invoke_subgraph, is_region, outline, region_of, regions
from v41.report import Decision, applied, refused

# What makes a row of rows. Not here: index_add, which a row of the sum is no row of; activations, which cost little
# where they stand and read more than they return.
BY_ROWS = (
    *RESHAPES,
    prims.convert_element_type.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.sum.dim_IntList,
    aten.index.Tensor,
)
SORTS = (aten.sort.default, aten.sort.stable)


@dataclass(frozen=True)
class Site:
    """`call`: a fused all-reduce whose part is an operand."""

    order: Mapping[Node, int]
    call: Node

    @property
    def attrs(self) -> dict[str, Any]:
        return region_of(self.call).attrs

    @property
    def part(self) -> Node:
        part: Node = self.call.args[2 + self.attrs["part"]]
        return part

    @cached_property
    def front(self) -> list[Node]:
        """The nodes that make the part, as far as they work on rows; in graph order."""
        found: dict[Node, None] = {}
        stack = [self.part]
        while stack:
            node = stack.pop()
            if node in found or node.target not in BY_ROWS or node.kwargs.get("alpha", 1) != 1:
                continue
            found[node] = None
            if node.target is not aten.index.Tensor:
                stack.extend(arg for arg in node.all_input_nodes if fake(arg) is not None)
        return sorted(found, key=self.order.__getitem__)

    @property
    def gathers(self) -> list[Node]:
        return [node for node in self.front if node.target is aten.index.Tensor]

    @cached_property
    def leaves(self) -> list[Node]:
        """The tensors that these read from beyond, in order of first read."""
        read, _ = interface(self.front)
        return [node for node in read if fake(node) is not None and not is_constant(node)]

    @cached_property
    def members(self) -> list[Node]:
        """These and the region."""
        taken = (user for user in self.call.users if user.target is operator.getitem)
        return sorted([*self.front, self.call.args[0], self.call, *taken], key=self.order.__getitem__)  # type: ignore[list-item]


# ---- what must hold: each predicate returns the node at fault


def is_no_combine(site: Site) -> Node | None:
    return None if site.attrs["producer"] == "combine" else site.part


def is_made_otherwise(site: Site) -> Node | None:
    return None if site.front else site.part


def is_read_elsewhere(site: Site) -> Node | None:
    """By what reads the sum, too: several rows of a table are no row to it, nor is a table read as rows."""
    outside = is_read_inside([site.part, site.call], [site.call]) or is_read_inside(site.front, [site.part])
    return outside or next((node for node in _tables(site) if site.call in node.users), None)


def is_no_row_of_the_sum(site: Site) -> Node | None:
    rows = shape(site.part)[:1]
    if len(shape(site.part)) != 2:
        return site.part
    return next((node for node in site.leaves if node not in _tables(site) and not _has_rows(node, rows[0])), None)


def names_rows_otherwise(site: Site) -> Node | None:
    return next((node for node in site.gathers if not _names_each_row(node)), None)


def is_wider_than_the_part(site: Site) -> Node | None:
    """A leaf as wide as the part in a wider type: what makes it would write more than is saved."""
    part = fake(site.part)
    assert part is not None
    wide = (node for node in site.leaves if same_sizes(shape(node)[-1:], shape(site.part)[-1:]))
    return next((node for node in wide if fake(node).dtype.itemsize > part.dtype.itemsize), None)  # type: ignore[union-attr]


def is_written_over(site: Site) -> Node | None:
    """A write on top of what would be read behind it from then on: it could not happen in place (the next pass)."""
    stack = [base for leaf in site.leaves for base in bases(leaf)]
    while stack:
        node = stack.pop()
        for user in node.users:
            writes = user.args[:1] == (node,) and (user.target in IN_PLACE or user.target in PART)
            if writes and site.order[user] < site.order[site.call]:
                return user
            if viewed_args(user) == [node]:
                stack.append(user)
    return None


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("experts' outputs are added up to the part, which nobody else reads", is_no_combine),
    ("the part is a sum, a cast or a view of rows", is_made_otherwise),
    ("what is on the way to the part is read there alone", is_read_elsewhere),
    ("each row of the part is made of rows of its own", is_no_row_of_the_sum),
    ("rows are named by a sort of as many", names_rows_otherwise),
    ("what it is made of is no wider than the part", is_wider_than_the_part),
    ("what it is made of is not written over meanwhile", is_written_over),
    STAYS,  # nothing comes back: what is on the way is read there alone, and what the region returns comes later
)


def _tables(site: Site) -> list[Node]:
    return [node.args[0] for node in site.gathers]  # type: ignore[misc]


def _has_rows(node: Node, rows: int | SymInt) -> bool:
    """Whether the first axis has a whole number of `rows`, as far as is known."""
    sizes = shape(node)
    return bool(sizes) and any(known_equal(sizes[0], k * rows) for k in range(1, 65))


def _names_each_row(gather: Node) -> bool:
    """Whether the numbers of a gather are what a sort of one axis returns: from 0 on, and as many as there are rows."""
    (table, indices) = gather.args
    if not isinstance(table, Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    places: Any = indices[0]
    if places is None or places.target is not operator.getitem or places.args[1] != 1:
        return False
    return places.args[0].target in SORTS and same_sizes(shape(places), shape(table)[:1])


def take_in_combine(gm: GraphModule) -> list[Decision]:
    """Takes the sum of experts' outputs into every legal site of `gm`, in place. One decision a site."""
    for call in regions(gm, REDUCED):
        if region_of(call).attrs["part"] is not None:
            open_experts(gm, call)
    sites = find_sites(gm)
    judged = [(site, broken_rule(site, RULES)) for site in sites]
    facts = [attributes(site) if broken is None else {} for site, broken in judged]
    return [
        refused(site.part, *broken) if broken is not None else applied(_taken_in(gm, site, found))
        for (site, broken), found in zip(judged, facts, strict=True)
    ]


def open_experts(gm: GraphModule, call: Node) -> None:
    """Inlines the experts that make the part of `call`, and the shared subgraph that they lie in."""
    region = region_of(call)
    while region.attrs["producer"] == "combine":
        part = call.args[2 + region.attrs["part"]]
        beyond = _beyond(part)
        made = next((node for node in beyond if is_region(node, EXPERTS) or not is_region(node)), None)
        if made is None:
            return
        inline(gm, made)


def _beyond(part: Node) -> list[Node]:
    """Subgraph calls that return the part, or one of what is added up to it."""
    found, stack = dict[Node, None](), [part]
    while stack:
        node = stack.pop()
        if node.target is operator.getitem and node.args[0].target is invoke_subgraph:  # type: ignore[union-attr]
            found[node.args[0]] = None  # type: ignore[index]
        elif node.target in RESHAPES or node.target in (prims.convert_element_type.default, aten.add.Tensor):
            stack.extend(arg for arg in node.all_input_nodes if fake(arg) is not None)
    return list(found)


def find_sites(gm: GraphModule) -> list[Site]:
    """Every fused all-reduce that does not make its part yet, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    return [Site(order, call) for call in regions(gm, REDUCED) if region_of(call).attrs["part"] is not None]


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself then."""
    roles = dict(zip(site.call.args[2:], site.attrs["operands"], strict=True))
    new = {node: "term" for node in site.leaves}
    places: Any = [node.args[1] for node in site.gathers]
    new |= {each: "places" for (each,) in places}
    new |= {table: "rows" for table in _tables(site)}
    read, _ = interface(site.members)
    return {**site.attrs, "part": None, "operands": tuple(roles.get(node) or role_of(node, new) for node in read)}


def _taken_in(gm: GraphModule, site: Site, attrs: dict[str, Any]) -> Node:
    before = set(gm.graph.nodes)
    inline(gm, site.call)
    nodes = [node for node in gm.graph.nodes if node in set(site.front) or node not in before]
    return outline(gm, nodes, kind=REDUCED, **attrs)
