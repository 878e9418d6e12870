"""check_plan: what every plan must hold before anything runs it; a breach is an error that names two pieces.

    stream 0    piece_0 writes cache .......... piece_2 writes cache
    stream 1            \\__ piece_1 reads cache                        no event from piece_1 to piece_2: refused

The rules are sentences with who finds the breach, in order: each may rely on those above. Values that may share memory
(`Buffer.views`) count as one memory. What concerns order and the reuse of memory is happens_before's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from v41.errors import PlanBroken
from v41.passes.analysis.effects import begins_collective, effect_of, ends_collective, written_inputs
from v41.passes.analysis.happens_before import RACES, START_AT, Breach
from v41.passes.analysis.plan_facts import PlanFacts, views_in
from v41.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raises PlanBroken for the first rule that `plan` breaks, or one of the plans with side streams that it holds."""
    for each in (plan, *plan.sides):
        _check(each)


def _check(plan: Plan) -> None:
    facts = PlanFacts(plan)
    for rule, find in RULES:
        for first, second, detail in find(facts):
            source = next((plan.pieces[at].source for at in (second, first) if 0 <= at < facts.end), "the whole plan")
            raise PlanBroken(source, rule=rule, first=facts.name(first), second=facts.name(second), detail=detail)


def made_twice(facts: PlanFacts) -> Iterator[Breach]:
    seen: dict[str, int] = {}
    for name, at in [*facts.makings, *((piece.name, at) for at, piece in enumerate(facts.plan.pieces))]:
        if name in seen:
            yield seen[name], at, f"{name} comes from both"
        seen[name] = at


def read_too_early(facts: PlanFacts) -> Iterator[Breach]:
    for name, at in facts.readings:
        if name not in facts.made:
            yield at, at, f"nobody makes {name}"
        elif facts.made[name] >= at:
            yield facts.made[name], at, f"{name} is made only then"


def other_signature(facts: PlanFacts) -> Iterator[Breach]:
    for at, piece in facts.bodies():
        takes = sum(node.op == "placeholder" for node in piece.body.graph.nodes)
        (results,) = piece.body.graph.output_node().args
        gives = len(results) if isinstance(results, (tuple, list)) else 1
        if (takes, gives) != (len(piece.reads), len(piece.returns)):
            yield at, at, f"its body takes {takes} and returns {gives}"


def silent_write(facts: PlanFacts) -> Iterator[Breach]:
    for at, piece in enumerate(facts.plan.pieces):
        for name in piece.writes:
            if name not in piece.reads:
                yield facts.made.get(name, at), at, f"{name} is written and not among the reads"
    for at, piece in facts.bodies():
        written = written_inputs(piece.body)
        inner = (node for node in piece.body.graph.nodes if node.op == "placeholder")
        for node, name in zip(inner, piece.reads, strict=True):
            if node in written and name not in piece.writes:
                yield facts.made[name], at, f"the body writes {name}"


def silent_view(facts: PlanFacts) -> Iterator[Breach]:
    for at, piece in facts.bodies():
        for name, shared in views_in(piece.body, piece.reads, piece.returns).items():
            for base in shared:
                if facts.memory[name] != facts.memory[base]:
                    yield facts.made[base], at, f"the body returns {name} in the memory of {base}"


def other_life(facts: PlanFacts) -> Iterator[Breach]:
    for name, (born, dies) in facts.lives.items():
        buffer = facts.plan.buffers.get(name)
        if buffer is None:
            if "[" in facts.plan.values.get(name, ""):
                yield born, dies, f"{name} has no buffer"
        elif (buffer.born, buffer.dies) != (born, dies):
            yield born, dies, f"{name} lives there, and its buffer says from {buffer.born} to {buffer.dies}"


def parted_collective(facts: PlanFacts) -> Iterator[Breach]:
    last = dict(facts.readings)
    for at, piece in facts.bodies():
        graph = piece.body.graph
        names = dict(zip((node for node in graph.nodes if node.op == "placeholder"), piece.reads, strict=True))
        for node in graph.nodes:
            if ends_collective(node) and (name := names.get(node.all_input_nodes[0])):
                yield facts.made[name], at, f"{name} is begun there and waited for here"
        results = dict(zip(graph.output_node().all_input_nodes, piece.returns, strict=False))
        for node in graph.nodes:
            if begins_collective(node) and not _waited_for(node):
                yield at, last.get(results.get(node, ""), at), f"{node.name} is not waited for where it begins"


def _waited_for(node: Node) -> bool:
    """By all of its results, if it has several."""
    users = list(node.users)
    several = [user for user in users if "getitem" in str(user.target)]
    return any(map(ends_collective, users)) or (bool(several) and all(map(_waited_for, several)))


def strayed_collective(facts: PlanFacts) -> Iterator[Breach]:
    """Ranks agree on the order of collectives on one stream; between streams each GPU has an order of its own."""
    for at, piece in facts.bodies():
        if piece.stream and any(effect_of(node) == "collective" for node in piece.body.graph.nodes):
            yield at, at, f"it speaks to other ranks on stream {piece.stream}"


def read_after_free(facts: PlanFacts) -> Iterator[Breach]:
    freed = dict(reversed(facts.freed))
    for name, at in facts.readings:
        if freed.get(name, at) < at:
            yield freed[name], at, f"{name} is freed before it is read"


def not_freed_once(facts: PlanFacts) -> Iterator[Breach]:
    freed: dict[str, int] = {}
    for name, at in facts.freed:
        if name not in facts.made:
            yield at, at, f"it frees {name}, which nobody makes"
        elif name in freed:
            yield freed[name], at, f"both free {name}"
        freed[name] = at
    last = dict(facts.readings)
    for name, at in facts.made.items():
        if name not in freed and name not in facts.returned and (at != START_AT or name in last):
            yield at, last.get(name, at), f"nobody frees {name}"


RULES: tuple[tuple[str, Callable[[PlanFacts], Iterator[Breach]]], ...] = (
    ("gives every value and piece a name of its own", made_twice),
    ("reads only what was made before", read_too_early),
    ("calls every piece as its body is", other_signature),
    ("declares every write", silent_write),
    ("declares every view", silent_view),
    ("tells the life of every buffer", other_life),
    ("keeps a collective and its wait in one piece", parted_collective),
    ("keeps collectives on the caller's stream", strayed_collective),
    *RACES[:-1],
    ("frees nothing that is read later", read_after_free),
    ("frees every value once that is not returned", not_freed_once),
    RACES[-1],
)
