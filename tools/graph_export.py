"""graph_export: the nodes of a run as a graph for other programs: DOT, and the JSON of Model Explorer.

    edges(nodes)                (body, name) -> what it reads, as (body, name)
    dot(run, "mhc_boundary_3")  one body or piece, or the whole program, for Graphviz
    model_explorer(run)         layers, pieces and regions as namespaces that open and close

Edges are read from the lines of nodes: what a region returns goes by its name inside, as it does there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from v41.errors import UnknownNode
from v41.passes.changes import operator_of
from v41.tools.nearest import choices
from v41.tools.nodes import NodeFacts
from v41.tools.run import Run

Key = tuple[str, str]  # body, name


def key_of(node: NodeFacts) -> Key:
    return node.body, node.name


def unique(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Each node once: constants and sizes are copied into every piece that needs them."""
    return list({key_of(node): node for node in reversed(nodes)}.values())[::-1]


def edges(nodes: Sequence[NodeFacts]) -> dict[Key, list[Key]]:
    """What each node reads among `nodes`, in order, each once."""
    by_name: dict[str, list[Key]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(key_of(node))
    found: dict[Key, list[Key]] = {}
    for node in nodes:
        given = node.text.partition("(")[2].partition(") -> ")[0]
        read: dict[Key, None] = {}
        for name in re.findall(r"[A-Za-z_]\w*", given):
            if name != node.name and (source := _source(by_name.get(name, []), node)) is not None:
                read[source] = None
        found[key_of(node)] = list(read)
    return found


def _source(keys: Sequence[Key], reader: NodeFacts) -> Key | None:
    """Of nodes of one name, the one that `reader` sees: of its own body, else of the program, else of a region."""
    for body in (reader.body, ""):
        if (key := next((key for key in keys if key[0] == body), None)) is not None:
            return key
    return keys[0] if len(keys) == 1 else None


def part(run: Run, name: str | None) -> list[NodeFacts]:
    """The nodes of a body, or those of a piece with its bodies; all for no name. UnknownNode where there is none."""
    nodes = unique(run.nodes)
    if name is None:
        return nodes
    found = [node for node in nodes if node.body == name] or [node for node in nodes if node.piece == name]
    if not found:
        names = sorted({node.body for node in nodes if node.body} | {node.piece for node in nodes})
        raise UnknownNode("v41 inspect --of", name=name, known=choices(name, names))
    return found


def dot(run: Run, name: str | None = None) -> str:
    """For Graphviz: a box a node, a cluster a body."""
    nodes, lines = part(run, name), ['digraph "v41" {', "  node [shape=box, fontsize=10];"]
    bodies: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        bodies.setdefault(node.body, []).append(node)
    for body, inside in bodies.items():
        if body:
            lines.append(f"  subgraph {_quoted(f'cluster_{body}')} {{ label={_quoted(body)};")
        lines += [f"  {_quoted('/'.join(key_of(node)))} [label={_quoted(label(node))}];" for node in inside]
        lines += ["  }"] * bool(body)
    for target, sources in edges(nodes).items():
        lines += [f"  {_quoted('/'.join(source))} -> {_quoted('/'.join(target))};" for source in sources]
    return "\n".join([*lines, "}", ""])


def label(node: NodeFacts) -> str:
    """ "add_41  add.Tensor  f32[u0, 4]"."""
    operator = operator_of(node.text).removeprefix("aten.").removesuffix(".default").strip()
    spec = node.text.rpartition(")  ")[2] if ")  " in node.text else ""
    return "\n".join(filter(None, (node.name, operator, spec)))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def model_explorer(run: Run, name: str | None = None) -> dict[str, Any]:
    """The graph as Model Explorer reads it from a JSON file."""
    nodes = part(run, name)
    reads = edges(nodes)
    told = []
    for node in nodes:
        layer = run.layer_of.get(node.piece)
        space = [f"layer {layer}" if layer is not None else "ends", node.piece, *[node.body] * bool(node.body)]
        told.append({
            "id": "/".join(key_of(node)),
            "label": operator_of(node.text).strip(),
            "namespace": "/".join(space),
            "attrs": [{"key": "node", "value": node.name}, {"key": "calls", "value": node.text},
                      {"key": "source", "value": node.source}, {"key": "region", "value": node.region or "-"}],
            "incomingEdges": [
                {"sourceNodeId": "/".join(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
                for i, source in enumerate(reads[key_of(node)])
            ],
        })  # fmt: skip
    return {"label": "v41", "graphs": [{"id": run.source, "nodes": told}]}
