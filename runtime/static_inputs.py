"""StaticInputs: inputs whose sizes change are copied to memory that stays, since a graph reads fixed addresses.

    the caller's tokens i64[5]  ->  the first 5 of a buffer as large as the largest bucket; the same for every graph

One buffer an input. Inputs without a symbol in their shape (weights, caches) are read where they lie: their addresses
are compared before every replay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from v41._compat import copy_each
from v41.plan import Plan


def dimensions(spec: str) -> tuple[str, ...] | None:
    """("u0", "4") of "bf16[u0, 4]", None for what is no tensor."""
    _, bracket, inside = spec.partition("[")
    return tuple(part.strip() for part in inside[:-1].split(",") if part.strip()) if bracket else None


def symbolic(spec: str) -> bool:
    """Whether a value is a tensor whose shape has a symbol."""
    return any(not size.isdigit() for size in dimensions(spec) or ())


def place_of(plan: Plan, symbol: str) -> tuple[int, int | None]:
    """Where a step's inputs say what `symbol` is: the place of an int, or of a tensor and which of its sizes."""
    specs = [plan.values[name] for name in plan.inputs]
    if f"int {symbol}" in specs:
        return specs.index(f"int {symbol}"), None
    return next((i, sizes.index(symbol)) for i, spec in enumerate(specs) if symbol in (sizes := dimensions(spec) or ()))


class StaticInputs:
    """The buffers of one plan, by place of the input."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffers: dict[int, Tensor] = {}

    def views(self, inputs: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
        """The part of each buffer that has the shape of `inputs[place]`. Made where there is none."""
        return [self._view(place, inputs[place]) for place in places]

    def _view(self, place: int, value: Tensor) -> Tensor:
        if place not in self.buffers:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
                self.buffers[place] = torch.empty(self._most(place), dtype=value.dtype, device=value.device)
        return self.buffers[place][: value.numel()].view(value.shape)

    def _most(self, place: int) -> int:
        """Elements at the largest bucket."""
        plan = self.plan
        sizes = dimensions(plan.values[plan.inputs[place]]) or ()
        return math.prod(int(size) if size.isdigit() else plan.buckets[plan.sizes[size]][-1] for size in sizes)


def no_buckets(size: str) -> str:
    """Why a step with this size is not captured, and what helps."""
    return f"{size} has no buckets: options={{'buckets': {{{size!r}: (1, 2, 4)}}}} would give it some"


def uncopyable(plan: Plan, name: str) -> str | None:
    """Why input `name` cannot be copied into a buffer of the largest bucket; None where it can."""
    for size in dimensions(plan.values[name]) or ():
        if not size.isdigit() and plan.sizes.get(size) not in plan.buckets:
            return no_buckets(plan.sizes.get(size, size))
    if any(name in piece.writes for piece in plan.pieces):
        return f"input {name} is written in place, and has a size that changes"
    return None


def with_copies(inputs: Sequence[Any], places: Sequence[int], views: Sequence[Tensor]) -> list[Any]:
    """`inputs` with those at `places` copied into `views`, and the views in their stead."""
    static = list(inputs)
    if views:
        copy_each(views, [inputs[i] for i in places])
    for place, view in zip(places, views, strict=True):
        static[place] = view
    return static


def copies(results: Sequence[Any], rebuilt: Sequence[int] = ()) -> tuple[Any, ...]:
    """Results that no replay overwrites; those that share memory share a copy of it. Those at `rebuilt` are handed to
    nobody: a copy would lose their layout."""
    places = [at for at, value in enumerate(results) if isinstance(value, Tensor) and at not in rebuilt]
    memory = {at: results[at].untyped_storage().data_ptr() for at in places} if len(places) > 1 else {}
    shared, whole = Counter(memory.values()), dict[int, torch.UntypedStorage]()
    found = list(results)
    for at in places:
        value = results[at]
        if memory and shared[memory[at]] > 1:
            if memory[at] not in whole:
                whole[memory[at]] = value.untyped_storage().clone()
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            found[at] = empty.set_(whole[memory[at]], value.storage_offset(), value.shape, value.stride())
        else:
            found[at] = value.clone()
    return tuple(found)
