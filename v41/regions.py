"""Regions: a convex ATen subgraph moved into a submodule that keeps it as body, with a kind and attributes.

    before   a -> n1 -> n2 -> b
    after    a -> invoke_subgraph(region_0, "kind:0", a...) -> getitem -> b        region_0: a -> n1 -> n2

The carrier is torch.ops.higher_order.invoke_subgraph, so running the body is the meaning, the fallback and the oracle
of a kernel, and Inductor inlines it unasked. Outlining moves nodes, in order, and rewrites none: it changes no value.

One kind may hold a collective, `REDUCED`: what ranks add up, with what reads the sum.

    body    part, ... -> all_reduce(part, "sum", group) -> wait_tensor -> casts, views, sums with others -> a nested
            region (an mHC boundary, post map or exit, or a norm with its tail) -> its outputs, values on the way;
            after take_in_combine the part may be made in front: rows, places, ... -> part
    attrs   form        of what reads the sum: "seam", "post", "exit", "norm" (and "after_engram" ... as mHC names them)
            group       name of the process group; ranks: how many it has; reduce_op: "sum"
            dtype       of what goes over the wire, torch's name: "bfloat16"
            part        which operand is this rank's part, None where the body makes it; nothing else there reads it
            operands    a role each: "part", "residual" (what is added on the way), and those of the nested region; in
                        front "rows" of experts, each of them one "places" names by a number from 0 on, and "term"
            outputs     a role each: "reduced" (the sum, up to views and casts), "sum" (the sum with others added), and
                        those of the nested region
            reduced     which outputs are "reduced": there is one only where others read the sum, too
            neighbour   kind of the nested region; its attributes are its own: region_of(neighbour_of(body))
            critical    which outputs the next sublayer waits for; coefficients: those that may come later
            producer    what makes the part where nobody else reads it, so that it may be written to where peers read
                        it: "product" (a GEMM whose terms ranks share), "combine" (experts' outputs and the shared
                        expert added up), or None

All is read from the graph, so all ranks of a group have the same regions in the same order; what a kernel decides must
follow from the body and from sizes alone. A lowering takes the body apart with `behind_sum`. Where none takes the
region, it is inlined again: the collective runs as it is, and the nested region is lowered as everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from v41._compat import lazy_graph_module

META = "v41_region"  # the key of a body's GraphModule.meta under which its Region lies, and of meta of what was in one
REDUCED = "all_reduce_boundary"
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


@dataclass(frozen=True)
class Region:
    """`kind` names the matched structure, `attrs` the facts read from the graph that a kernel generator may use."""

    kind: str
    attrs: dict[str, Any]

    @property
    def name(self) -> str:
        """Kind and form, or the kind alone where it says the form already."""
        form = self.attrs.get("form")
        return self.kind if form is None or self.kind.endswith(f"_{form}") else f"{self.kind} {form}"


class Measure(Protocol):
    """Times work where it will run."""

    def __call__(self, body: GraphModule, rows: int) -> float | None:
        """µs of a piece with this body at so many rows, alone; None where it cannot be run on its own."""


class Gained(Protocol):
    """Knows what side work gained in whole steps, where it will run."""

    def __call__(self, site: str, rows: int) -> float | None:
        """µs by which a step of so many rows got shorter by the side work of this key; None where nobody measured."""


class NotOutlinable(AssertionError):
    """Our bug: a pass asked for a set of nodes that is not convex, or that effects would have to cross."""


def region_of(call: Node) -> Region:
    """The Region of an invoke_subgraph call node made by `outline`. KeyError for a subgraph call that is no region."""
    return body_of(call).meta[META]


def cuts(region: Region, kinds: Collection[str]) -> bool:
    """Whether `region` is a piece of its own where `kinds` are: not if it is a norm with nothing behind it, which is
    one kernel beside whatever stands there, too."""
    return region.kind in kinds and region.attrs.get("then") != ()


def made_in(node: Node) -> Region | None:
    """The innermost region that `node` was in before it was inlined."""
    return node.meta.get(META)


def body_of(call: Node) -> GraphModule:
    """The GraphModule a subgraph call runs."""
    assert call.graph.owning_module is not None
    body = call.graph.owning_module.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
    assert isinstance(body, GraphModule)
    return body


def is_region(node: Node, kind: str | None = None) -> bool:
    """Whether `node` calls a region (of `kind`, if given)."""
    if node.op != "call_function" or node.target is not invoke_subgraph:
        return False
    region = body_of(node).meta.get(META)
    return region is not None and kind in (None, region.kind)


def regions(gm: GraphModule, kind: str | None = None) -> Iterator[Node]:
    """Region call nodes of `gm` in graph order (not those nested inside other regions)."""
    return (node for node in list(gm.graph.nodes) if is_region(node, kind))


def slice_of(body: GraphModule, outputs: Iterable[int]) -> set[Node]:
    """The nodes of a region's body that these of its outputs need."""
    results = body.graph.output_node().args[0]
    stack = [results[i] for i in outputs]  # type: ignore[index]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def outline(gm: GraphModule, nodes: Iterable[Node], *, kind: str, in_order: Sequence[Node] = (), **attrs: Any) -> Node:
    """Moves `nodes` of `gm` into a region of `kind` and returns the call node.

    `nodes` must be convex (no path leaves and comes back). Inputs are the outside values read, in order of first read;
    outputs the inside values read outside, in graph order. The subgraph references and getitems of a nested region come
    along by themselves. Nodes between the first and last that read the region move behind it, in order; an effect among
    them is refused. in_order: what `members_of` said of `nodes` when `attrs` were read: operands and outputs are in the
    order of then, wherever nodes have moved since.
    """
    members = members_of(gm, nodes)
    inside = set(members)
    if in_order and inside != set(in_order):
        raise NotOutlinable(f"{members[0]} and others are not what they were when the region was described")
    told = list(in_order) or members
    outputs = [node for node in told if node.op != "get_attr" and any(user not in inside for user in node.users)]
    if not outputs:
        raise NotOutlinable(f"nothing outside reads any of {members}")
    late = _readers_in_between(gm, inside, members[0], members[-1])

    body, operands = _body(gm, told, outputs)
    name = _free_name(gm, kind)
    gm.add_submodule(name, body)
    body.meta[META] = Region(kind, dict(attrs))
    anchor = members[-1]
    with gm.graph.inserting_after(anchor):
        call = gm.graph.call_function(invoke_subgraph, ())
    with gm.graph.inserting_before(call):
        subgraph = gm.graph.get_attr(name)
    call.args = (subgraph, name, *operands)
    call.meta["val"] = tuple(node.meta["val"] for node in outputs)
    origin = ("stack_trace", "nn_module_stack", "custom")
    call.meta.update({key: anchor.meta[key] for key in origin if key in anchor.meta})
    after = call
    for index, node in enumerate(outputs):
        with gm.graph.inserting_after(after):
            after = gm.graph.call_function(operator.getitem, (call, index))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside and user is not call)
    for node in late:
        after.append(node)
        after = node
    for node in reversed(members):
        gm.graph.erase_node(node)
    _drop_unused_submodules(gm, members)
    return call


def inline(gm: GraphModule, call: Node) -> None:
    """Undoes `outline`: the body's nodes take the place of the call. The caller recompiles."""
    body = body_of(call)
    env: dict[Node, Any] = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = gm.graph.node_copy(node, env.__getitem__)
            copy.meta.update({META: region_of(call)} if is_region(call) else _modules_in(call, node))
            if node.op == "get_attr":
                copy.target = _adopt(gm, str(node.target), body.get_submodule(str(node.target)))
            elif node.target is invoke_subgraph:  # its second argument names the subgraph, and names differ in `gm`
                copy.update_arg(1, str(copy.args[0].target))  # type: ignore[union-attr]
            env[node] = copy
    (results,) = body.graph.output_node().args
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(env[results[user.args[1]]])  # type: ignore[index]
        gm.graph.erase_node(user)
    subgraph = call.args[0]
    assert isinstance(subgraph, Node)
    gm.graph.erase_node(call)
    if not subgraph.users:
        gm.graph.erase_node(subgraph)
        _drop_unused_submodules(gm, [subgraph])


def _modules_in(call: Node, node: Node) -> dict[str, Any]:
    """The modules that `node` is in where `call` runs it, as meta. What calls share was traced in one of them alone."""
    here, traced = (each.meta.get("nn_module_stack") for each in (call, node))
    if not here or not traced:
        return {}
    ours, *_ = list(here.values())[-1]
    theirs, *_ = list(traced.values())[: len(here)][-1]
    inner = list(traced.items())[len(here) :]
    named = {key: (name.replace(theirs, ours, 1), *kind) for key, (name, *kind) in inner}
    return {"nn_module_stack": {**here, **named}}


def neighbour_of(body: GraphModule) -> Node:
    """The call of the one region nested in the body of a `REDUCED` region."""
    (call,) = regions(body)
    return call


def behind_sum(body: GraphModule) -> GraphModule:
    """What a `REDUCED` region does once the sum is there: its body without collective and wait, flattened.

    Outputs are those of the body, in order. So are placeholders, and the one of this rank's part stands for the sum;
    where the body makes the part, the sum comes first, and what nothing here reads is gone.
    """
    flat = flatten(body)
    begin, wait = _sum_of(flat)
    part: Any = begin.args[0]
    made = part.op != "placeholder"
    if made:
        first = next(iter(flat.graph.nodes))
        with flat.graph.inserting_before(first):
            total = flat.graph.placeholder("total")
        total.meta["val"] = wait.meta["val"]
        part = total
    wait.replace_all_uses_with(part)
    flat.graph.erase_node(wait)
    flat.graph.erase_node(begin)
    return _without_unread(flat) if made else _recompiled(flat)


def front_of_sum(body: GraphModule) -> GraphModule | None:
    """What a `REDUCED` region does before: the nodes that make this rank's part, which is the one output; flattened,
    with what they read. None where the part is an operand."""
    flat = flatten(body)
    begin, _ = _sum_of(flat)
    part: Any = begin.args[0]
    if part.op == "placeholder":
        return None
    flat.graph.output_node().args = ((part,),)
    return _without_unread(flat)


def _sum_of(flat: GraphModule) -> tuple[Node, Node]:
    """The collective of a flattened body, and its wait."""
    (wait,) = flat.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    begin = wait.args[0]
    assert isinstance(begin, Node) and isinstance(begin.args[0], Node)
    return begin, wait


def _without_unread(flat: GraphModule) -> GraphModule:
    for node in reversed(list(flat.graph.nodes)):
        if node.op != "output" and not node.users:
            flat.graph.erase_node(node)
    return _recompiled(flat)


def _recompiled(flat: GraphModule) -> GraphModule:
    flat.recompile()
    return flat


def flatten(gm: GraphModule) -> GraphModule:
    """A copy of `gm` without subgraph calls, regions or others: each is inlined. Its output is a tuple."""
    graph = Graph()
    results = graph.graph_copy(gm.graph, {})
    graph.output(tuple(results) if isinstance(results, (tuple, list)) else (results,))
    flat = lazy_graph_module(gm, graph)
    while calls := [node for node in flat.graph.nodes if node.target is invoke_subgraph]:
        for call in calls:
            inline(flat, call)
    flat.recompile()
    return flat


def members_of(gm: GraphModule, nodes: Iterable[Node]) -> list[Node]:
    """What a region of `nodes` holds, in graph order: these and what cannot be parted from them."""
    return sorted(_closed(gm, nodes))


def _closed(gm: GraphModule, nodes: Iterable[Node]) -> set[Node]:
    """`nodes` with what cannot be parted from them: a nested call's subgraph reference and its getitems."""
    inside = set(nodes)
    for node in list(inside):
        if node.target is invoke_subgraph:
            inside.add(node.args[0])  # type: ignore[arg-type]
            inside.update(user for user in node.users if user.target is operator.getitem)
    for node in inside:
        if node.graph is not gm.graph or node.op in ("placeholder", "output"):
            raise NotOutlinable(f"{node} cannot move into a region")
    return inside


def _readers_in_between(gm: GraphModule, inside: set[Node], first: Node, last: Node) -> list[Node]:
    """Outside nodes between `first` and `last` that read the region, in graph order."""
    late: dict[Node, None] = {}
    node = first
    while node is not last:
        if node in inside:
            crossing = next((arg for arg in node.all_input_nodes if arg in late), None)
            if crossing is not None:
                raise NotOutlinable(f"not convex: {node} reads {crossing}, which reads the region")
        elif any(arg in inside or arg in late for arg in node.all_input_nodes):
            if node.is_impure():
                raise NotOutlinable(f"{node} has an effect and would have to move")
            late[node] = None
        node = node.next
    crossing = next((arg for arg in last.all_input_nodes if arg in late), None)
    if crossing is not None:
        raise NotOutlinable(f"not convex: {last} reads {crossing}, which reads the region")
    return list(late)


def _body(gm: GraphModule, members: list[Node], outputs: list[Node]) -> tuple[GraphModule, list[Node]]:
    graph = Graph()
    env: dict[Node, Node] = {}
    inside = set(members)
    for arg in (arg for node in members for arg in node.all_input_nodes if arg not in inside):
        if arg not in env:
            env[arg] = graph.placeholder(arg.name)
            env[arg].meta = {key: arg.meta[key] for key in ("val",) if key in arg.meta}
    operands = list(env)
    submodules: dict[str, torch.nn.Module] = {}
    for node in members:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr":
            submodules[str(node.target)] = gm.get_submodule(str(node.target))
    graph.output(tuple(env[node] for node in outputs))
    return lazy_graph_module(submodules, graph), operands


def _adopt(gm: GraphModule, name: str, module: torch.nn.Module) -> str:
    """The name of `module` in `gm`: the one it has, or a new one."""
    for known, child in gm.named_children():
        if child is module:
            return known
    name = _free_name(gm, name)
    gm.add_submodule(name, module)
    return name


def _free_name(gm: GraphModule, stem: str) -> str:
    stem = stem.rstrip("0123456789").rstrip("_")
    index = 0
    while hasattr(gm, f"{stem}_{index}"):
        index += 1
    return f"{stem}_{index}"


def _drop_unused_submodules(gm: GraphModule, members: list[Node]) -> None:
    gone = {str(node.target): None for node in members if node.op == "get_attr"}
    used = {str(node.target) for node in (gm.graph.find_nodes(op="get_attr", sort=False) if gone else ())}
    for name in gone:
        if name not in used:
            gm.delete_submodule(name)
