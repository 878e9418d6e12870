"""Captured execution has the bits of the uncaptured one at any sizes, and changes caches once a step.

CpuGraphs keeps the rules of CUDA graphs at their worst, and three seeded bugs show that a breach of them is seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_graphs import CpuGraphs
from v41.plan import Piece, Plan
from v41.report import Captures
from v41.runtime import chain, replay
from v41.runtime.capture import CudaGraphs
from v41.runtime.executor import executor
from v41.runtime.replay import Replayer
from v41.runtime.segments import segments

WIDTH, SLOTS, PAD = 4, 8, 8
ROWS, BLOCKS, DECODE = (1, 2, 4, 8, 16, 32), (1, 2, 4), 4


def piece(name: str, reads: str, returns: str, frees: str, sizes: str, writes: str = "", **facts: Any) -> Piece:
    words = [tuple(text.split()) for text in (reads, returns, frees, writes)]
    body = torch.fx.GraphModule({}, torch.fx.Graph())
    return Piece(name, *words, "-", name, "-", 1, body, tuple(sizes.split()), **facts)  # type: ignore[arg-type]


PLAN = Plan(
    inputs=("u0", "x", "slots", "w", "cache", "u1", "blocks"),
    outputs=("out", None, "y", "u0"),
    values={
        "u0": "int u0",
        "x": "f32[u0, 4]",
        "slots": "i64[u0]",
        "w": "f32[4, 4]",
        "cache": "f32[9, 4]",
        "u1": "int u1",
        "blocks": "i64[u1]",
        **dict.fromkeys(("h", "y", "s", "t", "z", "out"), "f32[u0, 4]"),
    },
    pieces=(
        piece("project", "x w", "h", "x", "u0"),
        piece("store", "h slots cache", "y t", "h slots", "u0", "cache"),
        piece("attend", "y cache blocks", "s", "cache blocks", "u0 u1"),
        piece("add", "s y", "z", "s", "u0"),
        piece("scale", "z t w", "out", "z t w", "u0"),
    ),
    sizes={"u0": "rows", "u1": "blocks"},
    buckets={"rows": ROWS, "blocks": BLOCKS},
    whole={"rows": DECODE},
)


def store(h: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    before = cache[slots]
    cache[slots] = h + 0.5 * before
    return h + before, before.tanh()


def attend(y: Tensor, cache: Tensor, blocks: Tensor) -> tuple[Tensor]:
    keys = cache[blocks]
    return ((y @ keys.T).softmax(-1) @ keys,)


ARTIFACTS: dict[str, Callable[..., Any]] = {
    "project": lambda x, w: (x @ w,),
    "store": store,
    "attend": attend,
    "add": lambda s, y: (s.sin() + y,),
    "scale": lambda z, t, w: (z @ w + t,),
}
W = torch.linspace(-0.5, 0.5, 16).view(4, 4)


class Pair:
    """The same steps captured and uncaptured, each on a cache of its own."""

    def __init__(self, plan: Plan = PLAN, artifacts: dict[str, Any] | None = None) -> None:
        artifacts = ARTIFACTS | (artifacts or {})
        self.graphs, self.log = CpuGraphs(), Captures()
        self.captured = Replayer(plan, artifacts, self.graphs, self.log)
        self.plain = executor(plan, artifacts)
        self.caches = [torch.ones(SLOTS + 1, WIDTH) for _ in range(2)]
        self.results: list[tuple[Any, Any]] = []
        self.draw = torch.Generator().manual_seed(0)

    def step(self, rows: int, blocks: int, pads: int = 0) -> None:
        x = torch.randn(rows, WIDTH, generator=self.draw)
        slots = torch.arange(rows) % SLOTS
        x[rows - pads :], slots[rows - pads :] = torch.nan, PAD
        others = [slot for slot in range(SLOTS) if slot not in slots[: rows - pads]]
        for run, cache in zip((self.captured, self.plain), self.caches, strict=True):
            before = cache[others]
            inputs = [rows, x.clone(), slots.clone(), W, cache, blocks, torch.arange(blocks)]
            self.results.append((run(inputs), rows - pads))  # type: ignore[arg-type]
            assert inputs == [] and torch.equal(cache[others], before), "pads write the pad slot alone"
        self.check()

    def check(self) -> None:
        """All results so far, the old ones too: no replay may touch what was handed out."""
        ours, theirs = self.caches
        assert torch.equal(ours[:PAD], theirs[:PAD])
        for (one, real), (other, _) in zip(self.results[::2], self.results[1::2], strict=True):
            assert torch.equal(one[0][:real], other[0][:real]) and torch.equal(one[2][:real], other[2][:real])
            assert one[1] is None and one[3] == other[3]


sizes = st.tuples(st.sampled_from((*ROWS, 3, 40)), st.sampled_from((*BLOCKS, 3)))


@settings(max_examples=12)
@given(st.lists(sizes, min_size=1, max_size=14), st.data())
@torch.no_grad()
def test_any_steps_have_the_bits_of_the_uncaptured_run(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    pair = Pair()
    for rows, blocks in steps:
        pair.step(rows, blocks, data.draw(st.integers(0, rows - 1)))
    whole = [(r, b) for r, b in steps if r in ROWS and r <= DECODE and b in BLOCKS]
    chains = [r for r, b in steps if r in ROWS and (r, b) not in whole]
    graphs = sum(whole.count(step) > 1 for step in set(whole)) + 2 * sum(chains.count(rows) > 1 for rows in set(chains))
    assert len(pair.log.captured) == len(pair.graphs.graphs) == graphs and not pair.log.errors + pair.log.dropped
    assert pair.log.warm_ups == pair.graphs.warm_ups == len(set(whole)) + len(set(chains))
    assert pair.log.replays == len(whole) - len(set(whole))
    assert pair.log.segment_replays == 2 * (len(chains) - len(set(chains)))
    assert sum(pair.log.uncaptured.values()) == sum(rows not in ROWS for rows, _ in steps)


@torch.no_grad()
def test_growing_shrinking_alternating() -> None:
    pair = Pair()
    for rows in (*ROWS, *reversed(ROWS), *(1, 32) * 3, *(4, 2) * 3, 40, 3, 0):
        pair.step(rows, 2)
    assert sorted(pair.log.captured) == sorted(
        [*(f"rows={n} blocks=2" for n in (1, 2, 4)), *(f"rows={n} segment_{i}" for n in (8, 16, 32) for i in (0, 2))]
    )
    assert pair.log.uncaptured == {"rows above 4": 1, "rows=3 is in no bucket": 1, "rows=0 is in no bucket": 1}
    assert pair.log.piecewise == {"rows above 4": 9}
    assert pair.log.host_us is not None and pair.log.host_us > 0


def test_segments_are_runs_that_depend_on_rows_alone() -> None:
    found = [(s.captured, [p.name for p in s.pieces], s.reads, s.returns, s.frees) for s in segments(PLAN)]
    assert found == [
        (True, ["project", "store"], ("x", "w", "slots", "cache"), ("y", "t"), ("x", "slots")),
        (False, ["attend"], ("y", "cache", "blocks"), ("s",), ("cache", "blocks")),
        (True, ["add", "scale"], ("s", "y", "t", "w"), ("out",), ("s", "t", "w")),
    ]


def test_what_reads_an_input_that_cannot_be_copied_is_loose() -> None:
    plan = replace(PLAN, values=PLAN.values | {"slots": "i64[2*u0]"})
    found = [(s.captured, [p.name for p in s.pieces]) for s in segments(plan)]
    assert found == [(True, ["project"]), (False, ["store", "attend"]), (True, ["add", "scale"])]


def test_what_writes_a_value_that_a_capture_would_copy_is_loose() -> None:
    add = replace(PLAN.pieces[3], writes=("s",))
    found = [(s.captured, [p.name for p in s.pieces]) for s in segments(replace(PLAN, pieces=(*PLAN.pieces[:3], add)))]
    assert found == [(True, ["project", "store"]), (False, ["attend", "add"])]


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a step's results are no copies": lambda patch: patch.setattr(replay, "copies", as_they_are),
    "a chain's results are no copies": lambda patch: patch.setattr(chain, "copies", as_they_are),
    "a step reads inputs where the caller has them": lambda patch: patch.setattr(replay, "with_copies", in_place),
    "a chain reads inputs where the caller has them": lambda patch: patch.setattr(chain, "with_copies", in_place),
    "what a segment returned is let go at once": lambda patch: patch.setattr(chain.SegmentRun, "_capture", let_go),
}


def as_they_are(results: Sequence[Any], rebuilt: Sequence[int]) -> tuple[Any, ...]:
    return tuple(results)


def in_place(inputs: Sequence[Any], places: Sequence[int], views: Sequence[Tensor]) -> list[Any]:
    return list(inputs)


def let_go(run: Any, args: Sequence[Any], original: Any = chain.SegmentRun._capture) -> None:
    original(run, args)


@pytest.mark.parametrize("bug", BUGS)
@torch.no_grad()
def test_a_seeded_bug_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    pair = Pair()
    with pytest.raises((AssertionError, IndexError)):
        for rows in (4, 4, 4, 16, 16, 16, 4, 16):
            pair.step(rows, 2)


@torch.no_grad()
def test_a_capture_that_raises_runs_uncaptured_from_then_on_and_is_told() -> None:
    def asks(z: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor]:
        return (z @ w + t * float(w.sum()),)

    pair = Pair(artifacts={"scale": asks})
    for rows in (2, 16) * 4:
        pair.step(rows, 1)
    assert [line.split(":")[0] for line in pair.log.errors] == ["rows=2 blocks=1", "rows=16 segment_2"]
    assert all("RuntimeError: operation not permitted" in line for line in pair.log.errors)
    assert pair.log.captured == ["rows=16 segment_0"] and pair.log.segment_replays == 3


@torch.no_grad()
def test_another_address_drops_the_graph() -> None:
    pair = Pair()
    for rows in (2, 16):
        pair.step(rows, 1)
        pair.step(rows, 1)
    pair.caches[0] = pair.caches[0].clone()
    for rows in (2, 16):
        pair.step(rows, 1)
        assert pair.log.dropped[-1].startswith(f"rows={rows}")
        pair.step(rows, 1)
        pair.step(rows, 1)
    assert pair.log.warm_ups == 4 and len(pair.log.captured) == 6 and len(pair.log.dropped) == 2


@torch.no_grad()
def test_nothing_is_captured_or_replayed_while_the_caller_captures() -> None:
    pair = Pair()
    for around in (False, True, True, False, True):
        pair.graphs.around = around
        pair.step(2, 1)
    assert len(pair.log.captured) == pair.log.replays == pair.log.warm_ups == 1
    assert pair.log.uncaptured == {"the caller captures a graph around it": 3}


class Stream:
    """Of a GPU, as far as it waits for others."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_step_on_another_stream_waits_for_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps share the buffers of their graphs, so two streams of the caller's must not run them at once."""
    a, b = Stream(), Stream()
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs.stream, graphs.latest = SimpleNamespace(device=torch.device("cpu")), None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for current in (a, a, b, b, a):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        graphs.follow()
    assert (a.waited, b.waited) == ([b], [a])


def test_a_graph_of_the_callers_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA breaks off a capture that is to wait for what is not in it; and what it records runs only later."""
    a, b = Stream(), Stream()
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs.stream, graphs.latest = SimpleNamespace(device=torch.device("cpu")), a  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: b)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphs.follow()
    assert b.waited == [] and graphs.latest is a


@torch.no_grad()
def test_every_step_that_has_the_turn_follows_and_one_that_cannot_gives_it_back() -> None:
    pair, failing = Pair(), False

    def follow() -> None:
        pair.graphs.followed += 1
        if failing:
            raise RuntimeError("no stream")

    pair.captured.turn.follow = follow
    for _ in range(3):  # uncaptured, captured, replayed
        pair.step(2, 1)
    assert pair.graphs.followed == 3
    failing = True
    with pytest.raises(RuntimeError, match="no stream"):
        pair.step(2, 1)
    failing = False
    pair.step(2, 1)
    assert pair.graphs.followed == 5
    pair.graphs.around = True
    pair.step(2, 1)
    assert pair.graphs.followed == 5


@torch.no_grad()
def test_inputs_that_lie_elsewhere_every_step_are_not_warmed_up_for_ever() -> None:
    pair, kept = Pair(), []
    for _ in range(7):
        kept.append(pair.caches[0])
        pair.caches[0] = pair.caches[0].clone()
        pair.step(2, 1)
    assert pair.log.warm_ups == 4 and pair.log.uncaptured == {"an input lies at another address every step": 3}
    pair.step(2, 1)
    pair.step(2, 1)
    assert pair.log.captured == ["rows=2 blocks=1"] and pair.log.replays == 2 and not pair.log.dropped


@torch.no_grad()
def test_a_warm_up_that_raises_is_none() -> None:
    calls = []

    def fails_once(x: Tensor, w: Tensor) -> tuple[Tensor]:
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("out of range")
        return (x @ w,)

    pair = Pair(artifacts={"project": fails_once})
    with pytest.raises(IndexError):
        pair.step(2, 1)
    pair.step(2, 1)
    assert pair.log.warm_ups == 1 and not pair.log.captured


@torch.no_grad()
def test_a_chain_that_raised_while_it_was_captured_is_captured_anew() -> None:
    fails: list[int] = []

    def sometimes(y: Tensor, cache: Tensor, blocks: Tensor) -> tuple[Tensor]:
        if fails:
            fails.pop()
            raise IndexError("out of range")
        return attend(y, cache, blocks)

    pair = Pair(artifacts={"attend": sometimes})
    pair.step(16, 1)
    fails.append(1)
    with pytest.raises(IndexError):
        pair.step(16, 1)
    pair.results.clear()
    pair.caches[0].copy_(pair.caches[1])
    pair.step(16, 1)
    pair.step(16, 1)
    assert pair.log.captured == ["rows=16 segment_0", *(f"rows=16 segment_{i}" for i in (0, 2))]
    assert pair.log.segment_replays == 4 and not pair.log.errors


REFUSALS = {
    "input x is not contiguous": lambda plan: plan,
    "project cannot be captured: it asks for a value": lambda plan: replace(
        plan, pieces=(replace(plan.pieces[0], uncapturable="it asks for a value"), *plan.pieces[1:])
    ),
    "blocks has no buckets: options={'buckets': {'blocks': (1, 2, 4)}} would give it some": lambda plan: replace(
        plan, buckets={"rows": ROWS}
    ),
    "input x is written in place, and has a size that changes": lambda plan: replace(
        plan, pieces=(replace(plan.pieces[0], writes=("x",)), *plan.pieces[1:])
    ),
    "input u1 is the number int u1, which names no size": lambda plan: replace(
        plan, sizes={"u0": "rows"}, values=plan.values | {"blocks": "i64[4]"}
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
@torch.no_grad()
def test_the_log_says_why_a_step_is_not_one_graph(reason: str) -> None:
    plan = REFUSALS[reason](PLAN)
    log = Captures()
    run = Replayer(plan, ARTIFACTS, CpuGraphs(), log)
    x = torch.ones(WIDTH, 2).T if "contiguous" in reason else torch.ones(2, WIDTH)
    for _ in range(3):
        run([2, x, torch.arange(2), W, torch.ones(SLOTS + 1, WIDTH), 4, torch.arange(4)])
    assert log.piecewise | log.uncaptured == {reason: 3} and log.replays == 0


def test_a_plan_without_sizes_is_one_graph() -> None:
    plan = Plan(("a",), ("b",), {"a": "f32[2]", "b": "f32[2]"}, (piece("add", "a", "b", "a", ""),))
    log = Captures()
    run = Replayer(plan, {"add": lambda a: (a + 1,)}, CpuGraphs(), log)
    a = torch.ones(2)
    for n in range(3):
        a.fill_(n)
        assert run([a])[0].tolist() == [n + 1, n + 1]
    assert log.captured == [""] and log.replays == 2


@torch.no_grad()
def test_kernels_are_compiled_ahead_of_each_set_of_sizes_once() -> None:
    heard, ran = list[tuple[dict[str, int], bool]](), list[int]()

    def add(a: torch.Tensor) -> tuple[torch.Tensor]:
        ran.append(len(heard))
        return (a + 1,)

    plan = Plan(("a",), ("b",), {"a": "f32[u0]", "b": "f32[u0]"}, (piece("add", "a", "b", "a", ""),), {"u0": "rows"},
                {"rows": (2, 4)}, {"rows": 4})  # fmt: skip
    run = Replayer(plan, {"add": add}, CpuGraphs(), Captures(), ahead=lambda *told: heard.append(told))
    for rows in (2, 4, 2, 3, 4, 2):
        run([torch.ones(rows)])
    assert heard == [({"u0": 2}, True), ({"u0": 4}, True)], "3 rows are in no bucket"
    assert ran[:2] == [1, 2], "before it warms up"
