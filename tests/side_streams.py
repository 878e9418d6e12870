"""SideStreams: stands in for a GPU's streams on a CPU. Launches are put off, and then run in any order events allow.

    streams = SideStreams(plan, artifacts, choose)      choose: draws the next of the streams that may go on
    results = streams.run(inputs)                       through the plan's own function

What that function calls is queued on its stream, as a GPU's host would do; results are handed out at once, full of
garbage. At the end of the step the queues run down, one launch at a time, until the caller's is empty. Memory that the
host let go returns to the stream it was allocated on, and every later launch there overwrites it first, as if it had
been given it: whoever still used it finds garbage. A run in the plan's order, on copies of the inputs, tells what every
piece returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from v41._compat import memory_of
from v41.plan import Plan
from v41.runtime.executor import Artifact, executor

GARBAGE = 0x5B  # of every byte: a number nowhere near a result, an index beyond every end
Choose = Callable[[list[int]], int]  # one of the streams that may go on


@dataclass
class Result:
    """What a piece returned in order, and the argument in whose memory it lies, if it lies in one's."""

    value: Any
    argument: int | None


@dataclass
class Op:
    """Something on a stream; `waits` is a mark, one True once it is past."""

    run: Callable[[], object]
    waits: Sequence[bool] = (True,)


@dataclass
class Block:
    """Memory that was allocated on a stream, and what the host holds of it."""

    stream: int
    memory: Tensor
    holders: list[weakref.ref[Tensor]] = field(default_factory=list)

    def held(self) -> bool:
        return any(holder() is not None for holder in self.holders)


class SideStreams:
    """seed: of the random numbers that pieces draw, which they do in the plan's order in the step as well."""

    def __init__(self, plan: Plan, artifacts: Mapping[str, Artifact], choose: Choose, seed: int = 0) -> None:
        self.plan, self.artifacts, self.choose, self.seed = plan, artifacts, choose, seed
        self.by_name = replace(plan, pieces=tuple(replace(piece, key=piece.name) for piece in plan.pieces))
        self.order: list[str] = []  # of the launches, as they ran

    @torch.no_grad()
    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The results of one step. The caller keeps the inputs that the plan writes; all others it lets go."""
        self.results = self._in_order([value.clone() if isinstance(value, Tensor) else value for value in inputs])
        self.blocks: list[Block] = []
        self.order.clear()
        torch.manual_seed(self.seed)
        launchers = {piece.name: self._launcher(piece.name, piece.key) for piece in self.plan.pieces}
        step = executor(self.by_name, launchers, lambda plan: self._begin)
        self._begin()
        handles = [self._handle(0, value) if isinstance(value, Tensor) else value for value in inputs]
        written = {name for piece in self.plan.pieces for name in piece.writes}
        kept = [handle for name, handle in zip(self.plan.inputs, handles, strict=True) if name in written]
        results = step(handles)
        del kept
        if not self.plan.events:
            self.end()
        return results

    def _in_order(self, inputs: list[Any]) -> dict[str, list[Result]]:
        values, found = dict(zip(self.plan.inputs, inputs, strict=True)), {}
        for piece in self.plan.pieces:
            args = [values[name] for name in piece.reads]
            results = self.artifacts[piece.key](*args)
            places = {memory_of(arg): at for at, arg in enumerate(args) if isinstance(arg, Tensor)}
            found[piece.name] = [
                Result(value, places.get(memory_of(value)) if isinstance(value, Tensor) else None) for value in results
            ]
            values |= dict(zip(piece.returns, results, strict=True))
        return found

    # ---- a Flight

    def _begin(self) -> SideStreams:
        self.queues: dict[int, list[Op]] = {piece.stream: [] for piece in self.plan.pieces} | {0: []}
        self.marks: dict[int, list[bool]] = {}
        self.current = 0
        return self

    def mark(self, event: int) -> None:
        past = self.marks[event] = [False]
        self.queues[self.current].append(Op(lambda: past.__setitem__(0, True)))

    def wait(self, event: int) -> None:
        self.queues[self.current].append(Op(lambda: None, self.marks[event]))

    def switch(self, stream: int) -> None:
        self.current = stream

    def end(self) -> None:
        """The host waits for the caller's stream alone, as whoever reads the results does."""
        while self.queues[0]:
            ready = [stream for stream, ops in self.queues.items() if ops and ops[0].waits[0]]
            assert ready, "every stream waits for another"
            self.queues[self.choose(sorted(ready))].pop(0).run()

        assert not any(self.queues.values()), f"not joined: {[at for at, ops in self.queues.items() if ops]}"

    def abandon(self) -> None:
        self.queues = {stream: [] for stream in self.queues}

    # ---- launches

    def _launcher(self, name: str, key: str) -> Artifact:
        def launch(*args: Any) -> tuple[Any, ...]:
            spoiled = [each.memory for each in self.blocks if each.stream == self.current and not each.held()]
            made = tuple(self._made(result, args) for result in self.results[name])
            given, into = ([unheld(value) for value in values] for values in (args, made))

            def run() -> None:
                self.order.append(name)
                for memory in spoiled:
                    memory.fill_(GARBAGE)
                for value, result in zip(into, self.artifacts[key](*given), strict=True):
                    if isinstance(value, Tensor) and memory_of(value) != memory_of(result):
                        value.untyped_storage().copy_(result.untyped_storage())

            self.queues[self.current].append(Op(run))
            return made

        return launch

    def _made(self, result: Result, args: Sequence[Any]) -> Any:
        """What the host gets for a result before its launch has run."""
        value = result.value
        if not isinstance(value, Tensor):
            return value
        sizes, strides, offset = value.shape, value.stride(), value.storage_offset()
        if result.argument is None:
            return self._handle(
                self.current, torch.empty(0, dtype=value.dtype).set_(garbage_like(value), offset, sizes, strides)
            )
        made = args[result.argument].as_strided(sizes, strides, offset)
        block = next(each for each in self.blocks if memory_of(each.memory) == memory_of(made))
        block.holders.append(weakref.ref(made))
        return made

    def _handle(self, stream: int, value: Tensor) -> Tensor:
        """`value` as the host holds it: gone once the host lets it go, whoever has its memory."""
        made = value.view_as(value)
        whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        self.blocks.append(Block(stream, whole, [weakref.ref(made)]))
        return made


def unheld(value: Any) -> Any:
    """The same memory, without the host's hold on it."""
    return value.view_as(value) if isinstance(value, Tensor) else value


def garbage_like(value: Tensor) -> torch.UntypedStorage:
    return torch.full((value.untyped_storage().nbytes(),), GARBAGE, dtype=torch.uint8).untyped_storage()
