"""replay_sizes: which numbers of a program are sizes of its tensors, so that they are others of kept rows.

    view(x, [T, 8])   T is a size: of kept rows it is their number
    x / T             T is a number like any other: that of the whole program, whichever rows are kept
"""

from __future__ import annotations

from torch import SymBool, SymFloat, SymInt, ops
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from v41._compat import symbols_of
from v41.passes.analysis.algebra import expression
from v41.passes.matching import VIEWS
from v41.regions import invoke_subgraph

aten = ops.aten
CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
REGROUPS = (aten.view.default, aten._unsafe_view.default)
CUTS = (aten.slice.Tensor, aten.select.int)
SIZES_AT: dict[object, int] = {  # which argument says how large the result is
    **dict.fromkeys((*REGROUPS, aten.expand.default), 1), aten.full.default: 0
}  # fmt: skip


def simple(size: object) -> bool:
    """Whether a size is a sum of products of symbols, which can be written with others."""
    if not isinstance(size, SymInt):
        return isinstance(size, int)
    expr = expression(size)
    return bool(expr.is_polynomial(*expr.free_symbols)) if symbols_of(size) else True


def is_number(node: Node) -> bool:
    """Whether it is a number of the host: a size, or what is made of sizes."""
    return isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool))


def sizes_of(node: Node) -> list[Node]:
    """The numbers that say how large the result of `node` is. Of kept rows they are others, while all others stay:
    x / T is x / T of any row. What a body does with those it is given is looked into."""
    given = node.args[SIZES_AT[node.target] :][:1] if node.target in SIZES_AT else ()
    given = node.args[2:] if node.target is invoke_subgraph else given
    found: list[Node] = []
    map_arg(given, lambda arg: found.append(arg) if is_number(arg) else arg)
    return found


def others_than_sizes(node: Node) -> list[Node]:
    """All other operands of a node that is no call."""
    found: list[Node] = []
    kept = [arg for at, arg in enumerate(node.args) if at != SIZES_AT.get(node.target, -1)]
    if node.target is not invoke_subgraph:
        map_arg((kept, node.kwargs), found.append)
    return found


def is_uniform(node: Node) -> bool:
    """Whether a view is of a tensor whose elements are all the same."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node.target in CONSTANTS


def sizes_in_arguments(node: Node) -> list[SymInt]:
    """Sizes that `node` has as arguments without a node of their own."""
    found: list[SymInt] = []
    map_aggregate((node.args, node.kwargs), lambda arg: found.append(arg) if isinstance(arg, SymInt) else arg)
    return found
