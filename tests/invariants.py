"""check_pass: runs a pass on a program and holds it to everything a pass promises, whatever the pass is for.

Structure: what the compiler's own `verify` asks (order, meta, signature, effects, sharing), and lint. Meaning: the
same bits, aliasing and writes on random inputs of 0, 1, 2 and 5 rows, and in fp64. Manners: running it again changes
nothing; running it on a copy, or with other node names, gives the same program and the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch.fx import Graph, GraphModule

from v41.passes.same_values import difference
from v41.passes.structure import structure_key
from v41.passes.verify import facts, verify
from v41.report import Decision

PassFunction = Callable[[GraphModule], list[Decision]]
ROWS = (0, 1, 2, 5)


def check_pass(pass_fn: PassFunction, gm: GraphModule, rows: Sequence[int] = ROWS) -> list[Decision]:
    """Applies `pass_fn` to `gm` and returns its decisions. AssertionError names the promise that it broke."""
    before, twin, renamed = copy_program(gm), copy_program(gm), copy_program(gm, prefix="renamed_")
    entered = facts(gm)
    decisions = apply(pass_fn, gm)
    verify(gm, entered, name="the pass")
    for count in rows:
        check_same_values(before, gm, count)
    check_same_values(before, gm, 2, exact=True)
    once = structure_key(gm)
    for copy, complaint in ((twin, "not deterministic"), (renamed, "node names matter")):
        again = apply(pass_fn, copy)
        assert list(map(nameless, again)) == list(map(nameless, decisions)), f"decisions: {complaint}"
        assert structure_key(copy) == once, f"program: {complaint}"
    apply(pass_fn, gm)
    assert structure_key(gm) == once, "a second run changes the program"
    return decisions


def apply(pass_fn: PassFunction, gm: GraphModule) -> list[Decision]:
    """What the driver does around a pass."""
    decisions = pass_fn(gm)
    for program in everything_in(gm):
        program.graph.lint()
        program.recompile()
    return decisions


def nameless(decision: Decision) -> Decision:
    """`decision` without the names of nodes."""
    return replace(decision, node="", culprit=None)


def everything_in(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and all its subgraphs, those of regions as well."""
    yield gm
    for body in dict.fromkeys(child for child in gm.children() if isinstance(child, GraphModule)):
        yield from everything_in(body)


def copy_program(gm: GraphModule, prefix: str = "", done: dict[GraphModule, GraphModule] | None = None) -> GraphModule:
    """A copy that no edit of `gm` reaches; subgraphs that were shared stay shared. `prefix` renames every node."""
    done = {} if done is None else done
    if gm not in done:
        graph, env = Graph(), {}
        for node in gm.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op not in ("placeholder", "output") and prefix:
                env[node]._rename(prefix + node.name)
        attributes = {}
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                held = getattr(gm, str(node.target))
                copied = copy_program(held, prefix, done) if isinstance(held, GraphModule) else held
                attributes[str(node.target)] = copied
        done[gm] = GraphModule(attributes, graph)
        done[gm].meta = dict(gm.meta)
    return done[gm]


# ---- meaning ---------------------------------------------------------------------------------------------------------


def check_same_values(before: GraphModule, after: GraphModule, rows: int, *, exact: bool = False) -> None:
    """Both programs give the same bits, write the same inputs alike and share memory alike; `exact`: run in fp64."""
    assert difference(before, after, rows, exact=exact) is None, difference(before, after, rows, exact=exact)
