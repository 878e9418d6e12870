"""trim_replay: late layers run on the rows that somebody reads, as a batch names them.

    before   X, x = boundary(...)                    rows: all
             entries[all] = compress(x);   q = project(x);   ring[last W] = records;   ...   h[logit_rows]
    after    X, x = boundary(...);   entries[all] = compress(x)
             X', x' = X[kept_rows], x[kept_rows]     the seam
             q = project(x');   ring[last W] = records';   ...   h'[place of logit_rows]      rows: kept

Site: a program whose batch says which rows it keeps. What is late is found, not told (replay_rows.py): in the plain
model the last KV source but for its norm, compressor, index keys and, where its window is not truncated, window
records; and all layers behind it. Exact because every late node computes each kept row from what it was computed from.

How the rows get here: the plain model runs every layer on every row and reads no such index, so eager stays the oracle.
`Batch` carries it, built on the host, for its length must be known there (a size made on the way could be in no CUDA
graph); the model only mentions it, so that it is among the inputs of the graph. That it names all rows demanded is a
promise: the name of its size says how many last rows of each chunk it has, and only demands within these are late.
Needs canonicalize. Bounded replay: DeepSeek-V4.1 report; vLLM 0.33 (PR 58132); the exact halo: vLLM PR 57281.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile

from torch import ops
from torch.fx import GraphModule, Node

from v41.passes.analysis.algebra import Expr, expression
from v41.passes.analysis.effects import effect_of, effects_of
from v41.passes.analysis.rows import Known, row_demand
from v41.passes.matching import shape
from v41.passes.replay_edit import Editor
from v41.passes.replay_rows import KNOWN, Kept, LateRows, kept_levels, split_calls
from v41.passes.replay_seam import outline_seam
from v41.regions import inline, region_of
from v41.report import Decision, applied, refused

aten = ops.aten
FUNCTIONAL = "writes inputs at its end alone"


def trim_replay(gm: GraphModule, called: Mapping[str, str] | None = None) -> list[Decision]:
    """Trims `gm` in place. A decision for each seam, named by the first late node, whose region says how many last
    rows are kept; and one for each node that had to stay whole. called: input -> what the user calls it; without,
    no batch is known."""
    levels = [kept for kept in kept_levels(gm, called or {}) if not kept.rows.users]
    return trim(gm, *levels) if levels else []


def trim(gm: GraphModule, kept: Kept, *more: Kept) -> list[Decision]:
    """The same for a batch that keeps these rows, the fewest first: to a program that computes its last layers of few
    rows, these few are rows that it takes somewhere in its middle."""
    early = written_early(gm)
    if early is not None:
        return [refused(early, FUNCTIONAL, early)]
    read_sizes_of_inputs(gm)
    drop_unread(gm)
    found, told, edited, known = list[Decision](), list[Decision](), list[Editor](), Known()
    for level in (kept, *more):
        rows = opened(gm, replace(level, inner=edited[-1].kept if edited else None), known)
        told = [refused(node, *problem) for node, problem in rows.problems.items()]
        told += [refused(node, KNOWN, node) for node in unknown(rows)]
        if rows.late:
            edited.append(Editor(gm, rows))
            edited[-1].edit()
            found.append(applied(next(n for n in gm.graph.nodes if n in rows.late and n.op == "call_function")))
    made = [region_of(call) if call is not None else None for call in outline_seams(gm, edited)]
    return [*(replace(each, region=region) for each, region in zip(found, made, strict=True)), *told]


def outline_seams(gm: GraphModule, edited: Sequence[Editor]) -> list[Node | None]:
    """Each seam becomes a region: of an inner one what it takes of all rows, and what it takes of those kept before.
    Returns the former."""
    calls = list[Node | None]()
    for at, editor in enumerate(edited):
        outer = edited[at + 1] if at + 1 < len(edited) else None
        own, behind = list[Node](), list[Node]()
        for node in editor.seam:
            late = outer is not None and any(
                outer.holds(each) or each in behind for each in (node, *node.all_input_nodes)
            )
            (behind if late else own).append(node)
        calls.append(outline_seam(gm, own, editor.kept.rows, editor.kept.last, editor.same))
        if outer is not None and editor.kept.rows in outer.places:
            outline_seam(gm, behind, outer.places[editor.kept.rows], editor.kept.last, {})
    return calls


def opened(gm: GraphModule, kept: Kept, known: Known) -> LateRows:
    """What is late, when calls are opened that are late in part, or whose bodies would have to tell rows anew.
    known: see row_demand; bodies are copied into the program, or with other sizes, and stay what they are."""
    while True:
        demand = row_demand(gm, kept.ragged, known)
        calls, rows = split_calls(kept, demand), None
        if not calls:
            rows = LateRows(gm, kept, demand)
            calls = [call for call in demand.forward.inside if rows.problems.get(call, ("",))[0] == KNOWN]
        if rows is not None and not calls:
            return rows
        for call in calls:
            inline(gm, call)
        read_sizes_of_inputs(gm)


def read_sizes_of_inputs(gm: GraphModule) -> None:
    """Sizes that inputs have are asked of these, since others will be shorter."""
    known: dict[Expr, tuple[Node, int]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            known |= {expression(size): (node, dim) for dim, size in reversed(list(enumerate(shape(node))))}
        elif node.target is aten.sym_size.int and (found := known.get(expression(node.meta["val"]))) is not None:
            node.args = found


def drop_unread(gm: GraphModule) -> None:
    """What only computes and nobody reads goes: no demand says which rows it has, and it may read late ones."""
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and effect_of(node) is None and not node.is_impure():
            gm.graph.erase_node(node)


def unknown(rows: LateRows) -> list[Node]:
    """Nodes that demand all rows because nobody knows how they mix them."""
    return [node for node in rows.forward.mixing if rows.demanded(node)]


def written_early(gm: GraphModule) -> Node | None:
    """The first write that something behind it may see."""
    effects = effects_of(node for node in gm.graph.nodes if node.op == "call_function")
    behind = list(dropwhile(lambda node: effects[node] != "writes", effects))
    return behind[0] if any(effects[node] != "writes" for node in behind) else None
