"""replay: a Plan runs captured where its sizes lie on their ladders, whole or in segments, and uncaptured elsewhere.

    every size on a rung, none above Plan.whole    one graph a set of sizes      decode
    else, a size of segments on a rung             a graph a segment and rung    prefill
    else                                           uncaptured, and the log says which size lies where

A step of sizes seen for the first time runs uncaptured, on the stream that will capture: that is its warm-up, so it
changes caches once. The second time it is captured, then replayed. Inputs whose shape has a symbol are copied into
static buffers, all others must lie where they lay: another address drops the graph, and the step warms up again. What
raises during a capture runs uncaptured from then on. Results are copies, for the next replay overwrites what they are
copied from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any

from torch import Tensor

from v41._compat import addresses_of, copy_each, same_addresses
from v41.plan import Plan
from v41.report import Captures
from v41.runtime.capture import Graph, Graphs
from v41.runtime.chain import Chain, Rung
from v41.runtime.executor import Artifact, LanesOf, Run, executor
from v41.runtime.segments import segments
from v41.runtime.static_inputs import (
    StaticInputs,
    copies,
    no_buckets,
    place_of,
    symbolic,
    uncopyable,
    with_copies,
)


@dataclass(frozen=True)
class Seen:
    """One call of a Replayer: the graph of its sizes, if there is one, what went in and what came out."""

    whole: Whole | None
    inputs: list[Any]
    results: tuple[Any, ...]


RESTLESS = 4  # so many warm-ups in a row, and the sizes run uncaptured until addresses stay
WATCHER: ContextVar[list[Seen] | None] = ContextVar("v41_replay_watcher", default=None)  # gets the calls below it


class Turn:
    """Whose turn it is: one thread at a time, which can ask whether it has it already, and whose stream `follow` puts
    behind those of the turns before."""

    def __init__(self, follow: Callable[[], None]) -> None:
        self.lock, self.thread, self.follow = Lock(), -1, follow

    def is_mine(self) -> bool:
        return self.thread == get_ident()

    def __enter__(self) -> None:
        self.lock.acquire()
        self.thread = get_ident()
        try:
            self.follow()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.thread = -1
        self.lock.release()


class Replayer:
    """The boxed function that runs a plan, captured where it can be. One call at a time; one within another (by a
    dispatch mode, a finalizer) runs uncaptured, for the outer one has its inputs in the buffers.

    ahead: hears of the sizes, by symbol, of a step that is about to warm up, and whether it becomes one graph, and
    compiles what it will launch."""

    _boxed_call = True

    def __init__(
        self,
        plan: Plan,
        artifacts: Mapping[str, Artifact],
        graphs: Graphs,
        log: Captures,
        lanes: LanesOf | None = None,
        ahead: Callable[[Mapping[str, int], bool], None] = lambda sizes, whole: None,
    ) -> None:
        self.ahead = ahead
        self.plan, self.artifacts, self.graphs, self.log = plan, artifacts, graphs, log
        self.plain = executor(plan, artifacts)
        self.to_capture = executor(plan, artifacts, lanes)  # a step that becomes one graph: side streams branch off
        self.segments = segments(plan)
        self.moving = [i for i, name in enumerate(plan.inputs) if symbolic(plan.values[name])]
        self.fixed = [i for i, n in enumerate(plan.inputs) if "[" in plan.values[n] and i not in set(self.moving)]
        self.static = StaticInputs(plan)
        self.symbols = {symbol: place_of(plan, symbol) for symbol in plan.sizes}
        self.places = list(self.symbols.values())
        self.never = never_whole(plan)
        self.wholes: dict[tuple[int, ...], Whole] = {}
        self.of_segments = list(dict.fromkeys(segment.size for segment in self.segments if segment.size))
        self.pools = {size: graphs.apart() if i else graphs for i, size in enumerate(self.of_segments)}
        self.rungs: dict[tuple[str, int], Rung] = {}
        self.chains: dict[tuple[tuple[str, int], ...], Chain] = {}
        self.turn = Turn(graphs.follow)

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        start = time.perf_counter_ns()
        watcher = WATCHER.get()
        given = None if watcher is None else list(inputs)
        if self.graphs.capturing():
            return self._uncaptured("the caller captures a graph around it")(inputs)
        if self.turn.is_mine():
            return self._uncaptured("it was called within a call of itself")(inputs)
        with self.turn:
            whole = self.wholes.get(self._key(inputs))
            replays = self.log.replays
            results = self._choose(inputs)(inputs) if whole is None else whole(inputs)
            if self.log.replays > replays:
                self.log.host_ns += time.perf_counter_ns() - start
        if watcher is not None and given is not None:
            watcher.append(Seen(whole, given, results))
        return results

    def _key(self, inputs: list[Any]) -> tuple[int, ...]:
        return tuple([inputs[i] if axis is None else inputs[i].shape[axis] for i, axis in self.places])

    def _choose(self, inputs: list[Any]) -> Run:
        """How a step of sizes that have no graph of their own runs."""
        plan, key = self.plan, self._key(inputs)
        sizes = dict(zip((plan.sizes[symbol] for symbol in self.symbols), key, strict=True))
        crooked = next((plan.inputs[i] for i in self.moving if not inputs[i].is_contiguous()), None)
        if crooked is not None:
            return self._uncaptured(f"input {crooked} is not contiguous")
        reason = self.never or off_ladder(plan, sizes)
        if reason is None:
            self.ahead(dict(zip(self.symbols, key, strict=True)), True)
            whole = self.wholes[key] = Whole(self, label(sizes))
            return whole
        on = tuple((size, sizes[size]) for size in self.of_segments if sizes.get(size) in plan.buckets[size])
        if not on:
            return self._uncaptured(reason)
        self.log.piecewise[reason] = self.log.piecewise.get(reason, 0) + 1
        for size, value in on:
            if (size, value) not in self.rungs:
                self.rungs[size, value] = Rung(self, size, value, self.pools[size])
        if on not in self.chains:
            self.ahead(dict(zip(self.symbols, key, strict=True)), False)
            self.chains[on] = Chain(self, [self.rungs[each] for each in on])
        return self.chains[on]

    def restless(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Runs a step whose inputs lay elsewhere in each of the steps before."""
        return self._uncaptured("an input lies at another address every step")(inputs)

    def _uncaptured(self, reason: str) -> Run:
        self.log.uncaptured[reason] = self.log.uncaptured.get(reason, 0) + 1
        return self.plain


def never_whole(plan: Plan) -> str | None:
    """Why no step of `plan` can be one graph; None where one can."""
    for piece in plan.pieces:
        if piece.uncapturable is not None:
            return f"{piece.name} cannot be captured: {piece.uncapturable}"
    for name in plan.inputs:
        kind, _, symbol = plan.values[name].partition(" ")
        if kind in ("int", "float", "SymInt", "SymFloat") and symbol not in plan.sizes:
            return f"input {name} is the number {plan.values[name]}, which names no size"
    copied = [name for name in plan.inputs if symbolic(plan.values[name])]
    return next(filter(None, (uncopyable(plan, name) for name in copied)), None)


def off_ladder(plan: Plan, sizes: Mapping[str, int]) -> str | None:
    """Which size keeps a step from being one graph, and why; None where none does."""
    for name, size in sizes.items():
        if name not in plan.buckets:
            return no_buckets(name)
        if size > plan.whole.get(name, size):
            return f"{name} above {plan.whole[name]}"
        if size not in plan.buckets[name]:
            return f"{name}={size} is in no bucket"
    return None


def label(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


class Whole:
    """A step of one set of sizes as one graph."""

    def __init__(self, owner: Replayer, name: str) -> None:
        self.owner, self.name = owner, name
        self.graph: Graph | None = None
        self.addresses: list[int | None] = []  # of the inputs when it warmed up
        self.views: list[Tensor] = []
        self.failed = False
        self.moves = 0  # warm-ups since a graph was captured

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        if not same_addresses(inputs, self.addresses, owner.fixed):
            if self.moves < RESTLESS:
                return self._warm_up(inputs)
            self.addresses = addresses_of(inputs, owner.fixed)
            return owner.restless(inputs)
        if self.failed or (self.graph is None and not self._capture(inputs)):
            return owner.plain(inputs)
        moving = [inputs[i] for i in owner.moving]
        inputs.clear()
        return self.replay(moving)

    def replay(self, moving: list[Tensor]) -> tuple[Any, ...]:
        """Runs the graph on these values of the inputs that are copied."""
        assert self.graph is not None
        if self.views:
            copy_each(self.views, moving)
        self.graph.replay()
        self.owner.log.replays += 1
        return copies(self.graph.results, self.owner.plan.rebuilt)

    def _warm_up(self, inputs: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        if self.graph is not None:
            self.graph = None
            owner.log.dropped.append(self.name)
        self.views = owner.static.views(inputs, owner.moving)
        static = with_copies(inputs, owner.moving, self.views)
        addresses = addresses_of(static, owner.fixed)
        inputs.clear()
        results = copies(owner.graphs.warm_up(lambda: owner.to_capture(static)), owner.plan.rebuilt)
        self.addresses = addresses
        self.moves += 1
        owner.log.warm_ups += 1
        return results

    def _capture(self, inputs: list[Any]) -> bool:
        owner = self.owner
        static = with_copies(inputs, owner.moving, self.views)
        try:
            self.graph, _ = owner.graphs.capture(lambda _: owner.to_capture(list(static)), ())
        except Exception as error:
            self.failed = True
            owner.log.failed(self.name, error)
            return False
        self.moves = 0
        owner.log.captured.append(self.name)
        return True
