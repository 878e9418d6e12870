"""graph_shape: branches of a graph are its runs between forks and joins; edges that others make needless are none."""

from __future__ import annotations

import random

import networkx as nx  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from v41.tools.graph_shape import GraphShape, shape_of, shape_table

DOT = r"""digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="solid" shape="record" label="{KERNEL
| {ID | 0 (topoId: 4) | critical\<\<\<40,128,0\>\>\>}
| {{node handle | func handle} | {0x55d | 0x55e}}}"];
"graph_1_node_1"[style="solid" shape="record" label="{KERNEL
| {ID | 1 (topoId: 2) | coefficients\<\<\<40,128,0\>\>\>}}"];
"graph_1_node_2"[style="solid" shape="record" label="{KERNEL | {ID | 2 (topoId: 3) | attention\<\<\<1,32,0\>\>\>}}"];
"graph_1_node_3"[style="solid" shape="record" label="{MEMCPY | {ID | 3 (topoId: 1)}}"];
"graph_1_node_4"[style="solid" shape="record" label="{KERNEL | {ID | 4 (topoId: 0) | critical\<\<\<40,128,0\>\>\>}}"];
"graph_1_node_0" -> "graph_1_node_1";
"graph_1_node_0" -> "graph_1_node_2" [headlabel=0];
"graph_1_node_2" -> "graph_1_node_3";
"graph_1_node_1" -> "graph_1_node_4";
"graph_1_node_3" -> "graph_1_node_4";
"graph_1_node_0" -> "graph_1_node_4";
}
}"""


def test_a_fork_and_its_join() -> None:
    shape = shape_of(DOT)
    assert (shape.nodes, shape.edges, shape.forks, shape.joins, shape.longest) == (5, 6, 1, 1, 4)
    told = [(b.after, b.nodes, b.first, b.last, b.kinds) for b in shape.branches]
    assert told == [
        ((), 1, "critical", "critical", {"kernel": 1}),
        ((0,), 1, "coefficients", "coefficients", {"kernel": 1}),
        ((0,), 2, "attention", "memcpy", {"kernel": 1, "memcpy": 1}),
        ((1, 2), 1, "critical", "critical", {"kernel": 1}),
    ]
    assert shape_table(shape).row_count == 4 and shape_table(shape, most=2).row_count == 3
    assert GraphShape.of(shape.values()) == shape


def test_a_lone_node_and_none() -> None:
    alone = shape_of('digraph { "graph_1_node_0"[label="0\nalone\\<\\<\\<1,1\\>\\>\\>"]; }')
    assert (alone.nodes, alone.edges, alone.branches[0].first) == (1, 0, "alone")
    assert shape_of("digraph { }").branches == ()


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_branches_hold_every_node_once_and_follow_who_they_wait_for(count: int, seed: int) -> None:
    draw = random.Random(seed)
    pairs = [(a, b) for b in range(count) for a in range(b) if draw.random() < 0.3]
    nodes = "\n".join(f'"graph_0_node_{i}"[label="k{i}\\<\\<\\<1\\>\\>\\>"];' for i in range(count))
    edges = "\n".join(f'"graph_0_node_{a}" -> "graph_0_node_{b}";' for a, b in pairs)
    shape = shape_of(f"digraph {{\n{nodes}\n{edges}\n}}")
    assert sum(branch.nodes for branch in shape.branches) == shape.nodes == count and shape.edges == len(pairs)
    assert all(max(branch.after, default=-1) < branch.number for branch in shape.branches)
    plain = nx.transitive_reduction(nx.DiGraph(pairs))
    inner = sum(plain.out_degree(a) == 1 == plain.in_degree(b) for a, b in plain.edges)
    assert len(shape.branches) == count - inner
