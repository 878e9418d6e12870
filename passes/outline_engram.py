"""outline_engram: an Engram becomes two regions, what hangs on token ids alone and what meets the streams.

    before   ids -> compressed, multiplied, xored, modulo primes -> rows of tables -> decoded -> product -> keys, value
             X, keys -> dots, norms, signed root, sigmoid; X + gate * value
    after    region(kind="engram_lookup", orders=(2, 3, 4), heads=8, tables=24, width=256, stored="fp8/32",
                    ids_alone=True, operands=("ids", "table", ...), outputs=("rows",)) -> product with a weight ->
             region(kind="engram_gate", streams=4, width=5120, eps=1e-20, scale=0.0139754, floor=1e-6, ...) -> X'

Sites: a table indexed with remainders of a hash; a sum of streams and of what a sigmoid made of them weighs. ids_alone
is found by walking back from all that the look-up reads: integers that the caller gives, and the tables, nothing else.
Then it may run long before its layer. Legal when the kind's RULES hold. Exact because outlining moves nodes and
rewrites none; what several look-ups read (ids compressed once for all layers) stays outside. The product between the
two is any product, and not this pass's business. Needs canonicalize.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch.fx import GraphModule, Node

from v41.passes.engram_gates import GATE, Gate, gates
from v41.passes.engram_lookups import LOOKUP, Lookup, lookups
from v41.passes.matching import fake, interface, is_narrowing, shape
from v41.passes.norms import role_of
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

Site = Gate | Lookup

# ---- what must hold: each predicate returns the node at fault


def gates_otherwise(site: Any) -> Node | None:
    return site.sigmoid if site.formula is None else None


def rounds_inside(site: Any) -> Node | None:
    narrow = (node for node in site.members if is_narrowing(node) and node is not site.result)
    return next((node for node in narrow if fake(node).is_floating_point()), None)  # type: ignore[union-attr]


def hashes_otherwise(site: Any) -> Node | None:
    return site.modulo if site.hash is None else None


def stores_otherwise(site: Any) -> Node | None:
    return site.anchor if site.stored is None else None


SOUND: tuple[Rule[Site], ...] = (
    ("only its result is read outside", lambda site: is_read_inside(site.members, site.exits)),
    STAYS,
)
RULES: dict[str, tuple[Rule[Site], ...]] = {  # in order: each may rely on those above
    GATE: (
        ("the gate is the sigmoid of the signed root of the normed product of streams and keys", gates_otherwise),
        ("nothing is rounded before the streams are", rounds_inside),
        *SOUND,
    ),
    LOOKUP: (
        ("each hash is the xor of the first ids, multiplied", hashes_otherwise),
        ("a row is stored as it is or in groups of fp8", stores_otherwise),
        *SOUND,
    ),
}


def outline_engram(gm: GraphModule) -> list[Decision]:
    """Outlines every legal part of an Engram in `gm`, and in the subgraphs the model asked for, in place."""
    return outline_in_programs(
        gm, lambda each: find_sites(each, outermost=each is gm), lambda site: RULES[site.kind], attributes
    )


def find_sites(gm: GraphModule, *, outermost: bool = True) -> list[Site]:
    """Look-ups and gates, in graph order. outermost: the inputs of `gm` are the caller's."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    return sorted([*lookups(order, outermost), *gates(order)], key=lambda site: order[site.anchor])


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    read, returned = interface(site.members)
    if isinstance(site, Gate):
        assert site.formula is not None
        roles = {node: role for role, nodes in site.operands.items() for node in nodes} | {site.streams: "streams"}
        return {
            "streams": shape(site.streams)[1],
            "width": shape(site.streams)[2],
            **site.formula._asdict(),
            "masked": "mask" in site.operands,
            "operands": tuple(role_of(arg, roles) for arg in read),
            "outputs": ("streams",) * len(returned),
        }
    assert site.hash is not None and site.stored is not None
    form, tables = site.tail.format, prod(map(int, shape(site.modulo)[1:]))
    return {
        **site.hash._asdict(),
        "tables": tables,
        "heads": tables // len(site.hash.orders),
        "width": max(int(shape(take)[-1]) for take in site.takes),
        "rows": shape(site.tables[0])[0],
        "stored": site.stored[0],
        "then": site.tail.then,
        "format": form.facts(int(shape(site.rows)[-1])) if form is not None else None,
        "ids_alone": site.hangs_on_ids_alone(read),
        "operands": tuple(site.role(arg) for arg in read),
        "outputs": tuple("rows" if node is site.rows else site.tail.roles[node] for node in returned),
    }
