"""counts: how large a program is: its nodes, the regions a step runs, by name, and the kernels a step would launch.

A launch is a node that computes or writes: a view, a size and an assertion is none. A region of a kind in `whole` is
one launch, as it gets a kernel of its own; any other subgraph launches what its body does. So it is what a step
launches where nothing else is fused: an estimate, alike before and after a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from v41.passes.analysis.effects import viewed_args, written_args
from v41.regions import body_of, invoke_subgraph, is_region, region_of


@dataclass(frozen=True)
class Counts:
    nodes: int  # of the program itself, bodies not included
    named: Counter[str]  # regions by name, those in other regions and in subgraphs that layers share included
    launches: int

    @property
    def regions(self) -> int:
        return self.named.total()


def counts(gm: GraphModule, whole: Collection[str], known: dict[GraphModule, Counts] | None = None) -> Counts:
    """The Counts of `gm`. `known` remembers those of bodies that several calls share."""
    known = {} if known is None else known
    if gm not in known:
        named, launches = Counter[str](), 0
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is invoke_subgraph:
                inner = counts(body_of(node), whole, known)
                named += inner.named
                named += Counter([region_of(node).name] if is_region(node) else [])
                launches += 1 if is_region(node) and region_of(node).kind in whole else inner.launches
            else:
                launches += computes(node)
        known[gm] = Counts(len(gm.graph.nodes), named, launches)
    return known[gm]


def computes(node: Node) -> bool:
    """Whether `node` is a kernel where every operator is one."""
    value = node.meta.get("val")
    tensors = any(isinstance(each, Tensor) for each in (value if isinstance(value, (tuple, list)) else [value]))
    return bool(written_args(node)) or (tensors and not viewed_args(node))
