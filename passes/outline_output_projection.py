"""outline_output_projection: the grouped and the joint product behind attention become one region.

    before   o [T, H, D] -> product of each group of heads with its A -> [T, G rank] -> round to fp8 -> product with B
    after    region(kind="output_projection", groups=8, rank=1024, width=4096, hidden=5120, formats=("bfloat16",
                    "fp8/32x32"), quantised=(None, ("fp8", 32)), operands=("heads", "down", "up", "up_scales"), ...)

Site: a batched product of rows with a weight whose result, laid side by side, goes into one product with a weight.
Legal when all RULES hold. Which channel meets which weight is read by running each product on integers; the roundings
to groups of fp8 or fp4 in front of either, and how the weights are stored, by what they do to numbers
(number_formats.py, stored_weights.py). Exact because outlining moves nodes and rewrites none; convex, as only the
output is read outside. In a subgraph that layers share it is outlined there, once. Needs canonicalize; comes after
outline_attention, whose output is its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.analysis.probe import evaluate, integers, spelling
from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    absorb,
    aten,
    cone,
    fake,
    interface,
    is_narrowing,
    is_part,
    is_pointwise,
    is_widening,
    shape,
    unviewed,
)
from v41.passes.number_formats import Format, formats_of, read_format
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.passes.stored_weights import Weight, read_weight
from v41.report import Decision

KIND = "output_projection"
ROUNDING = (aten.amax.default, aten.cat.default, aten.clone.default, aten.view.dtype)
NEAR = 8  # values in front of a product that its operand may be the rounding of
DOWN = {"grd": "tgd,grd->tgr", "gdr": "tgd,gdr->tgr"}  # axes of A as stored: groups, rank, width
FAR = 256  # nodes between both products that are looked at; a rounding to fp4 takes 90
UP = {"or": "tr,or->to", "ro": "tr,ro->to"}  # of B: hidden, groups x rank


@dataclass(frozen=True)
class Factor:
    """One product of rows with a weight."""

    order: Mapping[Node, int]
    product: Node
    rows: Node  # one after another, so before views of a batched product

    @property
    def operand(self) -> Node:
        """The weight as the product reads it."""
        return next(arg for arg in self.product.all_input_nodes if not has_rows(arg))

    @cached_property
    def root(self) -> Node:
        """The weight before it was laid out for the product."""
        return laid(self.operand)

    @cached_property
    def weight(self) -> Weight:
        return read_weight(self.order, self.root)

    @cached_property
    def rounding(self) -> tuple[Node, Format | None]:
        """What `rows` is the rounding of, and the format; itself and None where it is none of those known."""
        nodes, leaves = cone(self.order, self.rows, (), may_round)
        near = [node for node in (*leaves, *nodes) if node is not self.rows and formats_of(node, self.rows)]
        for source in sorted(near, key=self.order.__getitem__, reverse=True)[:NEAR]:
            nodes, leaves = cone(self.order, self.rows, {source}, may_round)
            if leaves == [source] and (found := read_format(nodes, source, self.rows)) is not None:
                return source, found
        return self.rows, None

    def nodes(self) -> Iterator[Node]:
        """All from the rows before their rounding, and from the stored weight, to the product."""
        yield from cone(self.order, self.rows, {self.rounding[0]}, may_round)[0]
        yield from cone(self.order, self.root, set(self.weight.stored), lambda node: True)[0]
        yield from cone(self.order, self.product, {self.rows, self.root}, may_lay)[0]


@dataclass(frozen=True)
class Site:
    """down, up: the grouped and the joint product."""

    order: Mapping[Node, int]
    down: Factor
    up: Factor
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.down.product

    @property
    def middle(self) -> Node:
        """z, in front of a rounding: what the grouped product becomes when it is laid side by side."""
        return self.up.rounding[0]

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Groups, rank, width of a group, hidden: all of the weights, which have no rows."""
        groups, *sides = shape(self.down.operand)
        *_, side, hidden = shape(self.up.operand)
        if self.up.operand is self.up.product.args[0]:
            side, hidden = hidden, side
        rank = cast(int, side) // cast(int, groups)
        return groups, rank, prod(sides) // rank, hidden  # type: ignore[return-value]

    @cached_property
    def axes(self) -> tuple[str, str] | None:
        """How A and B are indexed; None if the products are other ones."""
        groups, rank, width, hidden = self.sizes
        sides = {"g": groups, "r": rank, "d": width}
        down = self._axes(self.down, self.middle, (groups, width), sides, DOWN)
        up = self._axes(self.up, self.up.product, (groups * rank,), {"o": hidden, "r": groups * rank}, UP)
        return None if down is None or up is None else (down, up)

    def _axes(
        self, factor: Factor, result: Node, row: Sequence[int], sizes: Mapping[str, int], forms: Mapping[str, str]
    ) -> str | None:
        """Of `forms`, the one in which rows and weight become `result`; `sizes` of the axes."""
        given = [factor.rows, factor.root]
        nodes, leaves = cone(self.order, result, set(given), may_lay)
        if not set(given).issuperset(leaves):
            return None
        key = spelling(nodes, given, result), *row, *sizes.values(), *forms
        if key not in _AXES:
            _AXES[key] = _axes_read(nodes, given, result, row, sizes, forms)
        return _AXES[key]

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        between = cone(self.order, self.middle, {self.down.rows, self.down.root}, may_lay)[0]
        nodes = absorb({*self.down.nodes(), *self.up.nodes(), *between}, is_free)
        return sorted(nodes, key=self.order.__getitem__)


_AXES: dict[tuple[object, ...], str | None] = {}  # by spelling: weights are large, and the layers' are alike


def _axes_read(
    nodes: Sequence[Node],
    given: Sequence[Node],
    result: Node,
    row: Sequence[int],
    sizes: Mapping[str, int],
    forms: Mapping[str, str],
) -> str | None:
    x, w = (integers(node, seed) for seed, node in enumerate(given))
    try:
        found = evaluate(nodes, dict(zip(given, (x, w), strict=True)), result).flatten()
        x = x.reshape(x.shape[0], *row)
        told = ((name, torch.einsum(f, x, w.reshape([sizes[axis] for axis in name]))) for name, f in forms.items())
        return next((name for name, y in told if torch.equal(found, y.flatten())), None)
    except RuntimeError:  # the sizes do not fit
        return None


def laid(node: Node) -> Node:
    """What `node` is up to views, widening casts and copies."""
    while is_free(node) or node.target is aten.clone.default:
        node = cast(Node, node.args[0])
    return node


def has_rows(node: Node) -> bool:
    return any(not isinstance(size, int) for size in shape(node))


def is_free(node: Node) -> bool:
    return node.target in RESHAPES or is_widening(node)


def may_lay(node: Node) -> bool:
    """Whether `node` may stand between rows and products with them."""
    casts = is_free(node) or is_narrowing(node)
    return casts or node.target in (aten.clone.default, aten.bmm.default, aten.mm.default)


def may_round(node: Node) -> bool:
    """Whether `node` may be part of a rounding to groups."""
    return is_pointwise(node) or node.target in VIEWS or node.target in ROUNDING or is_part(node)


# ---- what must hold: each predicate returns the node at fault


def changes_the_middle(site: Site) -> Node | None:
    """What stands between the products, beside views, a cast and one known rounding to groups."""
    nodes, _ = cone(site.order, site.middle, {site.down.product}, may_round)
    return next((node for node in reversed(nodes) if not may_lay(node)), None)


def rounds_twice(site: Site) -> Node | None:
    """A cast of what a product of lower precision than fp32 has rounded already."""
    nodes = [node for node in cone(site.order, site.middle, {site.down.product}, may_lay)[0] if is_narrowing(node)]
    once = fake(site.down.product).dtype.itemsize >= 4  # type: ignore[union-attr]
    return next(iter(nodes[once:]), None)


def multiplies_otherwise(site: Site) -> Node | None:
    return None if site.axes is not None else site.down.product


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("between the products stand views, one cast and one rounding to groups at most", changes_the_middle),
    ("the grouped product is rounded once", rounds_twice),
    ("each group of heads meets its own A, and all meet B", multiplies_otherwise),
    ("only its output is read outside", lambda site: is_read_inside(site.members, [site.up.product])),
    STAYS,
)


def outline_output_projection(gm: GraphModule) -> list[Decision]:
    """Outlines every legal site of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Batched products of rows with a weight that lead, element by element, to one product with a weight."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sites = []
    for node in order:
        if node.target is aten.bmm.default and _with_weight(node):
            up = _read_by(node)
            if up is not None and _with_weight(up):
                sites.append(Site(order, Factor(order, node, laid(rows_of(node))), Factor(order, up, _flat(up))))
    return sites


def rows_of(product: Node) -> Node:
    return next(arg for arg in product.all_input_nodes if has_rows(arg))


def _flat(product: Node) -> Node:
    """The rows of `product` as [T, channels]."""
    rows = rows_of(product)
    return next((node for node in unviewed(rows) if len(shape(node)) == 2 and has_rows(node)), rows)


def _is_joint(node: Node) -> bool:
    """Whether `node` is one product of two matrices; einsum writes it as a batch of one."""
    return node.target is aten.mm.default or (node.target is aten.bmm.default and bool(known_equal(shape(node)[0], 1)))


def _with_weight(product: Node) -> bool:
    a, b = product.all_input_nodes * 2 if len(product.all_input_nodes) == 1 else product.all_input_nodes
    return has_rows(a) != has_rows(b)


def _read_by(product: Node) -> Node | None:
    """The first joint product behind `product`, past views, casts and what works in groups."""
    stack, seen = [product], {product}
    while stack and len(seen) < FAR:
        for user in stack.pop().users:
            if _is_joint(user):
                return user
            if user not in seen and may_round(user):
                seen.add(user)
                stack.append(user)
    return None


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    groups, rank, width, hidden = site.sizes
    factors = {"down": site.down, "up": site.up}
    roles = {node: "heads" for node in unviewed(site.down.rounding[0])}
    for name, factor in factors.items():
        stored = zip(factor.weight.stored, (name, f"{name}_scales"), strict=False)
        roles |= {view: role for node, role in stored for view in unviewed(node)}
    formats = [factor.rounding[1] for factor in factors.values()]
    read, _ = interface(site.members)
    return {
        "groups": groups,
        "rank": rank,
        "width": width,
        "hidden": hidden,
        "axes": site.axes,
        "formats": tuple(factor.weight.format for factor in factors.values()),
        "quantised": tuple(None if each is None else (each.name, each.group) for each in formats),
        "types": tuple(_dtype(node) for node in (site.down.rows, site.middle, site.up.product)),
        "operands": tuple(roles.get(arg, "size" if fake(arg) is None else "constant") for arg in read),
        "outputs": ("output",),
    }


def _dtype(node: Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")
