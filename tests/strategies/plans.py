"""Plans without bodies: written as text, or drawn so that only the order between streams can be wrong.

    plan("x cache", "out cache", "a: x -> y", "b@1: y cache* -> z, y", ...)      b on stream 1, writes cache, frees y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from hypothesis import strategies as st
from torch.fx import GraphModule

from v41.passes.analysis.plan_facts import PlanFacts
from v41.plan import END, START, Buffer, Event, NotKept, Piece, Plan


def piece(text: str) -> Piece:
    """ "name@stream: reads, those written with a star -> returns, frees"."""
    head, _, rest = text.partition(":")
    name, _, stream = head.partition("@")
    taken, _, given = rest.partition("->")
    returns, _, frees = given.partition(",")
    reads = taken.split()
    return Piece(
        name=name,
        reads=tuple(read.rstrip("*") for read in reads),
        returns=tuple(returns.split()),
        frees=tuple(frees.split()),
        writes=tuple(read[:-1] for read in reads if read.endswith("*")),
        border="drawn",
        key=name,
        source=f"model.py:{name}",
        nodes=1,
        body=cast(GraphModule, NotKept()),
        stream=int(stream or 0),
    )


def plan(inputs: str, outputs: str, *pieces: str, events: Sequence[str] = (), views: Sequence[str] = ()) -> Plan:
    """events: "a b" from a to b. views: "v base" for a value that may be in the memory of another."""
    made = tuple(map(piece, pieces))
    names = dict.fromkeys([*inputs.split(), *(name for each in made for name in each.returns)])
    bare = Plan(
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        values=dict.fromkeys(names, "f32[2]"),
        pieces=made,
        events=tuple(Event(*event.split()) for event in events),
    )
    shared = {view.split()[0]: tuple(view.split()[1:]) for view in views}
    return with_buffers(bare, shared)


def with_buffers(bare: Plan, views: dict[str, tuple[str, ...]]) -> Plan:
    """`bare` with the buffers that its pieces ask for."""
    buffers = {name: Buffer(name, "f32[2]", "caller", -1, -1, "8", views.get(name, ())) for name in bare.values}
    lives = PlanFacts(replace(bare, buffers=buffers)).lives
    lived = {name: replace(buffer, born=lives[name][0], dies=lives[name][1]) for name, buffer in buffers.items()}
    return replace(bare, buffers=lived)


@st.composite
def plans(draw: st.DrawFn, views: bool = False) -> Plan:
    """Up to five pieces on three streams. All begin and end with the caller's; frees are where the host may free."""
    values, texts, shared = ["x", "cache"], [], []
    for index in range(draw(st.integers(2, 5))):
        reads = draw(st.lists(st.sampled_from(values[-3:]), min_size=1, max_size=2, unique=True))
        stars = [draw(st.sampled_from(["", "", "*"])) for _ in reads]
        texts.append((f"p{index}@{draw(st.integers(0, 2))}", [r + s for r, s in zip(reads, stars, strict=True)]))
        values.append(f"v{index}")
        if views and draw(st.booleans()):
            shared.append(f"v{index} {draw(st.sampled_from(reads))}")
    outputs = draw(st.lists(st.sampled_from(values), max_size=2, unique=True))
    last = {read.rstrip("*"): index for index, (_, reads) in enumerate(texts) for read in reads}
    last = {f"v{index}": index for index in range(len(texts))} | last  # what nobody reads is freed where it is made
    pieces = [
        f"{head}: {' '.join(reads)} -> v{i}, {' '.join(v for v in last if last[v] == i and v not in outputs)}"
        for i, (head, reads) in enumerate(texts)
    ]
    names = [head.partition("@")[0] for head, _ in texts]
    ends = [f"{START} {name}" for name in names] + [f"{name} {END}" for name in names]
    made = [f"{a} {b}" for i, a in enumerate(names) for b, (_, reads) in zip(names, texts, strict=True)
            if f"v{i}" in {read.rstrip("*") for read in reads}]  # fmt: skip
    others = [f"{a} {b}" for i, a in enumerate(names) for b in names[i + 1 :] if f"{a} {b}" not in made]
    kept = draw(st.sampled_from([made, made, made[1:], made[:-1]]))  # mostly, what is read is made before
    drawn = [*kept, *(pair for pair in others if draw(st.booleans()))]
    return plan("x cache", " ".join(outputs), *pieces, events=[*ends, *drawn], views=shared)
