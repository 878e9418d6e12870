"""rewrites: what in a piece is put another way before Inductor compiles it, and how the report tells of it.

rewrite(gm)             functional ATen, in place: how many sites there were of each kind
options_of([found])     {"products": ("5 of widened 16-bit floats take them as they are", "v41; ..."), ...}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule

from v41.lowering.grouped_products import MEAN, grouped_products
from v41.lowering.inverse_orders import inverse_orders
from v41.lowering.narrow_products import narrow_products
from v41.lowering.packed_products import packed_products
from v41.lowering.short_sorts import MOST, short_sorts


@dataclass(frozen=True)
class Rewrites:
    """orders: of another sort's order, written. sorts: by counting. products: of widened 16-bit floats, on these.
    grouped: grouped products with a kernel for few rows. packed: of packed weights, read as stored; decoded: whole."""

    orders: int = 0
    sorts: int = 0
    products: int = 0
    grouped: int = 0
    packed: int = 0
    decoded: int = 0


def rewrite(gm: GraphModule) -> Rewrites:
    """Puts all sites of `gm` another way, those of sorted orders before sorts, products of packed weights first."""
    packed, decoded = packed_products(gm)
    return Rewrites(inverse_orders(gm), short_sorts(gm), narrow_products(gm), grouped_products(gm), packed, decoded)


def options_of(found: Iterable[Rewrites]) -> dict[str, tuple[str, str]]:
    """Options of the report: what was done, and by whom; of a kind without a site none."""
    each = list(found)
    orders, sorts = (sum(getattr(one, name) for one in each) for name in ("orders", "sorts"))
    products, grouped = (sum(getattr(one, name) for one in each) for name in ("products", "grouped"))
    packed, decoded = (sum(getattr(one, name) for one in each) for name in ("packed", "decoded"))
    lines = {
        "products": (products, f"{products} of widened 16-bit floats take them as they are", "v41; sums in fp32"),
        "grouped products": (grouped, f"{grouped} have a kernel for up to {MEAN} rows a group", "v41"),
        "packed products": (
            packed + decoded,
            f"{packed} read weights as they are stored" + f"; {decoded} have them decoded whole" * bool(decoded),
            "v41",
        ),
        "orders of orders": (orders, f"{orders} written as the inverse of the order", "v41"),
        "sorts": (sorts, f"{sorts} have a kernel for up to {MOST} integers", "v41"),
    }
    return {name: (text, who) for name, (count, text, who) in lines.items() if count}
