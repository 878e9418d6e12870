"""plan_facts: who makes, reads, writes and frees what in a plan, and which values share memory.

Pieces go by their position: START_AT is the caller before the first piece, the count of pieces the caller after the
last. Memory goes by the name of the value that allocated it, or brought it in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

from torch.fx import GraphModule, Node

from v41.passes.analysis.effects import Ends, bases
from v41.passes.analysis.happens_before import START_AT, Order
from v41.passes.replay_seam import parted
from v41.plan import END, START, Piece, Plan


class PlanFacts:
    """Facts of one plan, each found when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.end = len(plan.pieces)

    @cached_property
    def order(self) -> Order:
        return Order(self.plan)

    @cached_property
    def makings(self) -> list[tuple[str, int]]:
        """(value, where it comes in or is made), in order."""
        made = [(name, at) for at, piece in enumerate(self.plan.pieces) for name in piece.returns]
        return [*((name, START_AT) for name in self.plan.inputs), *made]

    @cached_property
    def made(self) -> dict[str, int]:
        return dict(reversed(self.makings))

    @cached_property
    def readings(self) -> list[tuple[str, int]]:
        """(value, who reads it), in order; the caller reads the outputs."""
        in_pieces = [(name, at) for at, piece in enumerate(self.plan.pieces) for name in piece.reads]
        return [*in_pieces, *((name, self.end) for name in self.plan.outputs if isinstance(name, str))]

    @cached_property
    def freed(self) -> list[tuple[str, int]]:
        return [(name, at) for at, piece in enumerate(self.plan.pieces) for name in piece.frees]

    @cached_property
    def returned(self) -> frozenset[str]:
        return frozenset(name for name in self.plan.outputs if isinstance(name, str))

    @cached_property
    def memory(self) -> dict[str, str]:
        """Value -> the first made of those that may share its memory."""
        found: dict[str, str] = {}
        for name, _ in self.makings:
            buffer = self.plan.buffers.get(name)
            shared = list(dict.fromkeys(found[base] for base in (buffer.views if buffer else ()) if base in found))
            found[name] = shared[0] if shared else name
            if len(shared) > 1:  # it may be in any of them: from here on they are one
                found = {value: shared[0] if memory in shared else memory for value, memory in found.items()}
        return found

    @cached_property
    def uses(self) -> dict[str, list[tuple[int, bool]]]:
        """Memory -> (position, whether it writes) of each that makes, reads or writes a value in it, in order."""
        found: dict[str, set[tuple[int, bool]]] = {}
        for name, at in self.makings:
            found.setdefault(self.memory[name], set()).add((at, self.memory[name] == name))
        for name, at in self.readings:
            writes = at < self.end and name in self.plan.pieces[at].writes
            found.setdefault(self.memory.get(name, name), set()).add((at, writes))
        return {memory: sorted(uses) for memory, uses in found.items()}

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """Value -> positions of those that make or read it, in order. Unlike `uses` not of what may share its memory:
        whether it does is not known, and where it does not, nobody else keeps its memory from being given out again."""
        found: dict[str, list[int]] = {}
        for name, at in (*self.makings, *self.readings):
            found.setdefault(name, []).append(at)
        return found

    @cached_property
    def streams(self) -> dict[str, tuple[int, ...]]:
        """Value -> streams that its memory may have been allocated on: its maker's, those of what it may share, and of
        what a piece that takes rows hands on in its stead where every row is kept."""
        handed_on: dict[str, str] = {}
        several = any(piece.stream for piece in self.plan.pieces)  # else all is from the caller's
        for _, piece in self.bodies() if several else ():
            if (apart := parted(piece.body)) is not None:
                places = zip(piece.returns, apart.same, strict=True)
                handed_on |= {name: piece.reads[place] for name, place in places if place is not None}
        found: dict[str, tuple[int, ...]] = {}
        for name, at in self.makings:
            own = 0 if at == START_AT else self.plan.pieces[at].stream
            buffer = self.plan.buffers.get(name)
            bases_of = (*(buffer.views if buffer else ()), *([handed_on[name]] if name in handed_on else ()))
            shared = (stream for base in bases_of for stream in found.get(base, ()))
            found[name] = tuple(dict.fromkeys((own, *shared)))
        return found

    @cached_property
    def lives(self) -> dict[str, tuple[int, int]]:
        """Value -> where it is made, and who is the last that uses its memory."""
        return {name: (at, self.uses[self.memory[name]][-1][0]) for name, at in self.makings}

    def bodies(self) -> Iterator[tuple[int, Piece]]:
        """Pieces that have a body, with their positions."""
        yield from ((at, piece) for at, piece in enumerate(self.plan.pieces) if isinstance(piece.body, GraphModule))

    def given_out(self, name: str, at: int) -> Iterator[int]:
        """Who may be given the memory of `name` first if it is freed behind position `at`, by stream."""
        yield from (again for stream in self.streams[name] if (again := self.next_on(stream, at)) is not None)

    def next_on(self, stream: int, at: int) -> int | None:
        """The first piece behind position `at` on `stream`."""
        places = self._on.get(stream, [])
        later = bisect_right(places, at)
        return places[later] if later < len(places) else None

    @cached_property
    def _on(self) -> dict[int, list[int]]:
        """Stream -> positions of its pieces."""
        found: dict[int, list[int]] = {}
        for at, piece in enumerate(self.plan.pieces):
            found.setdefault(piece.stream, []).append(at)
        return found

    def name(self, at: int) -> str:
        return START if at == START_AT else END if at == self.end else self.plan.pieces[at].name


def views_in(body: GraphModule, reads: Sequence[str], returns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Result of a piece -> values whose memory it may share: those it reads, or the first result in the same memory."""
    names: dict[Node, str] = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), reads, strict=True))
    (results,) = body.graph.output_node().args
    found: dict[str, tuple[str, ...]] = {}
    known: Ends = {}
    for node, name in zip(results, returns, strict=True):  # type: ignore[arg-type]
        ends = bases(node, known) if isinstance(node, Node) else []
        found[name] = tuple(dict.fromkeys(names[end] for end in ends if end in names))
        names |= {end: name for end in ends if end not in names}
    return found
