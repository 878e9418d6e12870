"""effects: what a node does besides computing: which arguments it writes, whose memory its result may share.

Read from the operators' own schemas, through regions and other subgraph calls. What is unknown counts as aliased, and
never as pure: a higher-order operator that is not listed here may return any of its tensor arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import cache
from typing import cast

import torch
from torch.fx import GraphModule, Node

from v41._compat import HigherOrderOperator, OpOverload
from v41.regions import body_of, invoke_subgraph

# Their schemas promise a fresh result, their kernels return a view.
VIEWS_IN_DISGUISE = (torch.ops.aten._unsafe_view.default,)
COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "symm_mem", "_dtensor")
ASSERTS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)


def written_args(node: Node) -> list[Node]:
    """The tensor arguments that `node` writes in place."""
    if node.op != "call_function":
        return []
    if node.target is invoke_subgraph:
        inner = [n for n in body_of(node).graph.nodes if n.op == "placeholder"]
        written = written_inputs(body_of(node))
        return [
            arg for arg, name in zip(node.args[2:], inner, strict=True) if name in written and isinstance(arg, Node)
        ]
    return list(_schema_args(node, writes=True))


def viewed_args(node: Node) -> list[Node]:
    """The arguments whose memory `node`'s result may be (a part of)."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem or node.target in VIEWS_IN_DISGUISE:
        return node.all_input_nodes[:1]
    if node.target is invoke_subgraph:
        body = body_of(node)
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        results = body.graph.output_node().all_input_nodes
        escaping = {base for result in results for base in bases(result)}
        return [
            arg for arg, name in zip(node.args[2:], inner, strict=True) if name in escaping and isinstance(arg, Node)
        ]
    if isinstance(node.target, HigherOrderOperator):
        return [] if node.target.name().startswith("auto_functionalized") else node.all_input_nodes
    return list(_schema_args(node, writes=False))


Ends = dict[GraphModule, list[set[Node]]]  # body -> the bases of each of its results


def _result_of(item: Node, known: Ends) -> list[Node]:
    """Whose memory one result of several may be: none's where the call makes each in memory of its own; the call itself
    stands for memory that several of its results may share."""
    call, index = cast("tuple[Node, int]", item.args)
    if call.target is invoke_subgraph:
        body = body_of(call)
        if body not in known:
            (results,) = body.graph.output_node().args
            known[body] = [set(bases(each, known)) if isinstance(each, Node) else set()
                           for each in results]  # type: ignore[union-attr]  # fmt: skip
        mine = known[body][index]
        if any(mine & other for at, other in enumerate(known[body]) if at != index):
            return [call]
        if not mine:
            return []
        inner = body.graph.find_nodes(op="placeholder")
        return [arg for arg, name in zip(call.args[2:], inner, strict=True) if name in mine and isinstance(arg, Node)]
    fresh = isinstance(call.target, OpOverload) and not viewed_args(call)
    return [] if fresh else [call]


def bases(node: Node, known: Ends | None = None) -> list[Node]:
    """The nodes at the far end of `node`'s views: itself where it makes memory of its own. known: what calls for other
    nodes found of bodies, while none of them changes."""
    known = {} if known is None else known
    seen: dict[Node, None] = {}
    ends, stack = [], [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen[current] = None
        if current.op == "call_function" and current.target is operator.getitem:
            viewed = _result_of(current, known)
        else:
            viewed = viewed_args(current)
        stack.extend(viewed)
        if not viewed:
            ends.append(current)
    return ends


def written_inputs(gm: GraphModule) -> dict[Node, None]:
    """Placeholders of `gm` that some node writes, directly or through a view, in order of the first write."""
    return {
        base: None
        for node in gm.graph.nodes
        for arg in written_args(node)
        for base in bases(arg)
        if base.op == "placeholder"
    }


def effect_of(node: Node) -> str | None:
    """ "writes", "collective", "random" or "asserts"; None for a node that only computes.

    A subgraph call has the effect of a collective, or else of a draw, where its body holds one.
    """
    if node.op != "call_function":
        return None
    if written_args(node):
        return "writes"
    if node.target is invoke_subgraph:
        inside = {effect_of(inner) for inner in body_of(node).graph.nodes}
        return next((effect for effect in ("collective", "random") if effect in inside), None)
    if node.target in ASSERTS:
        return "asserts"
    if isinstance(node.target, OpOverload):
        if node.target.namespace in COLLECTIVES:
            return "collective"
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return "random"
    return None


def effects_of(nodes: Iterable[Node]) -> dict[Node, str | None]:
    """The effect of each. A body that several calls share is looked into once."""
    of_bodies: dict[GraphModule, str | None] = {}
    found: dict[Node, str | None] = {}
    for node in nodes:
        if node.target is invoke_subgraph:
            body = body_of(node)
            if body not in of_bodies:
                of_bodies[body] = effect_of(node)
            found[node] = of_bodies[body]
        else:
            found[node] = effect_of(node)
    return found


def begins_collective(node: Node) -> bool:
    """Whether what `node` returns is complete only once it was waited for."""
    asynchronous = isinstance(node.target, OpOverload) and node.target.namespace.endswith("c10d_functional")
    return asynchronous and not ends_collective(node)


def ends_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._opname == "wait_tensor"


def _schema_args(node: Node, *, writes: bool) -> Iterator[Node]:
    """Arguments that the schema marks as written, or (writes=False) as shared with a result."""
    for position, name in _marked(node.target, writes) if isinstance(node.target, OpOverload) else ():
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        yield from (
            item for item in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(item, Node)
        )


@cache
def _marked(op: OpOverload, writes: bool) -> tuple[tuple[int, str], ...]:
    """Position and name of those arguments."""
    shared = {
        name for result in op._schema.returns if result.alias_info is not None for name in result.alias_info.before_set
    }
    infos = ((i, argument.name, argument.alias_info) for i, argument in enumerate(op._schema.arguments))
    return tuple(
        (i, name)
        for i, name, info in infos
        if info is not None and (info.is_write if writes else info.before_set & shared or "*" in info.after_set)
    )
