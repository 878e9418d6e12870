"""partition: one graph becomes a Plan of pieces, cut where the same work comes again and where capture breaks.

    before   a, b, [region of a cut kind], c, d, [region of a cut kind], e
    after    piece_0: a, b    piece_1: the region    piece_2: c, d    piece_3: the region    piece_4: e

Where a piece begins, and which nodes may move into a later one, is told in borders.py. A graph that gives no reason to
cut is one piece. Between pieces pass tensors and ints, exactly those that live. Three kinds of nodes never cross, each
piece that needs them has its own: constants, arithmetic on sizes, and views of a written input, so that inside a piece
everybody sees which memory is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from v41._compat import lazy_graph_module
from v41.passes.analysis.effects import bases, effect_of, viewed_args, written_inputs
from v41.passes.analysis.sizes import NodeSizes, size_names
from v41.passes.borders import Draft, Drafts, Judge, Kind, judge
from v41.passes.buffers import buffers
from v41.passes.structure import structure_key
from v41.plan import Piece, Plan, spec
from v41.regions import is_region
from v41.report import source_of


def partition(
    gm: GraphModule, *, cut_at: Collection[str] = (), along: str | None = None, called: Mapping[str, str] | None = None
) -> Plan:
    """The Plan of `gm`, which stays as it is.

    cut_at: the region kinds that become pieces of their own. along: the name of the size whose work lies apart from
    work with others. called: input -> what the user calls it, for naming sizes.
    """
    inputs, outputs, copied = gm.graph.find_nodes(op="placeholder"), _outputs(gm), copied_nodes(gm)
    judged = judge(gm, cut_at, along, size_names(gm, called or {}))
    drafts = _drafts(gm, judged, copied)
    late = [node for node in dict.fromkeys(outputs) if isinstance(node, Node) and node in copied]
    if late:  # views of written inputs and sizes that the graph returns are taken at its end
        drafts = drafts or [Draft("start of the graph", Kind.EVEN, [])]
        drafts[-1].own += late
    pieces, returned = cut(gm, drafts, copied, judged)
    plan = Plan(
        inputs=tuple(node.name for node in inputs),
        outputs=tuple(node.name if isinstance(node, Node) else node for node in outputs),  # type: ignore[misc]
        values={node.name: spec(node.meta.get("val")) for node in (*inputs, *returned)},
        pieces=tuple(pieces),
        sizes=judged.names,
    )
    return replace(plan, buffers=buffers(plan, {node.name: node.meta.get("val") for node in (*inputs, *returned)}))


def cut(
    gm: GraphModule, drafts: Sequence[Draft], copied: dict[Node, None], judged: Judge
) -> tuple[list[Piece], list[Node]]:
    """The pieces that `drafts`, in order, make of `gm`, and every value they return. drafts: each node once that is not
    `copied` into all that need it."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    inputs = [node for node in order if node.op == "placeholder"]
    ints = {str(node.meta["val"]): node for node in inputs if isinstance(node.meta.get("val"), SymInt)}
    for draft in drafts:
        draft.nodes = sorted(_with_copies(draft.own, copied), key=order.__getitem__)
        draft.reads = _reads(draft.nodes)
        draft.reads += _unbound_symbols(draft, ints, judged.sizes)
    return _pieces(gm, list(drafts), _outputs(gm), judged)


def _outputs(gm: GraphModule) -> tuple[object, ...]:
    (results,) = gm.graph.output_node().args
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def copied_nodes(gm: GraphModule) -> dict[Node, None]:
    """Constants, arithmetic on sizes, and views of written inputs: what every piece that needs it holds for itself."""
    written = written_inputs(gm)
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or effect_of(node):
            continue
        sizes = not isinstance(node.meta.get("val"), (Tensor, tuple, list)) and not any(
            isinstance(arg.meta.get("val"), Tensor) for arg in node.all_input_nodes
        )
        view = bool(viewed_args(node)) and any(base in written for base in bases(node)) and not is_region(node)
        if node.op == "get_attr" or sizes or view:
            found[node] = None
    return found


def _drafts(gm: GraphModule, judged: Judge, copied: dict[Node, None]) -> list[Draft]:
    drafts = Drafts(judged)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and node not in copied:
            drafts.add(node)
    return drafts.finish()


def _with_copies(nodes: Iterable[Node], copied: dict[Node, None]) -> dict[Node, None]:
    """`nodes` and the copied ones that they rest on."""
    found: dict[Node, None] = dict.fromkeys(nodes)
    stack = list(found)
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg in copied and arg not in found:
                found[arg] = None
                stack.append(arg)
    return found


def _reads(nodes: list[Node]) -> list[Node]:
    """What `nodes` read from outside, in order of first read."""
    inside = set(nodes)
    return list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))


def _unbound_symbols(draft: Draft, ints: dict[str, Node], sizes: NodeSizes) -> list[Node]:
    """The int inputs whose symbol this piece uses and no tensor that it reads has alone as a size."""
    used = {symbol: None for node in (*draft.reads, *draft.nodes) for symbol in sizes.made(node)}
    bound = set()
    for value in (node.meta.get("val") for node in draft.reads):
        bare = value.shape if isinstance(value, Tensor) else (value,)
        bound |= {str(size) for size in bare if isinstance(size, SymInt)}
    return [ints[symbol] for symbol in used if symbol not in bound and symbol in ints]


def _pieces(
    gm: GraphModule, drafts: list[Draft], outputs: tuple[object, ...], judged: Judge
) -> tuple[list[Piece], list[Node]]:
    """The pieces in order and every value they return. Backwards, for what lives after a piece must be known."""
    live = {node for node in outputs if isinstance(node, Node)}
    kept: list[tuple[Draft, list[Node], list[str]]] = []
    for draft in reversed(drafts):
        returns = [node for node in draft.nodes if node in live and node in draft.own]
        if returns or any(map(effect_of, draft.own)):
            live.difference_update(returns)
            kept.append((draft, returns, [node.name for node in draft.reads if node not in live]))
            live.update(draft.reads)
    pieces = [_piece(f"piece_{index}", gm, judged, *facts) for index, facts in enumerate(reversed(kept))]
    return pieces, [node for _, returns, _ in reversed(kept) for node in returns]


def _piece(name: str, gm: GraphModule, judged: Judge, draft: Draft, returns: list[Node], frees: list[str]) -> Piece:
    body = _body(gm, draft, returns)
    written = {node.name for node in written_inputs(body)}
    return Piece(
        name=name,
        reads=tuple(node.name for node in draft.reads),
        returns=tuple(node.name for node in returns),
        frees=tuple(frees),
        writes=tuple(node.name for node in draft.reads if node.name in written),
        border=draft.border,
        key=structure_key(body),
        source=next((source for source in map(source_of, draft.own) if source != "unknown"), "unknown"),
        nodes=len(draft.nodes),
        body=body,
        sizes=tuple({symbol: None for node in (*draft.reads, *draft.nodes) for symbol in judged.sizes.made(node)}),
        uncapturable=next(filter(None, map(judged.obstacle, draft.own)), None),
    )


def _body(gm: GraphModule, draft: Draft, returns: list[Node]) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in draft.reads:
        env[node] = graph.placeholder(node.name)
        env[node].meta = {"val": node.meta.get("val")}
    for node in draft.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in returns))
    return lazy_graph_module(gm, graph)
