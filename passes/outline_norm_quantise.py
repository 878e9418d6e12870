"""outline_norm_quantise: an RMSNorm becomes one region with what is done to its rows behind it, up to quantised bytes.

    before   x -> x * rsqrt(mean(x^2) + eps) * w -> round -> RoPE -> amax of groups, scales, bytes -> record
    after    region(kind="norm_quantise", width=512, eps=1e-20, weighted=True, then=("rope", "fp8_record"), rope={...},
                    format={...}, operands=("input", "weight", "cos", "sin"), outputs=("quantised",)) -> record

Site: a value divided by the root mean square of all that its row has, outside of other regions; a norm of each head by
itself is none, and V4.1 has none. What follows is read by running it on numbers (row_tails.py): a turn by RoPE, then a
rounding to groups of fp8 or fp4, either or neither; as a record, or as values and scales, outputs=("quantised",
"scales"). The rest stays outside, so a product with a weight, a gather of rows or a write of a cache never comes in.
Legal when all RULES hold; a norm is a region also where bytes of its row, refused by themselves, stay outside. Exact
because outlining moves nodes and rewrites none; convex, as what a tail reads beside its row stood before that. A norm
in a subgraph that layers share is outlined there, once. Needs canonicalize; comes after the passes whose regions hold
norms of their own (outline_mhc, outline_compressor).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from v41.passes.matching import interface, unviewed
from v41.passes.norms import Norm, norm_of, role_of
from v41.passes.scalings import Scaling, find_scalings
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND, STRAY = "norm_quantise", "stray"


@dataclass(frozen=True)
class Site:
    """One scaling. order: place of each node of its program."""

    order: Mapping[Node, int]
    scaling: Scaling
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.scaling.result

    @cached_property
    def norm(self) -> Norm | None:
        return norm_of(self.order, self.scaling)

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        assert self.norm is not None  # the first rule
        return self.norm.closed(self.norm.nodes)


@dataclass(frozen=True)
class Stray:
    """Bytes of a row that stay outside of its norm's region."""

    anchor: Node
    kind = STRAY

    @property
    def members(self) -> list[Node]:
        return [self.anchor]


# ---- what must hold: each predicate returns the node at fault


def scales_another_row(site: Site) -> Node | None:
    return site.scaling.result if site.norm is None else None


RULES: dict[str, tuple[Rule[Any], ...]] = {  # in order: each may rely on those above
    KIND: (
        ("the row is divided by its own root mean square", scales_another_row),
        (
            "only the row when normed, turned or quantised is read outside",
            lambda site: is_read_inside(site.members, site.norm.exits),
        ),
        STAYS,
    ),
    STRAY: (
        ("bytes of the row have scales of its own, one for each group or for all of it", lambda stray: stray.anchor),
    ),
}


def outline_norm_quantise(gm: GraphModule) -> list[Decision]:
    """Outlines every legal norm of `gm`, and of the subgraphs the model asked for, in place. One decision a site, and
    one for bytes of a norm's row that stay outside."""
    return outline_in_programs(gm, find_sites, lambda site: RULES[site.kind], attributes)


def find_sites(gm: GraphModule) -> Iterator[Site | Stray]:
    """Values divided by a root mean square, in graph order, each in front of what is a stray of it."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for site in (Site(order, scaling) for node in order for scaling in find_scalings(node)):
        yield site
        if site.norm is not None and (astray := site.norm.tail.astray) is not None:
            yield Stray(astray)


def attributes(site: Site | Stray) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    assert isinstance(site, Site) and site.norm is not None
    roles = dict.fromkeys(unviewed(site.norm.row), "input") | site.norm.roles
    read, returned = interface(site.members)
    return {
        **site.norm.facts,
        "operands": tuple(role_of(arg, roles) for arg in read),
        "outputs": tuple(roles[node] for node in returned),
    }
