"""spans: whether nodes may move together. Outlining puts them where the last stands, and what reads them behind it.

    first member ... an outsider that reads a member ... last member        the outsider moves behind the region

Legal when no outsider is read by a member again, when none of them has an effect, and when nothing in the span is
written in place. Members come in graph order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from v41.passes.analysis.effects import effect_of, written_args


def span(members: Sequence[Node]) -> list[Node]:
    """All nodes from the first member to the last."""
    nodes, node = [], members[0]
    while node is not members[-1]:
        nodes.append(node)
        node = node.next
    return [*nodes, node]


def moved(members: Sequence[Node]) -> list[Node]:
    """Outsiders of the span that read a member, or what does: outlining puts them behind the region."""
    inside, late = set(members), dict[Node, None]()
    for node in span(members):
        if node not in inside and any(arg in inside or arg in late for arg in node.all_input_nodes):
            late[node] = None
    return list(late)


def comes_back(members: Sequence[Node]) -> Node | None:
    """An outsider that reads members and is read by one."""
    late = set(moved(members))
    return next((arg for node in members for arg in node.all_input_nodes if arg in late), None)


def moves_an_effect(members: Sequence[Node]) -> Node | None:
    """An outsider with an effect that would move, or what writes in place in between."""
    effect = next((node for node in moved(members) if effect_of(node) is not None or node.is_impure()), None)
    return effect or next((node for node in span(members) if written_args(node)), None)
