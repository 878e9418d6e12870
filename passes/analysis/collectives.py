"""collectives: what a program says to other ranks, in order, as lines that ranks can compare.

    groups         names of the process groups, in order of first use: a rank's own, since names may differ by rank
    lines          "all_reduce sum over group 0 of 4: bfloat16 [k0, 5120], in all_reduce_boundary seam"

Constants of a rank (its number, where its share of the vocabulary begins) are in none of them; dtypes, sizes and the
order are, and which of them a region holds, for that decides who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat_groups import ranks_of
from v41.passes.analysis.effects import begins_collective, effect_of, ends_collective
from v41.passes.structure import Symbols
from v41.regions import body_of, invoke_subgraph, is_region, region_of


def spoken(gm: GraphModule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """groups and lines of `gm`, bodies of subgraphs included."""
    groups: dict[str, int] = {}
    symbols = Symbols()
    lines = tuple(_line(node, where, groups, symbols) for node, where in _begun(gm, ""))
    return tuple(groups), lines


def _begun(gm: GraphModule, where: str) -> Iterator[tuple[Node, str]]:
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is invoke_subgraph:
            yield from _begun(body_of(node), region_of(node).name if is_region(node) else where)
        elif begins_collective(node) or (effect_of(node) == "collective" and not ends_collective(node)):
            yield node, where


def _line(node: Node, where: str, groups: dict[str, int], symbols: Symbols) -> str:
    told = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (str, int))]
    group = next((arg for arg in reversed(told) if ranks_of(arg) is not None), None)
    over = "over a group not known here"
    if group is not None:
        told.remove(group)
        over = f"over group {groups.setdefault(str(group), len(groups))} of {ranks_of(group)}"
    operands = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), Tensor)]
    shapes = ", ".join(f"{value.dtype} [{', '.join(map(symbols.spell, value.shape))}]" for value in operands)
    what = " ".join(map(str, (str(node.target).split(".")[1], *told)))
    return f"{what} {over}: {shapes}" + (f", in {where}" if where else "")
