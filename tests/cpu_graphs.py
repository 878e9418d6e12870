"""CpuGraphs: stands in for CUDA graphs on a CPU. It records every ATen call and repeats it at the same addresses.

A replay reads inputs where they lay at the capture and writes results where they lay. The rules of a shared pool hold
at their worst: memory that nobody held when a graph was captured is overwritten with garbage by every replay of that
graph, and the other way round. A capture leaves inputs as they were, and who asks for a value meanwhile is refused. So
what is not copied in, held too short or handed out without a copy shows as a wrong number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from v41 import backend
from v41._compat import TorchDispatchMode, memory_of
from v41.runtime.capture import Result

GARBAGE = 0x5B  # of every byte: a number nowhere near a result, an index beyond every end


class Tape(TorchDispatchMode):
    """Runs and records calls; remembers what was in memory that it did not make, before the first write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.made: dict[object, Tensor] = {}  # memory -> the tensor that was made with it
        self.before: dict[object, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {memory_of(value) for value in tensors((args, kwargs))}
        for value in written(func, args, kwargs):
            if memory_of(value) not in self.made:
                whole = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
                self.before.setdefault(memory_of(value), (whole, whole.clone()))
        result = func(*args, **kwargs)
        results = list(tensors(result))
        self.made |= {memory_of(value): value for value in results if memory_of(value) not in given}
        self.calls.append((func, args, kwargs, results))
        return result

    def undo(self) -> None:
        """Puts back what was in memory that it did not make."""
        for value, before in self.before.values():
            value.copy_(before)


class CpuGraph:
    def __init__(self, tape: Tape, buffers: Sequence[Tensor], results: tuple[Any, ...]) -> None:
        self.tape, self.buffers, self.results = tape, tuple(buffers), results
        self.overwrites: list[Tensor] = []  # of other graphs
        self.replays = 0

    def replay(self) -> None:
        spoil(self.overwrites)
        for func, args, kwargs, results in self.tape.calls:
            given = {memory_of(value) for value in tensors((args, kwargs))}
            for old, new in zip(results, tensors(func(*args, **kwargs)), strict=True):
                if memory_of(old) not in given:
                    old.copy_(new)
        kept = {memory_of(value) for value in tensors(self.results)}
        spoil(tensor for memory, tensor in self.tape.made.items() if memory not in kept)
        self.replays += 1


class CpuGraphs:
    """The captures of one plan. `held`: the tensors of each capture that were let out, by memory."""

    def __init__(self, graphs: list[CpuGraph] | None = None) -> None:
        self.graphs: list[CpuGraph] = [] if graphs is None else graphs
        self.pool: list[tuple[CpuGraph, Tensor, weakref.ref[Tensor] | None]] = []
        self.warm_ups = self.followed = 0
        self.around = False  # whether the caller captures

    def follow(self) -> None:
        self.followed += 1

    def capturing(self) -> bool:
        return self.around

    def apart(self) -> CpuGraphs:
        return CpuGraphs(self.graphs)

    def warm_up(self, run: Callable[[], Result]) -> Result:
        self.warm_ups += 1
        return run()

    def capture(
        self, run: Callable[[Sequence[Tensor]], tuple[Any, ...]], borders: Sequence[Tensor]
    ) -> tuple[CpuGraph, tuple[Any, ...]]:
        buffers = [border.clone() for border in borders]
        tape = Tape()
        try:
            with torch.no_grad(), tape:
                results = run(buffers)
        finally:
            tape.undo()
        graph = CpuGraph(tape, buffers, results)
        held = tuple(value.view_as(value) if isinstance(value, Tensor) else value for value in results)
        self._share(graph, held)
        self.graphs.append(graph)
        return graph, held

    def _share(self, graph: CpuGraph, held: tuple[Any, ...]) -> None:
        """Lets the new graph and all memory that nobody holds overwrite each other."""
        out = {memory_of(value): weakref.ref(value) for value in tensors(held)}
        mine = [*graph.tape.made.values(), *graph.buffers]
        for owner, tensor, holder in self.pool:
            if holder is None or holder() is None:
                graph.overwrites.append(tensor)
                owner.overwrites += mine
        self.pool += [(graph, tensor, out.get(memory_of(tensor))) for tensor in mine]

    def pool_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for _, tensor, _ in self.pool)


def record_captures(patch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    """Every compile captures with CpuGraphs unless its options say off; they gather in the list."""
    made: list[CpuGraphs] = []

    def graphs_of(device: torch.device, capture: str) -> tuple[CpuGraphs | None, str]:
        if capture == "off":
            return None, "options"
        made.append(CpuGraphs())
        return made[-1], "test"

    patch.setattr(backend, "graphs_of", graphs_of)
    return made


def tensors(values: Any) -> Iterable[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The arguments that `func` writes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(args[index] if index < len(args) else kwargs.get(argument.name))


def spoil(values: Iterable[Tensor]) -> None:
    for value in values:
        value.untyped_storage().fill_(GARBAGE)
