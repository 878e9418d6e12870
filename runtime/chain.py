"""Chain: a step whose segments are captured, each for one value of its size; what lies between runs as it is.

    segment_0 of 512 rows   piece_3    segment_2 of 512 rows   seam        segment_4 of the last 128
    [replay] -> y        -> [runs] ->  [copy s, replay]     -> [runs] ->   [copy, replay] -> out

A Rung holds the graphs of one value of one size; chains of steps that have it in common share them. Each graph reads
what graphs of its rung before it returned where they return it. What anything else returned lies elsewhere every step,
or may: it is copied to a buffer in the pool. All segments of a rung are captured in one pass over a step, in order, and
each holds its results as long as the step needs them, so no later capture of the rung takes their memory. Rungs of
another size have a pool of their own: which of them run between is another matter in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from v41._compat import addresses_of, copy_each, same_addresses
from v41.runtime.all_kept import fresh
from v41.runtime.capture import Graph, Graphs
from v41.runtime.executor import Run, flat_function
from v41.runtime.segments import Segment
from v41.runtime.static_inputs import copies, with_copies

if TYPE_CHECKING:
    from v41.runtime.replay import Replayer


class Rung:
    """The captured segments of one value of a size."""

    def __init__(self, owner: Replayer, size: str, value: int, graphs: Graphs) -> None:
        self.owner, self.size, self.graphs, self.name = owner, size, graphs, f"{size}={value}"
        self.segments = [segment for segment in owner.segments if segment.size == size]
        read = {name for segment in self.segments for name in segment.reads}
        self.copied = [i for i in owner.moving if owner.plan.inputs[i] in read]
        self.addresses: list[int | None] = []  # of the inputs when it warmed up
        self.runs: dict[str, SegmentRun] = {}  # none before it has warmed up

    def has_warmed_up(self, inputs: list[Any]) -> bool:
        """Whether a step found these inputs where they are; graphs of other addresses are dropped."""
        if same_addresses(inputs, self.addresses, self.owner.fixed):
            return True
        if self.runs:
            self.runs = {}
            self.owner.log.dropped.append(self.name)
        return False

    def warmed_up(self, addresses: list[int | None]) -> None:
        self.addresses = addresses

    def run(self, segment: Segment, args: Sequence[Any]) -> tuple[Any, ...]:
        if not self.runs:
            known = set(self.owner.plan.inputs)
            self.runs = {each.name: SegmentRun(self, each, known) for each in self.segments}
        return self.runs[segment.name](*args)


class Chain:
    """A step whose segments of these rungs are captured."""

    def __init__(self, owner: Replayer, rungs: Sequence[Rung]) -> None:
        self.owner, self.rungs = owner, rungs
        self.copied = sorted({place for rung in rungs for place in rung.copied})
        self.run = self._function()

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        views = owner.static.views(inputs, self.copied)
        static = with_copies(inputs, self.copied, views)
        inputs.clear()
        if not all([rung.has_warmed_up(static) for rung in self.rungs]):
            return self._warm_up(static)
        try:
            results = self.run(static)
        except BaseException:
            for rung in self.rungs:
                rung.runs = {}  # a pass that stopped in its middle leaves no graph that is to be trusted
            raise
        runs = [run for rung in self.rungs for run in rung.runs.values()]
        owner.log.segment_replays += sum(run.graph is not None for run in runs)
        return copies(results, owner.plan.rebuilt)

    def _warm_up(self, static: list[Any]) -> tuple[Any, ...]:
        owner = self.owner
        addresses = addresses_of(static, owner.fixed)
        results = copies(owner.graphs.warm_up(lambda: owner.plain(static)), owner.plan.rebuilt)
        for rung in self.rungs:
            rung.warmed_up(addresses)
        owner.log.warm_ups += 1
        return results

    def _function(self) -> Run:
        plan, calls = self.owner.plan, dict[str, Callable[..., Any]]()
        of_size = {rung.size: rung for rung in self.rungs}
        artifacts = {key: fresh(artifact) for key, artifact in self.owner.artifacts.items()}
        for segment in self.owner.segments:
            rung = of_size.get(segment.size or "")
            if rung is not None:
                calls[segment.name] = lambda *args, rung=rung, segment=segment: rung.run(segment, args)
            else:
                function = segment.function(artifacts)
                calls[segment.name] = lambda *args, function=function: function(list(args))
        return flat_function(plan.inputs, self.owner.segments, plan.outputs, calls)


class SegmentRun:
    """A segment of a rung: captured by its first call, replayed by it and the others.

    `stays`: names whose memory is the same in every step of the rung. What graphs of it return joins them.
    """

    def __init__(self, rung: Rung, segment: Segment, stays: set[str]) -> None:
        self.rung, self.segment, self.stays = rung, segment, stays
        self.function = segment.function(rung.owner.artifacts)
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
        reads, log = self.segment.reads, self.rung.owner.log
        self.borders = [i for i, n in enumerate(reads) if n not in self.stays and isinstance(args[i], Tensor)]

        def run(buffers: Sequence[Tensor]) -> tuple[Any, ...]:
            inputs = list(args)
            for place, buffer in zip(self.borders, buffers, strict=True):
                inputs[place] = buffer
            return self.function(inputs)

        name = f"{self.rung.name} {self.segment.name}"
        try:
            self.graph, results = self.rung.graphs.capture(run, [args[i] for i in self.borders])
        except Exception as error:
            self.failed = True
            log.failed(name, error)
            return None
        self.stays.update(self.segment.returns)
        log.captured.append(name)
        return results
