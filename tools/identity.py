"""identity: which node a name means. BODY/NODE is one node, whatever else is called so; /NODE is one of the program.

    Names(run.nodes).of("mul_9")                  [attention_0/mul_9, repeated_subgraph1/attention_0/mul_9, ...]
    Names(run.nodes).of("attention_0/mul_9")      that one; so does piece_7/mul_9 for what lies in no body
    Names(run.nodes).pieces(node)                 every piece that runs it: a body that layers share is in many

Constants and sizes are copied into each piece that needs them, and stay one node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from v41.tools.nodes import NodeFacts

CALL = re.compile(r"(?:region|subgraph) ([^(]+)\(")


class Names:
    """The nodes of one run, by name, by body and by who calls the body."""

    def __init__(self, nodes: Sequence[NodeFacts]) -> None:
        self.nodes = nodes

    @cached_property
    def by_name(self) -> dict[str, list[NodeFacts]]:
        found: dict[str, dict[str, NodeFacts]] = {}
        for node in self.nodes:
            found.setdefault(node.name, {}).setdefault(node.identity, node)
        return {name: list(each.values()) for name, each in found.items()}

    @cached_property
    def by_body(self) -> dict[str, list[NodeFacts]]:
        """Without the program itself, whose nodes lie in no body."""
        found: dict[str, list[NodeFacts]] = {}
        for node in self.nodes:
            if node.body:
                found.setdefault(node.body, []).append(node)
        return found

    @cached_property
    def calls(self) -> dict[str, list[NodeFacts]]:
        """Body -> the nodes that call it."""
        found: dict[str, list[NodeFacts]] = {}
        for node in self.nodes:
            if (called := CALL.match(node.text)) is not None:
                found.setdefault(called[1], []).append(node)
        return found

    @cached_property
    def holders(self) -> dict[str, set[str]]:
        """Of the program's own nodes: name -> the pieces that hold it."""
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if not node.body:
                found.setdefault(node.name, set()).add(node.piece)
        return found

    def of(self, name: str) -> list[NodeFacts]:
        """All nodes that `name` may mean: of a bare name every namesake, else the one in that body or piece."""
        place, slash, short = name.rpartition("/")
        same = self.by_name.get(short, [])
        if not slash:
            return same
        return [each for each in same if each.body == place or (not each.body and place in self.holders[short])]

    def pieces(self, node: NodeFacts) -> list[str]:
        """In order of the program."""
        return self.pieces_of(node.body) if node.body else self._in_order(self.holders[node.name])

    def pieces_of(self, body: str) -> list[str]:
        """Every piece that runs `body`, called in it or in what it calls."""
        found, seen, next_ = set[str](), set[str](), [body]
        while next_:
            each = next_.pop()
            if each in seen:
                continue
            seen.add(each)
            for call in self.calls.get(each, ()):
                if call.body:
                    next_.append(call.body)
                else:
                    found.add(call.piece)
        return self._in_order(found)

    def _in_order(self, pieces: Iterable[str]) -> list[str]:
        wanted = set(pieces)
        return [piece for piece in dict.fromkeys(node.piece for node in self.nodes) if piece in wanted]
