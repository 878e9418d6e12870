"""replay_seam: the gathers of a trimmed program are one region, which has nothing to do where every row is kept.

    before   X' = X[kept_rows];   first' = searchsorted(kept_rows, first_rows);   grid = first' + columns
    after    region(kind="kept_rows", body = those nodes, attrs below) -> X', first', grid
    attrs    index   the operand that says which rows are kept, ascending, each once
             last    so many last rows of each chunk are among them
             taken   (operand, dimension): its size is the number of rows they are taken from; one of each such size
             same    (output, operand): equal where every row is kept, though the body does not show it

As many numbers as there are rows, ascending, each once, are all of them in order. So where the sizes are equal, a
gather gives what it reads, and a row's place among those kept is its number: in every decode step, and in a prefill of
few rows. `parted` says which results of a piece are then its inputs, and what is left to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, ops
from torch.fx import Graph, GraphModule, Node

from v41.passes.matching import shape
from v41.regions import body_of, flatten, inline, outline, region_of, regions

aten = ops.aten
KIND = "kept_rows"


def outline_seam(
    gm: GraphModule, made: Iterable[Node], index: Node, last: int, same: Mapping[Node, Node]
) -> Node | None:
    """Moves those of `made` that are tensors into a region, and returns its call; None where none takes rows.

    made: no path leaves them and comes back. index: which rows are kept, so many last ones of each chunk among them.
    same: node -> what it equals where every row is.
    """
    inside = {node for node in made if isinstance(node.meta.get("val"), Tensor)}
    members = [node for node in gm.graph.nodes if node in inside]  # in the order in which `outline` takes them
    read = list(dict.fromkeys(arg for node in members for arg in node.all_input_nodes if arg not in inside))
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    taken: dict[str, tuple[int, int]] = {}
    for node in members:
        if (dim := _taken_along(node, index)) is not None:
            source = cast("Node", node.args[0])
            taken.setdefault(str(shape(source)[dim]), (read.index(source), dim))
    if not taken:
        return None
    return outline(
        gm,
        members,
        kind=KIND,
        index=read.index(index),
        last=last,
        taken=tuple(taken.values()),
        same=tuple((at, read.index(same[node])) for at, node in enumerate(outputs) if same.get(node) in read),
    )


def rows_taken(call: Node) -> dict[Node, Node]:
    """Of a region that takes rows: operand whose first dimension they lie in -> the result that holds those kept."""
    body, operands = body_of(call), cast("Sequence[Node]", call.args[2:])
    outside = dict(zip((node for node in body.graph.nodes if node.op == "placeholder"), operands, strict=True))
    results = cast("Sequence[Node]", body.graph.output_node().args[0])
    index = next(node for node, operand in outside.items() if operand is operands[region_of(call).attrs["index"]])
    of_result = {user.args[1]: user for user in call.users}
    return {
        outside[cast("Node", node.args[0])]: of_result[at]
        for at, node in enumerate(results)
        if _taken_along(node, index) == 0 and at in of_result
    }


def take_too(gm: GraphModule, call: Node, more: Iterable[Node]) -> Node | None:
    """Moves `more`, nodes in front of region `call` that take rows by its index, into it; what it takes and nobody
    reads any more goes. Returns the region's new call, None where nothing is left."""
    attrs, body = region_of(call).attrs, body_of(call)
    operands = cast("Sequence[Node]", call.args[2:])
    results = cast("Sequence[Node]", body.graph.output_node().args[0])
    index = operands[attrs["index"]]
    same = {results[at]: operands[place] for at, place in attrs["same"]}
    for user in [user for user in call.users if not user.users]:
        gm.graph.erase_node(user)
    before = set(gm.graph.nodes)
    inline(gm, call)
    members = [node for node in gm.graph.nodes if node not in before]
    inlined = dict(zip((n for n in body.graph.nodes if n.op not in ("placeholder", "output")), members, strict=True))
    same = {inlined[node]: operand for node, operand in same.items()}
    for node in reversed(members):
        if not node.users:
            gm.graph.erase_node(node)
            same.pop(node, None)
    made = {*members, *more} & set(gm.graph.nodes)
    return outline_seam(gm, made, index, attrs["last"], same)


def _taken_along(node: Node, index: Node) -> int | None:
    """The dimension along which `node` takes rows by `index`; None where it does something else."""
    given = cast("Sequence[Node | None]", node.args[1] if node.target is aten.index.Tensor else ())
    used = [dim for dim, each in enumerate(given) if each is not None]
    return used[0] if len(used) == 1 and given[used[0]] is index else None


@dataclass(frozen=True)
class Parted:
    """A piece that takes rows, by places among its inputs and results.

    kept, taken     every row is kept where the size of each (input, dimension) of `taken` is that of input `kept`
    same            for each result, the input that it then is, or None
    rest, reads     what computes the others, of which inputs; None where there are no others
    """

    kept: int
    taken: tuple[tuple[int, int], ...]
    same: tuple[int | None, ...]
    rest: GraphModule | None
    reads: tuple[int, ...]


def parted(body: GraphModule) -> Parted | None:
    """How a piece's body is told apart; None where it is not a region that takes rows, alone but for sizes."""
    if (call := next(regions(body, KIND), None)) is None:
        return None
    others = [node for node in body.graph.nodes if node.op == "call_function" and call not in (node, *node.args)]
    if any(isinstance(node.meta.get("val"), Tensor) for node in others):
        return None
    attrs = region_of(call).attrs
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    operands = cast("Sequence[Node]", call.args[2:])
    if any(operands[at] not in inputs for at in (attrs["index"], *(at for at, _ in attrs["taken"]))):
        return None
    flat = flatten(body)
    places = dict(zip(inputs, (node for node in flat.graph.nodes if node.op == "placeholder"), strict=True))
    index = places[operands[attrs["index"]]]
    (told,) = body.graph.output_node().args
    (results,) = flat.graph.output_node().args
    known = {  # result -> the operand it equals
        at: places[operands[operand]]
        for at, node in enumerate(told)  # type: ignore[arg-type]
        for output, operand in attrs["same"]
        if node.args == (call, output) and operands[operand] in places
    }
    equal: dict[Node, Node] = {}
    for node in flat.graph.nodes:
        if _taken_along(node, index) is not None:
            equal[node] = _end(equal, node.args[0])
        elif node.target is aten.searchsorted.Tensor and node.args[0] is index and not node.kwargs:
            equal[node] = _end(equal, node.args[1])
    at = {node: i for i, node in enumerate(places.values())}
    ends = [known.get(i) or _end(equal, node) for i, node in enumerate(results)]  # type: ignore[arg-type]
    rest, reads = _computed([node for node in ends if node not in at], equal, at)
    return Parted(
        at[index],
        tuple((inputs.index(operands[i]), dim) for i, dim in attrs["taken"]),
        tuple(at.get(node) for node in ends),
        rest,
        reads,
    )


def _end(equal: Mapping[Node, Node], node: Node) -> Node:
    return equal.get(node, node)


def _computed(
    wanted: list[Node], equal: Mapping[Node, Node], at: Mapping[Node, int]
) -> tuple[GraphModule | None, tuple[int, ...]]:
    """A graph of what `wanted` need, gathers left out, and which inputs it reads."""
    if not wanted:
        return None, ()
    needed, stack = set[Node](), list(wanted)
    while stack:
        node = _end(equal, stack.pop())
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    graph, env = Graph(), dict[Node, Node]()
    reads = [node for node in at if node in needed]
    for node in reads:
        env[node] = graph.placeholder(node.name)
        env[node].meta = {"val": node.meta["val"]}
    for node in wanted[0].graph.nodes:
        if node in needed and node not in at:
            env[node] = graph.node_copy(node, lambda arg: env[_end(equal, arg)])
    graph.output(tuple(env[node] for node in wanted))
    return GraphModule({}, graph), tuple(at[node] for node in reads)
