"""Chain: a step whose segments are captured, for one value of their size; what lies between runs as it is.

    segment_0        piece_3         segment_2
    [replay] -> y -> [runs]  -> s -> [copy s, replay] -> out

Each graph reads what graphs before it returned where they return it. What a loose piece returned lies elsewhere every
step: it is copied to a buffer in the pool. All segments are captured in one pass over a step, in order, and each holds
its results as long as the step needs them, so no later capture of the chain takes their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from v41._compat import addresses_of, copy_each, same_addresses
from v41.runtime.capture import Graph
from v41.runtime.executor import Run, flat_function
from v41.runtime.segments import Segment
from v41.runtime.static_inputs import copies, with_copies

if TYPE_CHECKING:
    from v41.runtime.replay import Replayer


class Chain:
    """A step whose segments are captured, for one value of their size."""

    def __init__(self, owner: Replayer, name: str) -> None:
        self.owner, self.name = owner, name
        self.copied = [i for i in owner.moving if owner.plan.inputs[i] in self._read_by_graphs()]
        self.addresses: list[int | None] = []
        self.runs: list[SegmentRun] = []
        self.run: Run = owner.plain

    def _read_by_graphs(self) -> set[str]:
        return {name for segment in self.owner.segments if segment.captured for name in segment.reads}

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        views = owner.static.views(inputs, self.copied)
        static = with_copies(inputs, self.copied, views)
        inputs.clear()
        if not same_addresses(static, self.addresses, owner.fixed):
            return self._warm_up(static)
        if not self.runs:
            self._build()
        try:
            results = self.run(static)
        except BaseException:
            self.runs = []  # a pass that stopped in its middle leaves no graph that is to be trusted
            raise
        owner.log.segment_replays += sum(run.graph is not None for run in self.runs)
        return copies(results, owner.plan.rebuilt)

    def _warm_up(self, static: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        if self.runs:
            self.runs, self.run = [], owner.plain
            owner.log.dropped.append(self.name)
        addresses = addresses_of(static, owner.fixed)
        results = copies(owner.graphs.warm_up(lambda: owner.plain(static)), owner.plan.rebuilt)
        self.addresses = addresses
        owner.log.warm_ups += 1
        return results

    def _build(self) -> None:
        plan, known = self.owner.plan, set(self.owner.plan.inputs)
        calls: dict[str, Callable[..., Any]] = {}
        for segment in self.owner.segments:
            function = segment.function(self.owner.artifacts)
            if not segment.captured:
                calls[segment.name] = lambda *args, function=function: function(list(args))
                continue
            run = calls[segment.name] = SegmentRun(self, segment, function, known)
            self.runs.append(run)
        self.run = flat_function(plan.inputs, self.owner.segments, plan.outputs, calls)


class SegmentRun:
    """A segment of a chain: captured by its first call, replayed by it and the others.

    `stays`: names whose memory is the same in every step of the chain. What graphs of it return joins them.
    """

    def __init__(self, chain: Chain, segment: Segment, function: Run, stays: set[str]) -> None:
        self.chain, self.segment, self.function, self.stays = chain, segment, function, stays
        self.graph: Graph | None = None
        self.failed = False
        self.borders: list[int] = []  # places among the arguments that are copied

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        results = None
        if self.graph is None and not self.failed:
            results = self._capture(args)
        if self.graph is None:
            return self.function(list(args))
        if self.borders:
            copy_each(self.graph.buffers, [args[i] for i in self.borders])
        self.graph.replay()
        return self.graph.results if results is None else results

    def _capture(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """The results with their memory held, so that the captures behind this one in the step leave it alone."""
        reads, log = self.segment.reads, self.chain.owner.log
        self.borders = [i for i, n in enumerate(reads) if n not in self.stays and isinstance(args[i], Tensor)]

        def run(buffers: Sequence[Tensor]) -> tuple[Any, ...]:
            inputs = list(args)
            for place, buffer in zip(self.borders, buffers, strict=True):
                inputs[place] = buffer
            return self.function(inputs)

        name = f"{self.chain.name} {self.segment.name}"
        try:
            self.graph, results = self.chain.owner.graphs.capture(run, [args[i] for i in self.borders])
        except Exception as error:
            self.failed = True
            log.failed(name, error)
            return None
        self.stays.update(self.segment.returns)
        log.captured.append(name)
        return results
