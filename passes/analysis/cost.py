"""cost: bytes, floating-point operations and launches of a node, a region, a piece or a program, in its symbols.

    mm  bf16 [u0, 256] x [256, 64]      read 512*u0 + 32768    written 128*u0    flops 32768*u0    launches 1

An operator reads each operand once and writes its results; a view is free. A gather reads what it takes and not all of
the cache, grouped products read the weights of at most as many experts as there are rows. A region counts as one
kernel would: its operands and results once, the work of its body, and of what decodes the weights of grouped products
as much as those read; `parts` sums up the nodes of the body instead.
flops: torch.utils.flop_counter's formula where it has one, else one an element computed or, in a reduction, read.
Operators that move, sort or compare places do none; of one that is unknown nobody knows (None), and it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, ops
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from v41._compat import OpOverload
from v41.passes.analysis.algebra import ZERO, Expr, expression, product, sizes
from v41.passes.analysis.counts import computes
from v41.passes.analysis.effects import viewed_args, written_args
from v41.passes.matching import fake
from v41.regions import body_of, invoke_subgraph, is_region

aten, prims = ops.aten, ops.prims

GATHERS = {  # operator -> position of what it takes elements from
    aten.index.Tensor: 0,
    aten.index_select.default: 0,
    aten.gather.default: 0,
    aten.embedding.default: 0,
}
PUTS = (aten.index_put_.default,)  # write what they are given, and leave the rest where it is
REDUCTIONS = frozenset(
    {
        *(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.prod.dim_int),
        *(aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim),
        *(aten.cumsum.default, aten.cumprod.default, aten.linalg_vector_norm.default, aten.var.correction),
        *(aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default, aten.native_layer_norm.default),
    }
)
MOVES = frozenset(
    {
        *(aten.cat.default, aten.repeat.default, aten.clone.default, aten.copy_.default, aten.constant_pad_nd.default),
        *(aten.full.default, aten.scalar_tensor.default, aten.empty.memory_format, prims.iota.default),
        *(aten.sort.default, aten.sort.stable, aten.topk.default, aten.searchsorted.Tensor, aten.flip.default),
        *(aten.index_put.default, aten.index_put_.default, aten.slice_scatter.default, aten.select_scatter.default),
        *GATHERS,
    }
)


@dataclass(frozen=True)
class Cost:
    """In the symbols of the graph. unknown: operators whose flops nobody knows, in order; flops leaves them out, and
    is None where nothing else is left."""

    read: Expr
    written: Expr
    flops: Expr | None
    launches: int
    unknown: tuple[str, ...] = ()

    @property
    def moved(self) -> Expr:
        """Bytes, both ways."""
        return self.read + self.written

    def at(self, **values: int) -> Cost:
        """With numbers for symbols: at(u0=128)."""
        read, written, flops = (
            each if each is None else each.subs({_symbol(name): value for name, value in values.items()})
            for each in (self.read, self.written, self.flops)
        )
        return Cost(read, written, flops, self.launches, self.unknown)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


NOTHING = Cost(ZERO, ZERO, ZERO, 0)


def total(costs: Iterable[Cost]) -> Cost:
    """Of all together."""
    some = list(costs)
    flops = [cost.flops for cost in some if cost.flops is not None]
    unknown = tuple(dict.fromkeys(name for cost in some for name in cost.unknown))
    return Cost(
        sympy.Add(*(cost.read for cost in some)),
        sympy.Add(*(cost.written for cost in some)),
        sympy.Add(*flops) if flops or not unknown else None,
        sum(cost.launches for cost in some),
        unknown,
    )


class Costs:
    """Costs of nodes, pieces and programs; what several calls share is counted once and remembered."""

    def __init__(self) -> None:
        self._nodes: dict[Node, Cost] = {}
        self._programs: dict[GraphModule, Cost] = {}
        self._flat: dict[GraphModule, Cost] = {}

    def program(self, gm: GraphModule) -> Cost:
        """Of a program or piece, each region a kernel of its own."""
        if gm not in self._programs:
            self._programs[gm] = total(self.node(node) for node in gm.graph.nodes if node.op == "call_function")
        return self._programs[gm]

    def parts(self, gm: GraphModule) -> Cost:
        """Of a program, piece or body where each node is a kernel of its own, in regions as well."""
        if gm not in self._flat:
            self._flat[gm] = total(
                self.parts(body_of(node)) if node.target is invoke_subgraph else self.node(node)
                for node in gm.graph.nodes
                if node.op == "call_function"
            )
        return self._flat[gm]

    def node(self, node: Node) -> Cost:
        """Of one node: a region counts as one kernel, another subgraph as what it does."""
        if node not in self._nodes:
            if node.target is not invoke_subgraph:
                self._nodes[node] = _operator(node)
            else:
                self._nodes[node] = self._region(node) if is_region(node) else self.program(body_of(node))
        return self._nodes[node]

    def _region(self, call: Node) -> Cost:
        body = body_of(call)
        inside, shares = self.parts(body), decoding(body)
        inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
        read = sympy.Add(*(taken(node) * _share(node, shares) for node in inputs))
        spared = [(1 - share) * (self.node(node).flops or ZERO) for node, share in shares.items() if computes(node)]
        flops = None if inside.flops is None else inside.flops - sympy.Add(*spared)
        return Cost(read, bytes_of(call), flops, 1, inside.unknown)


def decoding(body: GraphModule) -> dict[Node, Expr]:
    """Operands and nodes that make the weights of grouped products and nothing else, an expert's apart from the
    others': the share of them that rows need, of whom each meets one expert."""
    found: dict[Node, Expr] = {}
    for node in reversed(body.graph.nodes):
        value = fake(node)
        if value is None or not value.ndim or not node.users:
            continue
        shares = {found.get(user) if user.target is not aten._grouped_mm.default else _needed(user, node)
                  for user in node.users}  # fmt: skip
        share = shares.pop()
        if share is not None and not shares and sizes(node)[0] == _experts(node, found):
            found[node] = share
    return found


def _needed(grouped: Node, weights: Node) -> Expr | None:
    """Of a grouped product that reads `weights` as such."""
    if grouped.args[1] is not weights or weights in (grouped.args[0], *grouped.args[2:]) or len(sizes(weights)) != 3:
        return None
    return sympy.Min(sizes(weights)[0], sizes(cast("Node", grouped.args[0]))[0]) / sizes(weights)[0]


def _experts(node: Node, found: dict[Node, Expr]) -> Expr:
    """How many the products have that `node` is for."""
    user = next(iter(node.users))
    while user in found:
        user = next(iter(user.users))
    return sizes(cast("Node", user.args[1]))[0]


def _share(operand: Node, shares: dict[Node, Expr]) -> Expr:
    """What is read whole, to be decoded, counts by its share."""
    return shares.get(operand, sympy.Integer(1)) if taken(operand) == bytes_of(operand) else sympy.Integer(1)


def bytes_of(node: Node) -> Expr:
    """Of the tensor, or tensors, that `node` stands for; what a broadcast repeats counts once."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sympy.Add(*(_bytes(each) for each in values if isinstance(each, Tensor)))


def _bytes(value: Tensor) -> Expr:
    strides = zip(value.shape, value.stride(), strict=True)
    apart = [size for size, stride in strides if not isinstance(stride, int) or stride]
    return product(tuple(map(expression, apart))) * value.dtype.itemsize


def taken(operand: Node) -> Expr:
    """Bytes that a kernel of all readers of `operand` reads of it: all, unless each takes only some."""
    parts, stack = list[Expr](), [operand]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op != "call_function":
                continue
            if user.target is invoke_subgraph:
                inputs = [each for each in body_of(user).graph.nodes if each.op == "placeholder"]
                parts += [taken(each) for each, arg in zip(inputs, user.args[2:], strict=True) if arg is node]
            elif not computes(user) and node in viewed_args(user):
                stack.append(user)
            elif computes(user):
                parts.append(reads(user).get(node, ZERO))
    whole = bytes_of(operand)
    return whole if whole in parts else sympy.Min(whole, sympy.Add(*parts))


def reads(node: Node) -> dict[Node, Expr]:
    """Bytes that an operator reads of each tensor it is given."""
    found = {arg: bytes_of(arg) for arg in node.all_input_nodes if fake(arg) is not None}
    if node.target in GATHERS:
        source = cast("Node", node.args[GATHERS[node.target]])
        found[source] = bytes_of(node)
    elif node.target is aten._grouped_mm.default:
        x, weights = cast("tuple[Node, Node]", node.args[:2])
        if len(sizes(weights)) == 3:
            experts, rows = sizes(weights)[0], sizes(x)[0]
            found[weights] = bytes_of(weights) / experts * sympy.Min(experts, rows)
    else:
        for arg in written_args(node):
            found[arg] = ZERO
    return found


def _operator(node: Node) -> Cost:
    if not computes(node):
        return NOTHING
    written = bytes_of(node)
    if node.target in PUTS:
        written = bytes_of(cast("Node", node.args[2]))
    flops = flops_of(node)
    return Cost(sympy.Add(*reads(node).values()), written, flops, 1, () if flops is not None else (str(node.target),))


def flops_of(node: Node) -> Expr | None:
    """None where nobody knows."""
    if node.target is aten._grouped_mm.default:  # torch has no formula: a row meets one expert's weights
        x, weights = cast("tuple[Node, Node]", node.args[:2])
        return 2 * product(sizes(x)) * sizes(weights)[-1]
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        args = map_aggregate(node.args, lambda arg: sizes(arg) if isinstance(arg, Node) else arg)
        return sympy.sympify(formula(*cast("Sequence[object]", args), out_val=sizes(node)))
    if node.target in MOVES:
        return ZERO
    if node.target in REDUCTIONS:
        return product(sizes(cast("Node", node.args[0])))
    if node.target is prims.convert_element_type.default or _is_pointwise(node):
        return product(sizes(node))
    return None


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
