"""outline_norm_quantise: an RMSNorm becomes one region with what is done to its rows behind it, up to quantised bytes.

    before   x -> x * rsqrt(mean(x^2) + eps) * w -> round -> RoPE -> amax of groups, scales, bytes -> record
    after    region(kind="norm_quantise", width=512, eps=1e-20, weighted=True, then=("rope", "fp8_record"), rope={...},
                    format={...}, operands=("input", "weight", "cos", "sin"), outputs=("quantised",)) -> record

Site: a value divided by the root mean square of all that its row has, outside of other regions; a norm of each head by
itself is none, and V4.1 has none. What follows is read by running it on numbers (row_tails.py): a turn by RoPE, then a
rounding to groups of fp8 or fp4, either or neither; as a record, or as values and scales, outputs=("quantised",
"scales"). The rest stays outside, so a product with a weight, a gather of rows or a write of a cache never comes in.
Legal when all RULES hold. Exact because outlining moves nodes and rewrites none; convex, as what a tail reads beside
its row stood before that. A norm in a subgraph that layers share is outlined there, once. Needs canonicalize; comes
after the passes whose regions hold norms of their own (outline_mhc, outline_compressor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from v41.passes.matching import interface, unviewed
from v41.passes.norms import Norm, norm_of, role_of
from v41.passes.scalings import Scaling, find_scalings
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND = "norm_quantise"


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


# ---- what must hold: each predicate returns the node at fault


def scales_another_row(site: Site) -> Node | None:
    return site.scaling.result if site.norm is None else None


def is_scaled_otherwise(site: Site) -> Node | None:
    assert site.norm is not None  # the rule above
    return site.norm.tail.astray


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the row is divided by its own root mean square", scales_another_row),
    ("bytes of the row have scales of its own, one for each group or for all of it", is_scaled_otherwise),
    (
        "only the row when normed, turned or quantised is read outside",
        lambda site: is_read_inside(site.members, site.norm.exits),  # type: ignore[union-attr]
    ),
    STAYS,
)


def outline_norm_quantise(gm: GraphModule) -> list[Decision]:
    """Outlines every legal norm of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Values divided by a root mean square, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    return [Site(order, scaling) for node in order for scaling in find_scalings(node)]


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    assert site.norm is not None
    roles = dict.fromkeys(unviewed(site.norm.row), "input") | site.norm.roles
    read, returned = interface(site.members)
    return {
        **site.norm.facts,
        "operands": tuple(role_of(arg, roles) for arg in read),
        "outputs": tuple(roles[node] for node in returned),
    }
