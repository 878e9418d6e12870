"""split_piece: parts of a piece become pieces of their own, one behind the other; the first keeps its name.

    before   piece_4: X, y, post, comb, pre -> X', x, pre', post', comb'
    after    piece_4: X, y, post, comb, pre -> X', x          piece_4_side: X' -> pre', post', comb'

What passes between two parts is named by the piece and its node. As in partition, constants, arithmetic on sizes and
views of written inputs do not pass: each part has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from v41.passes.borders import Draft, Kind, judge
from v41.passes.partition import copied_nodes, cut
from v41.plan import Piece, spec


@dataclass(frozen=True)
class Part:
    """Nodes of a piece's body that become a piece `name`, and why it begins."""

    name: str
    border: str
    nodes: Sequence[Node]


def split_piece(
    piece: Piece, body: GraphModule, parts: Sequence[Part], sizes: Mapping[str, str]
) -> tuple[list[Piece], dict[str, str]]:
    """What `piece` becomes, and the specs of the values that pass between its parts.

    body: the same work as the piece's, with the same inputs and results. parts: all its nodes that compute and that
    somebody needs, each once, no part reading a later one. sizes: those of the plan.
    """
    inputs = body.graph.find_nodes(op="placeholder")
    (results,) = body.graph.output_node().args
    names: dict[str, str] = {node.name: name for node, name in zip(inputs, piece.reads, strict=True)}
    names |= {node.name: name for node, name in zip(results, piece.returns, strict=True)}  # type: ignore[arg-type]
    drafts = [Draft(part.border, Kind.EVEN, list(part.nodes)) for part in parts]
    pieces, returned = cut(body, drafts, copied_nodes(body), judge(body, (), None, dict(sizes)))
    assert len(pieces) == len(parts), "a part that nobody needs"
    between = {node.name: f"{piece.name}_{node.name}" for node in returned if node.name not in names}
    specs = {between[node.name]: spec(node.meta.get("val")) for node in returned if node.name in between}
    names |= between
    return [_renamed(made, part.name, names) for made, part in zip(pieces, parts, strict=True)], specs


def _renamed(piece: Piece, name: str, names: Mapping[str, str]) -> Piece:
    reads, returns, writes = (
        tuple(map(names.__getitem__, values)) for values in (piece.reads, piece.returns, piece.writes)
    )
    return replace(piece, name=name, reads=reads, returns=returns, writes=writes, frees=())
