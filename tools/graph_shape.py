"""graph_shape: what a CUDA graph consists of: nodes, edges, and the branches between its forks and joins.

    branch  after  nodes  kinds       from           to
    0       -         12  kernel 12   embedding      mhc_critical
    1       0          1  kernel 1    mhc_coefficients
    2       0         14  kernel 14   attention      moe_gate
    3       1 2        9  kernel 9    mhc_critical   mhc_critical

A branch is a run of nodes each of which waits for the one before alone, and is alone in that. Edges that others make
needless count as no forks: a graph has some where an event was waited for twice. Read from text in DOT's language, as
the driver writes it of a captured graph.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import networkx as nx  # type: ignore[import-untyped]
from rich.table import Table

from v41.tools.tables import add, table

NODE = re.compile(r'"(graph_\d+_node_\d+)"\s*\[[^\]]*?label="((?:[^"\\]|\\.)*)"', re.DOTALL)
EDGE = re.compile(r'"(graph_\d+_node_\d+)"\s*->\s*"(graph_\d+_node_\d+)"')
KINDS = ("KERNEL", "MEMCPY", "MEMSET", "EVENT_RECORD", "EVENT_WAIT", "HOST", "EMPTY", "MEM_ALLOC", "MEM_FREE")


@dataclass(frozen=True)
class Branch:
    """after: numbers of the branches it waits for. first, last: names of its ends."""

    number: int
    after: tuple[int, ...]
    nodes: int
    kinds: dict[str, int]
    first: str
    last: str


@dataclass(frozen=True)
class GraphShape:
    """longest: nodes on the longest path. forks, joins: nodes with several behind them, or in front."""

    nodes: int
    edges: int
    forks: int
    joins: int
    longest: int
    branches: tuple[Branch, ...]

    def values(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> GraphShape:
        """What `values` told."""
        branches = tuple(Branch(**each) for each in values["branches"])
        return cls(**(values | {"branches": branches}))


def shape_of(dot: str) -> GraphShape:
    """The structure of the graph that `dot` describes."""
    labels = dict(NODE.findall(dot))
    edges = EDGE.findall(dot)
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(labels)
    plain = nx.transitive_reduction(graph)
    forks, joins = (sum(count > 1 for _, count in of()) for of in (lambda: plain.out_degree, lambda: plain.in_degree))
    longest = len(nx.dag_longest_path(plain)) if labels else 0
    return GraphShape(len(graph), len({*edges}), forks, joins, longest, tuple(_branches(plain, labels)))


def _branches(graph: Any, labels: dict[str, str]) -> list[Branch]:
    number: dict[str, int] = {}
    runs: list[list[str]] = []
    for node in nx.lexicographical_topological_sort(graph, key=_number):  # as captured, where that is an order
        before = list(graph.predecessors(node))
        if len(before) == 1 and graph.out_degree(before[0]) == 1:
            number[node] = number[before[0]]
            runs[number[node]].append(node)
        else:
            number[node] = len(runs)
            runs.append([node])
    return [
        Branch(
            at,
            tuple(sorted(number[node] for node in graph.predecessors(run[0]))),
            len(run),
            dict(Counter(_kind(labels.get(node, "")) for node in run)),
            *(_name(labels.get(node, "")) for node in (run[0], run[-1])),
        )
        for at, run in enumerate(runs)
    ]


def _number(node: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", node)))


def _kind(label: str) -> str:
    named = next((kind.lower() for kind in KINDS if re.search(rf"\b{kind}\b", label)), None)
    return named or ("kernel" if "<" in label else "other")


def _name(label: str) -> str:
    """The kernel's, else the kind."""
    named = re.search(r"([A-Za-z_]\w*)\s*(?:\\<|<){2,3}", label)
    return named[1] if named else _kind(label)


def shape_table(shape: GraphShape, most: int = 40) -> Table:
    """A line a branch, the first `most`."""
    made = table("branch", "after", "kinds", "from", "to", "nodes", left=5)
    for each in shape.branches[:most]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in each.kinds.items())
        last = None if each.nodes == 1 else each.last
        add(made, each.number, " ".join(map(str, each.after)) or None, kinds, each.first, last, each.nodes)
    if len(shape.branches) > most:
        add(made, f"and {len(shape.branches) - most} more", None, None, None, None, None)
    return made
