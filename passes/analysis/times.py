"""times: how long work takes at so many rows, predicted from what it moves and how deep it is; a measurement is better.

    launches x 2.5 µs  +  reductions in a row x 0.1 µs  +  products in a kernel x 2 µs  +  bytes / bandwidth

A region is one kernel, whose reductions and products wait for each other; elsewhere each is a kernel of its own, and
all elementwise nodes together are one, that moves what comes in and what goes out. Sizes other than rows count as 1, so
a time is rather short: work that is to hide behind it has room. The machine's figures are those of an H200 inside a
CUDA graph (design targets, measured), whichever GPU is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node

from v41._compat import OpOverload
from v41.gpu_facts import KNOWN
from v41.passes.analysis.algebra import ONE, Expr
from v41.passes.analysis.cost import REDUCTIONS, Costs, bytes_of
from v41.passes.analysis.counts import computes
from v41.passes.analysis.effects import viewed_args
from v41.plan import Piece
from v41.regions import body_of, invoke_subgraph, is_region

LIKE_ROWS = ("rows", "requests", "logits")  # in a step that decodes: one of each a row
ROWS = sympy.Symbol("rows", integer=True, positive=True)
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default})


@dataclass(frozen=True)
class Machine:
    name: str = "H200"
    multiprocessors: int = KNOWN["sm_90"].multiprocessors
    bytes_us: float = 4.2e6  # what a copy moves in a µs
    launch_us: float = 2.5  # from the end of one kernel to that of a next one that does nothing
    stage_us: float = 0.1  # a reduction over a row that waits for another in its kernel
    product_us: float = 2.0  # sums of a product that several programs share
    join_us: float = 3.0  # what a kernel that waits for two others begins later: a launch, and a little


@dataclass(frozen=True)
class Work:
    """What some nodes do, one after another."""

    fixed_us: float  # however many rows there are
    moved: Callable[[int], float]  # rows -> bytes
    machine: Machine
    formula: str = "0"  # of these bytes, over `rows`: what a file can hold

    def us(self, rows: int) -> float:
        return self.fixed_us + self.moved(rows) / self.machine.bytes_us


class Times:
    """Of one program. sizes: symbol -> its name."""

    def __init__(self, sizes: Mapping[str, str], machine: Machine | None = None) -> None:
        self.sizes, self.machine = sizes, machine or Machine()
        self._costs = Costs()
        self._depth: dict[GraphModule, float] = {}
        self._pieces: dict[str, Work] = {}

    def piece(self, piece: Piece) -> Work:
        """Of a whole piece; pieces with one key take the same time."""
        if piece.key not in self._pieces:
            self._pieces[piece.key] = self.work(piece.body.graph.nodes)
        return self._pieces[piece.key]

    def work(self, nodes: Iterable[Node]) -> Work:
        machine = self.machine
        kernels, deep, elementwise = 0, 0.0, False
        leaves = list(self._leaves(nodes))
        for node in leaves:
            if is_region(node):
                kernels, deep = kernels + 1, deep + self._inside(body_of(node))
            elif is_elementwise(node):
                elementwise = True
            else:
                kernels += 1
        fixed = (kernels + elementwise) * machine.launch_us + deep
        amount = self._over_rows(sympy.Add(*self._moved(leaves)))
        moved = sympy.lambdify([ROWS], amount, modules=["math", {"Min": min, "Max": max}])
        return Work(fixed, moved, machine, str(amount))

    def _moved(self, leaves: list[Node]) -> Iterator[Expr]:
        """Bytes of each kernel: of elementwise nodes, what they take from others and others from them."""
        fused = {node for node in leaves if is_elementwise(node)}
        yield from (self._costs.node(node).moved for node in leaves if node not in fused)
        taken = dict.fromkeys(arg for node in fused for arg in map(base_of, node.all_input_nodes) if arg not in fused)
        yield from map(bytes_of, taken)
        yield from (bytes_of(node) for node in fused if not fused.issuperset(node.users))

    def _leaves(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Regions and nodes that compute, those of bodies that layers share too."""
        for node in nodes:
            if node.target is invoke_subgraph and not is_region(node):
                yield from self._leaves(body_of(node).graph.nodes)
            elif node.op == "call_function" and (is_region(node) or computes(node)):
                yield node

    def _inside(self, body: GraphModule) -> float:
        """µs by which the kernel of a region is deeper than one that does nothing."""
        if body not in self._depth:
            machine = self.machine
            self._depth[body] = sum(
                self._inside(body_of(node)) if node.target is invoke_subgraph
                else machine.product_us if node.target in PRODUCTS
                else machine.stage_us if node.target in REDUCTIONS
                else 0.0
                for node in body.graph.nodes
            )  # fmt: skip
        return self._depth[body]

    def _over_rows(self, amount: Expr) -> Expr:
        likely = {symbol: ROWS if self.sizes.get(str(symbol)) in LIKE_ROWS else ONE for symbol in amount.free_symbols}
        return amount.subs(likely)


def base_of(node: Node) -> Node:
    """The node that `node` is a view of, or itself."""
    while node.op == "call_function" and not computes(node) and (viewed := viewed_args(node)):
        node = viewed[0]
    return node


def is_elementwise(node: Node) -> bool:
    """Whether it runs in one kernel with its neighbours."""
    cast = node.target is torch.ops.prims.convert_element_type.default
    return cast or (isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags)
