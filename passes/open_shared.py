"""open_shared: a call of a subgraph that layers share becomes its nodes where a region in it gets a piece of its own.

    before   invoke_subgraph(moe, x)                    after   region moe_gate(x), its other nodes

Only calls of the program itself can be pieces. Equal pieces still share one artifact, so nothing is compiled more
often. Exact because inlining moves nodes and rewrites none.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from v41.regions import body_of, cuts, inline, invoke_subgraph, is_region, region_of


def open_shared(gm: GraphModule, kinds: Collection[str]) -> None:
    """Inlines, in place, every subgraph call that is no region and holds one that `kinds` cut out, at any depth."""
    known: dict[int, bool] = {}
    while True:
        calls = [
            node
            for node in gm.graph.nodes
            if node.target is invoke_subgraph and not is_region(node) and _holds(body_of(node), kinds, known)
        ]
        if not calls:
            return
        for call in calls:
            inline(gm, call)
        known.clear()


def _holds(body: GraphModule, kinds: Collection[str], known: dict[int, bool]) -> bool:
    """Whether `body` calls a region that is cut out, or a subgraph that does."""
    if id(body) not in known:
        known[id(body)] = any(
            cuts(region_of(node), kinds) if is_region(node) else _holds(body_of(node), kinds, known)
            for node in body.graph.nodes
            if node.target is invoke_subgraph
        )
    return known[id(body)]
