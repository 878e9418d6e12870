"""likeness: where a program comes nearest to a site that a pass did not even find, by the order of its operators alone.

    shape    mm, add, sigmoid, mul, topk, gather, sum, div      of a site that the pass finds elsewhere (shapes.json)
    program  ..., mm, add, softmax, mul, topk, gather, div, ...
    nearest  6 of 8 operators of a site, from mm_3 to div_9: where sigmoid would be there is softmax; sum is missing

A guess: a pass reads data flow, shapes and values, and this only the names of operators, in the order of the program.
Shapes are those of the plain model, kept by `shapes_of` from runs of it, as on a GPU and as on a CPU.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from v41.passes.changes import operator_of
from v41.tools.identity import CALL
from v41.tools.nodes import NodeFacts
from v41.tools.run import Run

FILE = Path(__file__).with_name("shapes.json")
LISTED = 3  # differences that are told
WORTH = 0.5  # share below which nothing is a near miss
FEWEST = 4  # operators below which a likeness says nothing
VIEWS = ("aten.view.default", "aten.reshape.default", "aten.permute.default", "aten.expand.default", "getitem",
         "aten.slice.Tensor", "aten.unsqueeze.default", "aten.select.int", "aten.squeeze.dim")  # fmt: skip

Shape = tuple[str, ...]


@dataclass(frozen=True)
class NearMiss:
    """`found` of the operators of a shape lie, in order, from node `first` to node `last`."""

    shape: Shape
    found: int
    first: NodeFacts
    last: NodeFacts
    length: int  # operators from `first` to `last`, others among them included
    differences: tuple[str, ...]  # "sum is missing"

    @property
    def share(self) -> float:
        """1 where the operators are those of the shape and no others."""
        return self.found / max(len(self.shape), self.length)

    def __str__(self) -> str:
        told = f"{self.found} of {len(self.shape)} operators of a site, from {self.first.name} to {self.last.name}"
        more = f", and {len(self.differences) - LISTED} more" if len(self.differences) > LISTED else ""
        return f"{told}: {'; '.join(self.differences[:LISTED]) or 'no other'}{more}"


def shapes_of(run: Run) -> dict[str, list[Shape]]:
    """Pass -> the different bodies of its regions, as operators in order; from a run in which it applies, with changes
    kept: then a region is known also where the body that it was found in was opened."""
    bodies: dict[str, list[NodeFacts]] = {}
    for node in run.nodes:
        bodies.setdefault(node.body, []).append(node)
    of_call = {(node.origin[1], node.region): called[1] for node in run.nodes
               if (called := CALL.match(node.text)) and node.attrs is not None}  # fmt: skip
    found: dict[str, dict[Shape, None]] = {}
    for each in run.report.passes:
        for decision in each.decisions:
            name = decision.region.name if decision.region is not None else None
            body = bodies.get(of_call.get((decision.node, name), "no body"), [])
            if decision.applied and body:
                found.setdefault(each.name, {})[tuple(operator for operator, _ in operators(body))] = None
    return {name: list(shapes) for name, shapes in found.items()}


def known_shapes() -> dict[str, list[Shape]]:
    """What `shapes_of` found of the plain model."""
    return {name: [tuple(shape) for shape in shapes] for name, shapes in json.loads(FILE.read_text()).items()}


def nearest_miss(name: str, nodes: Sequence[NodeFacts]) -> NearMiss | None:
    """The place among `nodes` that is most like a site of pass `name`; None where none is half like one."""
    best: NearMiss | None = None
    for body in _bodies(nodes):
        stream = list(operators(body))
        for shape in known_shapes().get(name, []):
            if len(shape) < FEWEST:
                continue
            for near in _near(shape, stream):
                if near.share >= WORTH and (best is None or near.share > best.share):
                    best = near
    return best


def operators(body: Sequence[NodeFacts]) -> Iterator[tuple[str, NodeFacts]]:
    """What the nodes call, views left out: these differ with the spelling."""
    for node in body:
        name = operator_of(node.text).strip()
        if name.startswith(("region ", "subgraph ")):
            kind, _, called = name.partition(" ")
            name = re.sub(r"_\d+(~\d+)?$", "", f"{kind} {called.rpartition('/')[2]}")
        if name not in VIEWS:
            yield name, node


def _bodies(nodes: Sequence[NodeFacts]) -> list[list[NodeFacts]]:
    """The program and its bodies apart, but for regions: these are sites already."""
    found: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        if node.region is None or node.text.startswith("region "):
            found.setdefault(node.body, []).append(node)
    return list(found.values())


def _near(shape: Shape, stream: list[tuple[str, NodeFacts]]) -> Iterator[NearMiss]:
    """Around each place of the operator of `shape` that is rarest there, what matches in order."""
    names = [name for name, _ in stream]
    counted = Counter(names)
    present = [(counted[name], at) for at, name in enumerate(shape) if counted[name]]
    if not present:
        return
    _, at = min(present)
    for place in (i for i, name in enumerate(names) if name == shape[at]):
        start = max(place - 2 * at - 4, 0)
        stop = place + 2 * (len(shape) - at) + 4
        window = names[start:stop]
        matcher = SequenceMatcher(None, shape, window, autojunk=False)
        blocks = [block for block in matcher.get_matching_blocks() if block.size]
        if blocks:
            first, last = stream[start + blocks[0].b][1], stream[start + blocks[-1].b + blocks[-1].size - 1][1]
            inner = window[blocks[0].b : blocks[-1].b + blocks[-1].size]
            found = sum(block.size for block in blocks)
            yield NearMiss(shape, found, first, last, len(inner), tuple(_differences(shape, inner)))


def _differences(shape: Sequence[str], window: Sequence[str]) -> Iterator[str]:
    for kind, i, j, k, n in SequenceMatcher(None, shape, window, autojunk=False).get_opcodes():
        wanted, there = ", ".join(map(short, shape[i:j])), ", ".join(map(short, window[k:n]))
        if kind == "replace":
            yield f"where {wanted} would be there is {there}"
        elif kind == "delete":
            yield f"{wanted} is missing"
        elif kind == "insert":
            yield f"{there} lies in between"


def short(operator: str) -> str:
    """ "aten.sum.dim_IntList" as one says it."""
    return operator.split(".")[1] if operator.count(".") else operator
