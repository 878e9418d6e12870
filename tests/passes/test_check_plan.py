"""check_plan accepts a plan exactly where no timing of its streams changes a result, and names the pieces otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.passes.test_partition import ROWS, layers, with_seams
from tests.strategies.plans import plan, plans
from v41.errors import PlanBroken
from v41.passes.analysis.happens_before import START_AT
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.check_plan import RULES, check_plan, parted_collective
from v41.passes.partition import partition
from v41.plan import END, START, Event, Plan

# stream 0: a, c, d; stream 1: b. y is freed by c while b may still read it, and d waits for b
A, B, C, D = "a: x -> y, x", "b@1: y cache* -> z", "c: y -> w, y", "d: z w cache* -> out, z w"
SOUND = plan("x cache", "out cache", A, B, C, D, events=["a b", "b d"])


def sound(*pieces: str, events: tuple[str, ...] = ("a b", "b d"), views: tuple[str, ...] = ()) -> Plan:
    """The sound plan with other pieces in place of those of the same name."""
    changed = {text[0]: text for text in (A, B, C, D)} | {text[0]: text for text in pieces}
    return plan("x cache", "out cache", *changed.values(), events=events, views=views)


def renamed_buffer(**changes: Any) -> Plan:
    return replace(SOUND, buffers=SOUND.buffers | {"y": replace(SOUND.buffers["y"], **changes)})


def traced(function: Callable[..., Any], change: Callable[[Plan], Plan]) -> Plan:
    """The plan of `function` cut at its seams, changed."""
    made = partition(with_seams(function, ROWS, static=(torch.zeros(4, 4),)), cut_at=["seam"])
    check_plan(made)
    return change(made)


def writes_then_reads(x: Tensor, cache: Tensor) -> Tensor:
    y = (x + x).tanh()
    cache.add_(1)
    return (y + cache.sum()).tanh()


def forgets_writes(made: Plan) -> Plan:
    return replace(made, pieces=tuple(replace(piece, writes=()) for piece in made.pieces))


def returns_a_view(x: Tensor, cache: Tensor) -> Tensor:
    y = (x.exp()[:, :2] + 1).tanh()
    row = (y + y).exp().t()
    return (row.t() + 1).tanh() + row.t()


def forgets_views(made: Plan) -> Plan:
    return replace(made, buffers={name: replace(buffer, views=()) for name, buffer in made.buffers.items()})


def drops_a_read(made: Plan) -> Plan:
    first, *others = made.pieces
    return replace(made, pieces=(replace(first, reads=first.reads[:-1]), *others))


def collectives(*together: bool) -> Plan:
    """all_reduce in piece 0 and its wait there, or in piece 1, or nowhere."""
    reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default

    def body(*ops: Any) -> GraphModule:
        graph = Graph()
        value = graph.placeholder("x")
        for op in ops:
            value = graph.call_function(op, (value, "sum", "0") if op is reduce else (value,))
        graph.output((value,))
        return GraphModule({}, graph)

    first, second = together
    bodies = [body(reduce, *[wait] * first), body(*[wait] * second)]
    bare = plan("x", "z", "a: x -> y, x", "b: y -> z, y", views=[] if second else ["z y"])
    return replace(bare, pieces=tuple(replace(p, body=b) for p, b in zip(bare.pieces, bodies, strict=True)))


def strayed(stream: int) -> Plan:
    """A collective and its wait in a piece on `stream`, in order with all else."""
    made = collectives(True, False)
    first, second = made.pieces
    events = [Event(START, "a"), Event("a", "b")] if stream else []
    return replace(made, pieces=(replace(first, stream=stream), second), events=tuple(events))


BUGS: dict[str, tuple[Callable[[], Plan], str, str, str]] = {  # -> the plan, words of the rule, both pieces
    "a value made twice": (lambda: sound("d: z w cache* -> y out, z w"), "a name of its own", "a", "d"),
    "a value with a piece's name": (lambda: sound("d: z w cache* -> c out, z w"), "a name of its own", "d", "c"),
    "a read before the making": (lambda: sound("a: x w -> y, x"), "made before", "c", "a"),
    "a read of nothing": (lambda: sound("c: y v -> w, y"), "made before", "c", "c"),
    "a write of what it does not read": (
        lambda: replace(SOUND, pieces=(replace(SOUND.pieces[0], writes=("cache",)), *SOUND.pieces[1:])),
        "declares every write", START, "a"),
    "a body that writes more": (
        lambda: traced(writes_then_reads, forgets_writes), "declares every write", START, "piece_4"),
    "a body that takes more": (lambda: traced(layers, drops_a_read), "as its body is", "piece_0", "piece_0"),
    "a body that returns a view": (
        lambda: traced(returns_a_view, forgets_views), "declares every view", "piece_2", "piece_2"),
    "a buffer that dies early": (lambda: renamed_buffer(dies=1), "the life of every buffer", "a", "c"),
    "a buffer born late": (lambda: renamed_buffer(born=1), "the life of every buffer", "a", "c"),
    "no buffer": (
        lambda: replace(SOUND, buffers={n: b for n, b in SOUND.buffers.items() if n != "w"}),
        "the life of every buffer", "c", "d"),
    "a collective waited for elsewhere": (lambda: collectives(False, True), "a collective and its wait", "a", "b"),
    "a collective nobody waits for": (lambda: collectives(False, False), "a collective and its wait", "a", "b"),
    "a collective on a side stream": (lambda: strayed(1), "on the caller's stream", "a", "a"),
    "an event that goes back": (lambda: sound(events=("a b", "b d", "d b")), "before it is waited for", "d", "b"),
    "an event to itself": (lambda: sound(events=("a b", "b d", "b b")), "before it is waited for", "b", "b"),
    "an event to nowhere": (lambda: sound(events=("a b", "b d", "b e")), "before it is waited for", "b", END),
    "a stream nobody forks": (lambda: sound(events=("b d",)), "back to it", START, "b"),
    "a stream nobody joins": (lambda: sound(events=("a b",)), "back to it", "b", END),
    "a read while it is made, forked": (lambda: sound(events=("start b", "b d")), "read after the making", "a", "b"),
    "a read while it is made, joined": (lambda: sound(events=("a b", "b end")), "read after the making", "b", "d"),
    "two writes in no order": (
        lambda: sound("b@1: y cache* -> z, z", "d: w cache* -> out, w", events=("a b", "b end")),
        "orders every write", "b", "d"),
    "a read beside a write": (lambda: sound("c: y cache -> w, y"), "orders every write", "b", "c"),
    "a read of a view beside a write": (lambda: sound(views=("y cache",)), "orders every write", "b", "c"),
    "a read after the free": (lambda: sound("b@1: y cache* -> z, y", "c: y -> w"), "read later", "b", "c"),
    "a value nobody frees": (lambda: sound("c: y -> w"), "frees every value once", "a", "c"),
    "a value freed twice": (lambda: sound("d: z w cache* -> out, z w y"), "frees every value once", "c", "d"),
    "a result that is freed": (lambda: sound("d: z w cache* -> out, z w cache"), "read later", "d", END),
    "a free of nothing": (lambda: sound("d: z w cache* -> out, z w v"), "frees every value once", "d", "d"),
    "memory given out while a side stream reads": (
        lambda: sound("b@1: y -> z, z", "d: w cache* -> out, w", events=("a b", "b end")),
        "another stream still uses", "b", "d"),
    "memory given out since another value, held longer, might be in it": (
        lambda: plan("x cache", "out cache", "a: x -> y s, x", "b@1: y cache* -> z, y", "c: s -> w,",
                     "d: z w s cache* -> out, z w s", events=["a b", "b d"], views=["s y"]),
        "another stream still uses", "b", "c"),
    "memory given out on the stream of what it might be in": (
        lambda: plan("x cache", "out cache", "a: x -> y, x", "b@1: y -> s, y", "c@2: s -> w, s", "d: cache* -> t, t",
                     "e: w -> out, w", events=["a b", "b c", "b d", "c e"], views=["s y"]),
        "another stream still uses", "c", "d"),
}  # fmt: skip


def test_a_sound_plan_passes() -> None:
    check_plan(SOUND)
    assert [SOUND.pieces[i].stream for i in range(4)] == [0, 1, 0, 0]


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_plan_is_refused_with_both_pieces(bug: str) -> None:
    make, rule, first, second = BUGS[bug]
    with pytest.raises(PlanBroken) as caught:
        check_plan(make())
    assert rule in str(caught.value.facts["rule"])
    assert (caught.value.facts["first"], caught.value.facts["second"]) == (first, second)


def test_what_may_lie_in_two_memories_makes_them_one() -> None:
    made = plan("x y u", "v", "a: x y u -> v w,", "b: v -> t,", views=["v x y", "t v"])
    assert PlanFacts(made).memory == {"x": "x", "y": "x", "u": "u", "v": "x", "w": "w", "t": "x"}


def test_every_rule_has_a_bug() -> None:
    assert [rule for rule, _ in RULES if not any(words in rule for _, words, _, _ in BUGS.values())] == []


def test_plans_with_side_streams_are_checked_wherever_they_are_held() -> None:
    wrong = sound(events=("a b",))
    for held in (replace(SOUND, overlapped=wrong), replace(SOUND, overlapped=replace(SOUND, overlapped=wrong))):
        with pytest.raises(PlanBroken, match="back to it"):
            check_plan(held)
    check_plan(replace(SOUND, overlapped=replace(SOUND, overlapped=SOUND)))
    assert wrong.sides == ()


def several(*waited: bool) -> Plan:
    """One collective of two tensors, whose results are waited for, or not."""
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops._c10d_functional.all_reduce_coalesced.default, ([x, x], "sum", "0"))
    results = [graph.call_function(getitem, (both, i)) for i in range(2)]
    wait = torch.ops._c10d_functional.wait_tensor.default
    graph.output(tuple(graph.call_function(wait, (y,)) if each else y for y, each in zip(results, waited, strict=True)))
    made = plan("x", "y z", "a: x -> y z, x")
    return replace(made, pieces=(replace(made.pieces[0], body=GraphModule({}, graph)),))


@pytest.mark.parametrize("waited", [(True, True), (True, False), (False, True)])
def test_each_result_of_a_collective_of_several_is_waited_for(waited: tuple[bool, bool]) -> None:
    breaches = [why for _, _, why in parted_collective(PlanFacts(several(*waited)))]
    assert [why.partition(" ")[2] for why in breaches] == ["is not waited for where it begins"] * (not all(waited))


def test_a_wait_in_the_same_piece_passes() -> None:
    check_plan(collectives(True, False))
    check_plan(strayed(0))
    assert len(collectives(True, False).pieces) == 2


def test_the_error_says_where() -> None:
    with pytest.raises(PlanBroken, match=r"orders every read.*; a and b: y may be read.*\n  at   model.py:b"):
        check_plan(sound(events=("start b", "b d")))


# The oracle: what the pieces see when the GPU runs them in any order that streams and events leave open.


def timings(plan: Plan) -> Iterator[tuple[int, ...]]:
    """Every order of the pieces that a GPU may take, by streams and events alone."""
    index = {piece.name: i for i, piece in enumerate(plan.pieces)}
    pairs = {(index[e.after], index[e.before]) for e in plan.events if e.after in index and e.before in index}
    pairs |= {(i, j) for i in index.values() for j in index.values()
              if i < j and plan.pieces[i].stream == plan.pieces[j].stream}  # fmt: skip
    for order in permutations(index.values()):
        if all(order.index(a) < order.index(b) for a, b in pairs):
            yield order


def layouts(plan: Plan) -> Iterator[dict[str, str | None]]:
    """Every way in which values can lie that may share memory: in that of a value, or (None) in memory of their own."""
    shared = {name: (*buffer.views, None) for name, buffer in plan.buffers.items() if buffer.views}
    yield from (dict(zip(shared, chosen, strict=True)) for chosen in product(*shared.values()))


class Allocator:
    """Addresses as the host gives them out, in order of issue: freed ones go back to the stream they came from."""

    def __init__(self, plan: Plan, layout: dict[str, str | None]) -> None:
        self.plan, self.layout = plan, layout
        self.address: dict[str, int] = {name: i for i, name in enumerate(plan.inputs)}
        stream = dict.fromkeys(self.address.values(), 0)
        free: set[int] = set()
        self.scratch: list[set[int]] = []  # what each piece overwrites: all that is free on its stream
        freed: set[str] = set()
        for piece in plan.pieces:
            self.scratch.append({a for a in free if stream[a] == piece.stream})
            for name in piece.returns:
                base = layout.get(name)
                self.address[name] = self.address[base] if base else len(stream)
                stream.setdefault(self.address[name], piece.stream)
            freed |= set(piece.frees)
            held = {address for name, address in self.address.items() if name not in freed}
            free = set(self.address.values()) - held


def seen(plan: Plan, order: tuple[int, ...], memory: Allocator) -> dict[str, Any]:
    """What every piece finds in what it reads, and the caller in the outputs."""
    content: dict[int, Any] = {memory.address[name]: name for name in plan.inputs}
    found: dict[str, Any] = {}
    for at in order:
        piece = plan.pieces[at]
        content |= {address: f"scratch of {piece.name}" for address in memory.scratch[at]}
        found[piece.name] = tuple(content.get(memory.address[name]) for name in piece.reads)
        content |= {memory.address[name]: (piece.name, "writes", *found[piece.name]) for name in piece.writes}
        for name in piece.returns:
            if memory.layout.get(name) is None:
                content[memory.address[name]] = (piece.name, name, *found[piece.name])
    return found | {END: tuple(content.get(memory.address[name]) for name in plan.outputs)}


def depends_on_timing(plan: Plan) -> bool:
    memories = [Allocator(plan, layout) for layout in layouts(plan)]
    serial = [seen(plan, tuple(range(len(plan.pieces))), memory) for memory in memories]
    return any(seen(plan, order, memory) != wanted
               for order in timings(plan) for memory, wanted in zip(memories, serial, strict=True))  # fmt: skip


def accepted(plan: Plan) -> bool:
    try:
        check_plan(plan)
    except PlanBroken as error:
        assert "order" in str(error.facts["rule"]) or "still uses" in str(error.facts["rule"]), error
        return False
    return True


CHEAP = settings(max_examples=8 * settings().max_examples)  # nothing is traced


@CHEAP
@given(plans())
def test_accepts_exactly_what_no_timing_changes(drawn: Plan) -> None:
    assert accepted(drawn) is not depends_on_timing(drawn)


@CHEAP
@given(plans(views=True))
def test_accepts_nothing_that_a_timing_changes_though_values_share_memory(drawn: Plan) -> None:
    assert not (accepted(drawn) and depends_on_timing(drawn))


def test_the_oracle_sees_each_bug_of_order() -> None:
    of_order = ("read while it is made", "in no order", "beside a write", "given out")
    found = {bug: depends_on_timing(make()) for bug, (make, *_) in BUGS.items() if any(w in bug for w in of_order)}
    assert found and all(found.values()) and not depends_on_timing(SOUND)


def test_order_is_that_of_streams_and_events() -> None:
    before = PlanFacts(SOUND).order.before
    index = {"a": 0, "b": 1, "c": 2, "d": 3}
    pairs = {x + y for x in index for y in index if before(index[x], index[y])}
    assert pairs == {"ab", "ac", "ad", "bd", "cd"}
    assert all(before(START_AT, at) and before(at, 4) for at in range(4)) and not before(2, 1)
