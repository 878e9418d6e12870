"""drawing: a small graph as SVG, in layers from top to bottom: whoever reads stands below what it reads.

    drawing(nodes, reads)      for the body of a region; of more than MOST nodes, the first alone

Within a layer nodes stand where what they read stands, on average, so that few lines cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import networkx as nx  # type: ignore[import-untyped]

from v41.tools.graph_export import Key, key_of, label
from v41.tools.nodes import NodeFacts

MOST, LETTERS = 160, 24
WIDE, HIGH, GAP_X, GAP_Y = 12 + 8 * LETTERS, 34, 12, 22  # a letter of the page's type takes less than 8


def drawing(nodes: Sequence[NodeFacts], reads: Mapping[Key, Sequence[Key]]) -> str:
    shown = {key_of(node): node for node in nodes[:MOST]}
    graph = nx.DiGraph()
    graph.add_nodes_from(shown)
    graph.add_edges_from((source, key) for key in shown for source in reads.get(key, ()) if source in shown)
    place: dict[Key, tuple[int, int]] = {}
    for y, layer in enumerate(nx.topological_generations(graph)):
        for x, key in enumerate(sorted(layer, key=lambda key: (_mean(graph, key, place), list(shown).index(key)))):
            place[key] = (x, y)
    columns, rows = (max((spot[i] for spot in place.values()), default=0) + 1 for i in (0, 1))
    size = (columns * (WIDE + GAP_X) + GAP_X, rows * (HIGH + GAP_Y) + GAP_Y)
    parts = [f'<svg viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" role="img">']
    for source, target in graph.edges:
        (x1, y1), (x2, y2) = _corner(place[source]), _corner(place[target])
        parts.append(f'<path d="M{x1 + WIDE / 2:g} {y1 + HIGH} L{x2 + WIDE / 2:g} {y2}"/>')
    for key, node in shown.items():
        x, y = _corner(place[key])
        name, *rest = label(node).splitlines()
        told = " ".join(rest)[:LETTERS]
        parts.append(f'<g><title>{escape(node.text)}\n{escape(node.source)}</title>'
                     f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4"/>'
                     f'<text x="{x + 6}" y="{y + 14}">{escape(name[:LETTERS])}</text>'
                     f'<text x="{x + 6}" y="{y + 27}" class="dim">{escape(told)}</text></g>')  # fmt: skip
    return "".join([*parts, "</svg>"])


def _mean(graph: nx.DiGraph, key: Key, place: Mapping[Key, tuple[int, int]]) -> float:
    above = [place[source][0] for source in graph.predecessors(key)]
    return sum(above) / len(above) if above else 0.0


def _corner(spot: tuple[int, int]) -> tuple[int, int]:
    return GAP_X + spot[0] * (WIDE + GAP_X), GAP_Y + spot[1] * (HIGH + GAP_Y)
