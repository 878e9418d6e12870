"""lockstep: the pieces of a step, once among many rows and once for the first of them alone, from the same bits.

    piece_4   64 rows: X [64, 4, 5120] -> h [64, 5120]     1 row: X[:1] -> h' [1, 5120]     told if h' is not h[:1]
    piece_5   64 rows: h -> ...                            1 row: h[:1] -> ...              whatever h' was

So what a piece does to a row is its own doing, not that of a piece before. Within a piece the calls that torch can see
(all of one that runs its ATen nodes; of Inductor's those of libraries, not its kernels) are held to each other in the
same way: a call is told where what it reads has the same bits and what it returns has not, and the row alone goes on
with what the call gave it among many. So results that differ in the end are the doing of kernels of the piece's own.

What is compared: along an axis that is longer among many, the first elements; where these differ, each must be among
the others' as a whole, for rows may come sorted (by expert, say; then nobody knows which are the row's, and it keeps
its own). Numbers of calls that are no floats say where rows lie, and are not compared; those that pieces return are. A
cache is written in place: of it, the slot of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v41._compat import OpOverload, TorchDispatchMode, memory_of
from v41.lowering.generated import GeneratedPiece
from v41.lowering.inductor import InductorPiece
from v41.plan import Piece, Plan
from v41.runtime.all_kept import AllKept
from v41.runtime.executor import Artifact

MOST_BYTES = 1 << 28  # of what a call reads: more is a stack of weights, the same in both
UNWRITTEN = ("empty", "new_empty", "resize", "set_")  # calls that return memory as it was


@dataclass(frozen=True)
class Broken:
    """A piece that gave the row other bits. Each with how far the row is off at most, over its largest number:

    calls: those that did it, with the shapes of what they read among many. values: what its own kernels returned.
    """

    piece: str
    key: str
    runs: str  # generated, inductor or eager
    begins: str
    source: str
    calls: dict[str, float]
    values: dict[str, float]


def lockstep(
    plan: Plan, artifacts: Mapping[str, Artifact], many: Sequence[Any], alone: Sequence[Any], slot: int
) -> list[Broken]:
    """The pieces of `plan` that do not give the first row of `many` the bits it gets alone, in order.

    many, alone: inputs of the plan whose first row is the same; each has a cache of its own, which is written. slot: of
    that row in both.
    """
    wide, one = (dict(zip(plan.inputs, inputs, strict=True)) for inputs in (many, alone))
    given = {memory_of(value) for value in (*many, *alone) if isinstance(value, Tensor)}
    found = []
    for piece in plan.pieces:
        run = artifacts[piece.key]
        calls = Calls(given)
        held = Held(calls)
        results = [_run(run, piece, values, mode) for values, mode in ((wide, calls), (one, held))]
        for values, result in zip((wide, one), results, strict=True):
            values |= dict(zip(piece.returns, result, strict=True))
        pairs = {name: (wide[name], one[name]) for name in piece.returns}
        pairs |= {name: (wide[name][slot], one[name][slot]) for name in piece.writes}
        differ = {name: off(*pair) for name, pair in pairs.items() if not alike(*pair)}
        for name in differ:
            follow(*pairs[name])
        if differ or held.broken:
            facts = (piece.name, piece.key, way_of(run), piece.border, piece.source)
            found.append(Broken(*facts, held.broken, {} if held.lost else differ))
        for name in piece.frees:
            del wide[name], one[name]
    return found


def way_of(run: Artifact) -> str:
    """How a piece runs."""
    if isinstance(run, AllKept):
        return way_of(run.taken)
    return {GeneratedPiece: "generated", InductorPiece: "inductor"}.get(type(run), "eager")


def _run(run: Artifact, piece: Piece, values: Mapping[str, Any], mode: TorchDispatchMode) -> tuple[Any, ...]:
    inputs = [values[name] for name in piece.reads]
    if way_of(run) == "generated":  # it calls torch for memory alone
        return run(*inputs)
    with mode:
        return run(*inputs)


# ---- calls of one piece


@dataclass(frozen=True)
class Call:
    op: OpOverload
    shapes: str  # of the floats that it reads
    reads: list[Tensor | None]  # these; None: an input of the plan, or weights
    results: list[Tensor]


class Calls(TorchDispatchMode):
    """Records calls, with copies of what they read and return. given: memory of the plan's inputs."""

    def __init__(self, given: set[object]) -> None:
        super().__init__()
        self.given, self.made = given, list[Call]()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(read_by(args, kwargs))
        reads = [value.clone() if self.own(value) else None for value in given]
        shapes = " ".join(str(list(value.shape)) for value in given)
        result = func(*args, **(kwargs or {}))
        self.made.append(Call(func, shapes, reads, [value.clone() for value in self.returned(func, result)]))
        return result

    def own(self, value: Tensor) -> bool:
        """Whether `value` was made by the piece, or by one before."""
        return memory_of(value) not in self.given and value.numel() * value.element_size() <= MOST_BYTES

    def returned(self, func: OpOverload, result: Any) -> list[Tensor]:
        """The floats that a call returned, if it wrote them; of caches, which it writes in place, none."""
        if func.overloadpacket.__name__.startswith(UNWRITTEN):
            return []
        return [value for value in tensors(result) if value.is_floating_point() and memory_of(value) not in self.given]


class Held(TorchDispatchMode):
    """Holds the calls of the row alone to those recorded among many, as long as they are the same calls. broken: what
    breaks its bits. lost: whether the row could not go on with what it has among many."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls, self.left = calls, iter(calls.made)
        self.broken, self.strayed, self.lost = dict[str, float](), False, False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = None if self.strayed else next(self.left, None)
        if call is None or call.op is not func:
            return self._stray(func, call)(*args, **(kwargs or {}))
        pairs = [(wide, one) for wide, one in zip(call.reads, read_by(args, kwargs), strict=True) if wide is not None]
        same, in_order = all(alike(*pair) for pair in pairs), all(begins(*pair) for pair in pairs)
        result = func(*args, **(kwargs or {}))
        for wide, one in zip(call.results, self.calls.returned(func, result), strict=True):
            if same and not alike(wide, one):
                name = f"{func} of {call.shapes}"
                self.broken[name] = max(off(wide, one), self.broken.get(name, 0.0))
                self.lost |= not in_order
                if in_order:
                    follow(wide, one)
        return result

    def _stray(self, func: OpOverload, call: Call | None) -> OpOverload:
        if not self.strayed:
            self.broken[f"{func} where many rows call {call.op if call is not None else 'nothing'}"] = 1.0
            self.strayed = self.lost = True
        return func


def read_by(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The floats that a call reads."""
    read = (args, {name: value for name, value in (kwargs or {}).items() if name != "out"})
    return (value for value in tensors(read) if value.is_floating_point())


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


# ---- two values of one name


def alike(wide: Any, one: Any) -> bool:
    """Whether the row alone has its bits among many."""
    if not isinstance(one, Tensor) or begins(wide, one):
        return True  # or a size
    if not fits(wide, one):
        return False
    longer = [axis for axis, (a, b) in enumerate(zip(wide.shape, one.shape, strict=True)) if a != b]
    return len(longer) == 1 and rows(one, longer[0]) <= rows(wide, longer[0])


def begins(wide: Tensor, one: Tensor) -> bool:
    """Whether the first elements of `wide` are `one`."""
    return fits(wide, one) and torch.equal(bits(first(wide, one)), bits(one))


def fits(wide: Tensor, one: Tensor) -> bool:
    """Whether `one` is as large as a beginning of `wide`."""
    return wide.ndim == one.ndim and all(a >= b for a, b in zip(wide.shape, one.shape, strict=True))


def first(wide: Tensor, one: Tensor) -> Tensor:
    """What of `wide` is as large as `one`."""
    return wide[tuple(slice(size) for size in one.shape)]


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def rows(value: Tensor, axis: int) -> set[bytes]:
    """The bits of each slice along `axis`."""
    apart = value.movedim(axis, 0).contiguous()
    table = apart.reshape(len(apart), -1).view(torch.uint8).cpu().numpy()
    return {row.tobytes() for row in table}


def follow(wide: Tensor, one: Tensor) -> None:
    """Gives the row alone what it has among many."""
    if fits(wide, one):
        one.copy_(first(wide, one))


def off(wide: Tensor, one: Tensor) -> float:
    """The largest difference over the largest number; 1 where the shapes do not fit."""
    if not fits(wide, one):
        return 1.0
    a, b = (value.double().nan_to_num() for value in (first(wide, one), one))
    return float((a - b).abs().max() / max(float(a.abs().max()), torch.finfo(torch.float32).tiny))
