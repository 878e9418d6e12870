"""side_work: the parts of a plan's pieces that have slack: read late, or ready early. Found here, not judged.

    late     piece_4: X, y, ... -> X', x, [pre', post', comb']     the next piece reads x; the coefficients nobody reads
                                                                   before piece_6 does
    early    piece_7: X, [ids -> rows of the table -> kv] -> X'    ids are there since piece_1

A late cone is what only late results of a piece need, an early one what hangs on early values alone; it may be all of
the piece. What writes, communicates, draws numbers or reads what the program writes keeps its place, and with it all
that it needs. A region that does both kinds of work is
opened; where its kind is in PARTS, each half becomes a region again, so that each gets a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from v41._compat import lazy_graph_module
from v41.passes.analysis.counts import computes
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.plan_facts import START_AT, PlanFacts
from v41.passes.partition import copied_nodes
from v41.plan import Piece, Plan
from v41.regions import inline, invoke_subgraph, is_region, outline, region_of

PARTS = {"mhc_boundary": ("mhc_critical", "mhc_coefficients")}  # kind of a region -> those of its halves
HALVES = tuple(half for halves in PARTS.values() for half in halves)
CONES = ("critical", "coefficients")  # attributes that say which outputs of a region belong to which half


@dataclass(frozen=True)
class Cone:
    """Side work of the piece at position `at`: it may begin behind position `ready`, and position `reader` needs it."""

    at: int
    piece: Piece
    kind: str  # "late" or "early"
    ready: int
    reader: int
    body: GraphModule  # the piece's, opened
    nodes: list[Node]  # of the cone, in order
    rest: list[Node] = field(repr=False)  # the others; none where the whole piece has slack

    @cached_property
    def anchor(self) -> Node:
        """The last node that computes, which names the cone."""
        return next(node for node in reversed(self.nodes) if _works(node))


def find_cones(facts: PlanFacts) -> list[Cone]:
    """Of each piece its late cone, else its early ones, the latest first; in order of the pieces."""
    finder = Finder(facts)
    found: list[Cone] = []
    for at, piece in facts.bodies():
        late = finder.late(at, piece)
        found += [late] if late else finder.early(at, piece)
    return found


class Finder:
    """Looks for cones in the pieces of one plan."""

    def __init__(self, facts: PlanFacts) -> None:
        self.facts = facts
        self.written = {facts.memory[name] for piece in facts.plan.pieces for name in piece.writes}
        self.first: dict[str, int] = {}  # value -> position of its first reader
        for name, at in reversed(facts.readings):
            self.first[name] = at
        self._opened: dict[object, tuple[GraphModule, set[Node]]] = {}  # equal pieces are opened once

    def late(self, at: int, piece: Piece) -> Cone | None:
        """What only results that the next piece does not read need."""
        first = {name: self.first.get(name, at) for name in piece.returns}
        soon = tuple(i for i, name in enumerate(piece.returns) if first[name] == at + 1)
        if len(soon) == len(first):
            return None
        touched = tuple(i for i, name in enumerate(piece.reads) if self.facts.memory[name] in self.written)
        alike = (piece.key, piece.sizes, soon, touched)
        if alike not in self._opened:
            self._opened[alike] = opened(piece.body, soon, touched)
        body, needed = self._opened[alike]
        copied = copied_nodes(body)
        alive = _alive(body)
        own = [node for node in body.graph.nodes if node in alive and _moves(node, copied)]
        nodes = [node for node in own if node not in needed]
        if not any(map(_works, nodes)):
            return None
        cone, results = set(nodes), results_of(body)
        reader = min(first[name] for name, node in zip(piece.returns, results, strict=True) if node in cone)
        return Cone(at, piece, "late", at, reader, body, nodes, [node for node in own if node in needed])

    def early(self, at: int, piece: Piece) -> list[Cone]:
        """What hangs on values that were there before the piece in front began: a cone for each time to begin."""
        body = piece.body
        ready, moving = self._ready(at, piece)
        copied = copied_nodes(body)
        kept, alive = _ancestors(node for node in body.graph.nodes if effect_of(node)), _alive(body)
        own = [node for node in body.graph.nodes if node in alive and _moves(node, copied)]
        free = [node for node in own if node in moving and node not in kept]
        found = []
        for since in sorted({ready[node] for node in free if _works(node)}, reverse=True):
            if not any(each.returns or each.writes for each in self.facts.plan.pieces[since + 1 : at]):
                continue  # nothing runs in between
            wanted = [node for node in free if ready[node] <= since and _works(node)]
            cone = _ancestors(wanted) | {user for node in wanted for user in node.users if user.target is getitem}
            nodes = [node for node in own if node in cone]
            rest = [node for node in own if node not in cone]
            if not any(map(_works, kept & cone)):
                found.append(Cone(at, piece, "early", since, at, body, nodes, rest))
        return found

    def _ready(self, at: int, piece: Piece) -> tuple[dict[Node, int], set[Node]]:
        """Node -> the position behind which all it needs is there; and those that hang on what changes every step.

        A weight is there from the start. What the program writes is there when the piece begins, no sooner."""
        ready: dict[Node, int] = {}
        moving: set[Node] = set()
        values = dict(zip(piece.body.graph.find_nodes(op="placeholder"), piece.reads, strict=True))
        for node in piece.body.graph.nodes:
            if node in values:
                name = values[node]
                ready[node] = at if self.facts.memory[name] in self.written else self.facts.made[name]
                if ready[node] != START_AT or _changes(node):
                    moving.add(node)
            else:
                ready[node] = max((ready[arg] for arg in node.all_input_nodes), default=START_AT)
                if any(arg in moving for arg in node.all_input_nodes):
                    moving.add(node)
        return ready, moving


def with_early(plan: Plan, kept: Mapping[int, Sequence[Piece]], early: Mapping[int, Sequence[Piece]]) -> list[Piece]:
    """Pieces of `plan` with those of `early` behind the positions they are at, and at each position those that are
    `kept` instead of its own. What is there from the start comes behind checks of sizes."""
    pieces, started = list[Piece](), False
    for at, piece in enumerate(plan.pieces):
        if not started and (piece.returns or piece.writes):
            pieces, started = [*pieces, *early.get(START_AT, ())], True
        pieces += [*kept.get(at, [piece]), *early.get(at, ())]
    return pieces


def results_of(body: GraphModule) -> list[Node]:
    """What a piece returns, in order."""
    return list(body.graph.output_node().args[0])  # type: ignore[arg-type]


def _changes(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)


def opened(body: GraphModule, soon: Sequence[int], touched: Sequence[int]) -> tuple[GraphModule, set[Node]]:
    """A copy of `body` in which no region works both for the results `soon`, or for what keeps its place, and for
    others alone; and the nodes that those need. touched: inputs that the program writes."""
    graph = Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    made = lazy_graph_module(body, graph)
    halves: list[tuple[str, dict[str, Any], set[Node]]] = []
    while (call := _mixed(made, soon, touched)) is not None:
        region = region_of(call) if is_region(call) else None
        before = set(made.graph.nodes)
        inline(made, call)
        if region is not None and region.kind in PARTS:
            halves.append((region.kind, region.attrs, set(made.graph.nodes) - before))
    needed = _needed(made, soon, touched)
    for kind, attrs, nodes in halves:
        for name, half in zip(PARTS[kind], (nodes & needed, nodes - needed), strict=True):
            ordered = [node for node in made.graph.nodes if node in half]
            if any(map(_works, ordered)):
                outline(made, ordered, kind=name, **_told(attrs))
    needed = _needed(made, soon, touched)
    return made, needed | {user for node in needed for user in node.users if user.target is getitem}


def _told(attrs: dict[str, Any]) -> dict[str, Any]:
    """What a region says of itself that is true of its halves too: not who its operands and results are."""
    return {name: value for name, value in attrs.items() if name not in ("operands", "outputs", *CONES)}


def _mixed(body: GraphModule, soon: Sequence[int], touched: Sequence[int]) -> Node | None:
    """The first subgraph call with results that are needed so, and others that are not."""
    needed = _needed(body, soon, touched)
    for node in body.graph.nodes:
        if node.target is invoke_subgraph and not effect_of(node):
            results = [user for user in node.users if user.target is getitem]
            if node in needed and not needed.issuperset(results):
                return node
    return None


def _needed(body: GraphModule, soon: Sequence[int], touched: Sequence[int]) -> set[Node]:
    """Nodes that the results `soon` need, or what keeps its place."""
    results, inputs = results_of(body), body.graph.find_nodes(op="placeholder")
    after = {inputs[i] for i in touched}
    for node in body.graph.nodes:
        if any(arg in after for arg in node.all_input_nodes):
            after.add(node)
    fixed = [node for node in body.graph.nodes if effect_of(node) or (node in after and node.op == "call_function")]
    return _ancestors([*(results[i] for i in soon), *fixed])


def _alive(body: GraphModule) -> set[Node]:
    """Nodes that somebody needs: a piece may hold others, and nothing is to run for them."""
    return _ancestors([*results_of(body), *(node for node in body.graph.nodes if effect_of(node))])


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """`nodes` and all they rest on."""
    found, stack = set[Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _moves(node: Node, copied: dict[Node, None]) -> bool:
    return node.op == "call_function" and node not in copied


def _works(node: Node) -> bool:
    """Whether a kernel runs for it."""
    return node.op == "call_function" and (node.target is invoke_subgraph or computes(node))
