"""check_plan: what every plan must hold before anything runs it; a breach is an error that names two pieces.

    stream 0    piece_0 writes cache .......... piece_2 writes cache
    stream 1            \\__ piece_1 reads cache                        no event from piece_1 to piece_2: refused

The rules are sentences with who finds the breach, in order: each may rely on those above. Values that may share memory
(`Buffer.views`) count as one memory. Order between streams is what events show, never how fast something is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from torch.fx import Node

from v41.errors import PlanBroken
from v41.passes.analysis.effects import begins_collective, ends_collective, written_inputs
from v41.passes.analysis.happens_before import START_AT
from v41.passes.analysis.plan_facts import PlanFacts, views_in
from v41.plan import Plan

Breach = tuple[int, int, str]  # positions of two pieces, and what is wrong between them


def check_plan(plan: Plan) -> None:
    """Raises PlanBroken for the first rule that `plan` breaks."""
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


def backward_event(facts: PlanFacts) -> Iterator[Breach]:
    index = facts.order.index
    for event in facts.plan.events:
        after, before = index.get(event.after, facts.end), index.get(event.before, facts.end)
        if event.after not in index or event.before not in index:
            yield after, before, f"an event leads from {event.after} to {event.before}, and one of them does not exist"
        elif after >= before:
            yield after, before, "the wait is issued before the event is recorded, so it waits for nothing"


def unjoined(facts: PlanFacts) -> Iterator[Breach]:
    for at in range(facts.end):
        if not facts.order.before(START_AT, at):
            yield START_AT, at, "nothing leads there from the caller's stream"
        if not facts.order.before(at, facts.end):
            yield at, facts.end, "nothing leads back to the caller's stream"


def unordered_read(facts: PlanFacts) -> Iterator[Breach]:
    for name, at in facts.readings:
        if not facts.order.before(facts.made[name], at):
            yield facts.made[name], at, f"{name} may be read while it is made"


def unordered_write(facts: PlanFacts) -> Iterator[Breach]:
    for memory, uses in facts.uses.items():
        for at in (at for at, writes in uses if writes):
            for other, _ in uses:
                first, second = sorted((at, other))
                if first < second and not facts.order.before(first, second):
                    yield first, second, f"both use the memory of {memory}, one writes it, and they have no order"


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


def freed_in_use(facts: PlanFacts) -> Iterator[Breach]:
    """The allocator hands freed memory out again on the stream it came from, by order of issue, whoever uses it."""
    freed: dict[str, int] = {}
    for name, at in facts.freed:
        memory = facts.memory[name]
        freed[memory] = max(at, freed.get(memory, at))
    for memory in {facts.memory[name] for name in facts.returned}:
        freed.pop(memory, None)
    for memory, at in freed.items():
        maker = facts.made[memory]
        stream = 0 if maker == START_AT else facts.plan.pieces[maker].stream
        later = (i for i in range(at + 1, facts.end) if facts.plan.pieces[i].stream == stream)
        for again in islice(later, 1):
            for use in (use for use, _ in facts.uses[memory] if not facts.order.before(use, again)):
                yield use, again, f"the second may be given the memory of {memory} while the first still uses it"


RULES: tuple[tuple[str, Callable[[PlanFacts], Iterator[Breach]]], ...] = (
    ("gives every value and piece a name of its own", made_twice),
    ("reads only what was made before", read_too_early),
    ("calls every piece as its body is", other_signature),
    ("declares every write", silent_write),
    ("declares every view", silent_view),
    ("tells the life of every buffer", other_life),
    ("keeps a collective and its wait in one piece", parted_collective),
    ("records every event before it is waited for", backward_event),
    ("leads from the caller's stream through every piece back to it", unjoined),
    ("orders every read after the making", unordered_read),
    ("orders every write with all other uses of its memory", unordered_write),
    ("frees nothing that is read later", read_after_free),
    ("frees every value once that is not returned", not_freed_once),
    ("frees nothing that another stream still uses", freed_in_use),
)
