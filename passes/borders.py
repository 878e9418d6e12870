"""borders: which nodes make a piece together, and why each piece begins where it does.

    embed  | rotate        | scores over the context | attend, experts | [boundary] | project ...
    even   | even          | ragged                  | even            | region     | even
    one piece              | a piece                 | a piece         | a piece    | a piece

A *region* of a cut kind is a piece, so that equal ones share a kernel. A *host* node cannot be in a CUDA graph. Work
whose only size is `along` ("rows"), or that of rows which late layers keep ("last 128"), is *even*: its pieces can be
captured once for each bucket of that size, and hold one of them. Work with any other size is *ragged*, and so is what
takes rows to keep; it lies apart from even work.

Writes, collectives, random numbers and whatever reads written memory keep their order. Ragged nodes that only compute,
and views, may come later than they stood: they wait for the next piece of their kind, or for who reads them. So a few
of them among even nodes make no piece.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41.passes.analysis.capturable import Obstacles
from v41.passes.analysis.effects import (
    ASSERTS,
    bases,
    begins_collective,
    effect_of,
    ends_collective,
    viewed_args,
    written_args,
)
from v41.passes.analysis.sizes import NodeSizes
from v41.regions import body_of, cuts, invoke_subgraph, is_region, region_of

FEW = 8  # so many nodes cost no more than what a captured piece adds: a launch, and copies at both of its borders
CHECKS = "checks of sizes"
KEPT = "last "  # sizes of rows that late layers keep begin so


class Kind(Enum):
    REGION, HOST, RAGGED, EVEN = "region", "host", "ragged", "even"


@dataclass
class Draft:
    """A piece in the making: why it begins, its own nodes, those with its copies of shared ones, what it reads."""

    border: str
    kind: Kind
    own: list[Node]
    nodes: list[Node] = field(default_factory=list)
    reads: list[Node] = field(default_factory=list)
    size: str | None = None  # of even work: the one it depends on, None for none


@dataclass(frozen=True)
class Judge:
    """What a node is, told from the node alone. `names`: symbol of the inputs -> what it is called."""

    cut_at: Collection[str]
    along: Collection[str]
    names: dict[str, str]
    sizes: NodeSizes
    obstacles: Obstacles
    written: frozenset[Node]  # the ends of views that something writes through

    def kind(self, node: Node) -> Kind:
        if is_region(node) and cuts(region_of(node), self.cut_at):
            return Kind.REGION
        if self.obstacle(node):
            return Kind.HOST
        checks_sizes = bool(self.along) and node.target in ASSERTS and self.idle(node)  # on the host, every step
        return Kind.RAGGED if checks_sizes or self.others(node) else Kind.EVEN

    def obstacle(self, node: Node) -> str | None:
        """Why no piece with `node` can be captured."""
        made_inside = next((s for s in self.sizes.worked_with(node) if s not in self.names), None)
        return self.obstacles.of(node) or (made_inside and f"it works with {made_inside}, a size made on the way")

    def others(self, node: Node) -> dict[str, None]:
        """Names of the sizes of `node` besides one of `along`; none where the program has no such size."""
        named = dict.fromkeys(self.names.get(symbol, symbol) for symbol in self.sizes.worked_with(node))
        if not self.along or (len(named) == 1 and named.keys() <= set(self.along)):
            return {}
        foreign = {name: None for name in named if name not in self.along}
        return foreign or (named if len(named) > 1 else {})

    def size(self, node: Node) -> str | None:
        """Which of `along` a node works with."""
        named = (self.names.get(symbol, symbol) for symbol in self.sizes.worked_with(node))
        return next((name for name in named if name in self.along), None)

    def idle(self, node: Node) -> bool:
        """Whether it computes nothing: a view, a check of sizes, a constant."""
        if node.target in ASSERTS:
            return not any(isinstance(arg.meta.get("val"), Tensor) for arg in node.all_input_nodes)
        if effect_of(node) or node.target is invoke_subgraph:
            return False
        return bool(viewed_args(node)) or not node.all_input_nodes

    def may_wait(self, node: Node) -> bool:
        """Whether it gives the same a little later."""
        if self.idle(node):
            return True
        return not effect_of(node) and not any(
            base in self.written for arg in node.all_input_nodes for base in bases(arg)
        )


def judge(gm: GraphModule, cut_at: Collection[str], along: str | None, names: dict[str, str]) -> Judge:
    sizes = NodeSizes()
    devices = [node.meta["val"].device for node in gm.graph.nodes
               if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)]  # fmt: skip
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    written = frozenset(base for node in gm.graph.nodes for arg in written_args(node) for base in bases(arg))
    known = {name for name in names.values() if name == along or name.startswith(KEPT)}
    known = known if along in known else set()
    return Judge(cut_at, known, names, sizes, Obstacles(device, sizes), written)


class Drafts:
    """The drafts of a program, filled with its nodes one after another."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.drafts: list[Draft] = []
        self._kinds: dict[Node, Kind] = {}
        self._home: dict[Node, Draft | None] = {}  # None: it waits
        self._waiting: dict[Node, None] = {}
        self._begun: set[Node] = set()  # collectives that nobody has waited for yet

    def add(self, node: Node) -> None:
        """`node`, which stands behind all that were added before."""
        source = node.all_input_nodes[0] if node.target is operator.getitem else None
        now = self.drafts[-1].kind if self.drafts else None
        kind, idle = self._kind(node), self.judge.idle(node)
        if source in self._home:  # what takes a call apart goes with the call
            self._put(node, self._home[source])
        elif now and (self._begun or (idle and now in (Kind.RAGGED, Kind.HOST))):
            self.drafts[-1].own += self._take(self._waiting_for(node))
            self._put(node, self.drafts[-1])
        elif now and kind is not now and (idle or (kind is Kind.RAGGED and self.judge.may_wait(node))):
            self._put(node, None)
        else:
            self._settle(node, kind)
            self._put(node, self.drafts[-1])

    def finish(self) -> list[Draft]:
        """The drafts, when all nodes are in."""
        if self._waiting:
            sizes = {size for node in self._waiting if (size := self.judge.size(node))}
            ragged = len(sizes) > 1 or any(self._kind(node) is not Kind.EVEN for node in self._waiting)
            self._begin(Kind.RAGGED if ragged else Kind.EVEN, next(iter(sizes), None))
        before, last = None, None
        for draft in (drafts := self._without_crumbs()):
            draft.border = before = self._border(draft, before, last)
            last = draft
        return drafts

    def _kind(self, node: Node) -> Kind:
        if node not in self._kinds:
            self._kinds[node] = self.judge.kind(node)
        return self._kinds[node]

    def _put(self, node: Node, draft: Draft | None) -> None:
        self._home[node] = draft
        if draft is None:
            self._waiting[node] = None
        else:
            draft.own.append(node)
            draft.size = draft.size or self.judge.size(node)
        if begins_collective(node):
            self._begun.add(node)
        elif ends_collective(node):
            self._begun -= {node.all_input_nodes[0], *node.all_input_nodes[0].all_input_nodes}

    def _settle(self, node: Node, kind: Kind) -> None:
        """Makes the last draft one in which `node` may stand, after what it reads."""
        needed = self._waiting_for(node)
        if kind is not Kind.RAGGED and any(self._kind(each) is not Kind.EVEN for each in needed):
            self._begin(Kind.RAGGED)
        elif needed and kind in (Kind.REGION, Kind.HOST):
            self._begin(Kind.EVEN, self.judge.size(needed[-1]))
        size, last = self.judge.size(node), self.drafts[-1] if self.drafts else None
        apart = kind is Kind.EVEN and last is not None and None not in (size, last.size) and size != last.size
        if last is None or last.kind is not kind or kind is Kind.REGION or apart:
            self._begin(kind, size)

    def _begin(self, kind: Kind, size: str | None = None) -> None:
        """A new draft, which takes in those that waited for one of its kind, and of its size."""
        draft = Draft("", kind, [], size=size)
        self.drafts.append(draft)
        if kind is Kind.RAGGED:
            draft.own += self._take(list(self._waiting))
        elif kind is Kind.EVEN:
            for each in list(self._waiting):
                fits = self.judge.size(each) in (None, size) or size is None
                if fits and self._kind(each) is Kind.EVEN and not self._waiting_for(each):
                    draft.own += self._take([each])
                    draft.size = size = size or self.judge.size(each)

    def _take(self, nodes: list[Node]) -> list[Node]:
        """`nodes`, which wait no longer: they stand in the last draft."""
        for node in nodes:
            self._home[node] = self.drafts[-1]
            del self._waiting[node]
        return nodes

    def _waiting_for(self, node: Node) -> list[Node]:
        """Those that wait and that `node` rests on, in graph order."""
        found, stack = set[Node](), list(node.all_input_nodes) if self._waiting else []
        while stack:
            arg = stack.pop()
            if arg not in found and arg in self._waiting:
                found.add(arg)
                stack += arg.all_input_nodes
        return [each for each in self._waiting if each in found] if found else []

    def _without_crumbs(self) -> list[Draft]:
        """The drafts, with a few even nodes next to ragged ones joined to them."""
        around = zip([None, *self.drafts][:-1], self.drafts, [*self.drafts, None][1:], strict=True)
        kinds = [
            Kind.RAGGED
            if draft.kind is Kind.EVEN
            and any(beside is not None and beside.kind is Kind.RAGGED for beside in (before, after))
            and sum(map(self._work, draft.own)) < FEW
            else draft.kind
            for before, draft, after in around
        ]
        sizes = [draft.size if kind is Kind.EVEN else None for draft, kind in zip(self.drafts, kinds, strict=True)]
        alone = [
            (kind, i if kind is Kind.REGION else 0, size)
            for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        ]
        runs = groupby(zip(self.drafts, alone, strict=True), key=itemgetter(1))
        return [
            Draft("", kind, [node for draft, _ in run for node in draft.own], size=size)
            for (kind, _, size), run in runs
        ]

    def _border(self, draft: Draft, before: str | None, last: Draft | None) -> str:
        """Why `draft` begins, `before` being why the one in front of it, `last`, did."""
        match draft.kind:
            case Kind.REGION:
                return f"region {next(region_of(node).kind for node in draft.own if is_region(node))}"
            case Kind.HOST:
                return f"not capturable: {next(filter(None, map(self.judge.obstacle, draft.own)))}"
            case Kind.RAGGED:
                names = ", ".join({name: None for node in draft.own for name in self.judge.others(node)})
                return f"use of {names}" if names else CHECKS
        if last is not None and last.kind is Kind.EVEN:
            return f"end of {last.size}"
        return f"end of {before.partition(':')[0]}" if before else "start of the graph"

    def _work(self, node: Node) -> int:
        """How many nodes compute when `node` does."""
        if node.target is invoke_subgraph:
            return len(body_of(node).graph.nodes)
        return int(node.target is not operator.getitem and not self.judge.idle(node))
