"""past_guards: a compiled model that, where a step is one graph, goes to the graph past Dynamo.

    step = v41.past_guards(torch.compile(model, backend="v41"))
    logits = step(batch, cache)        the same results; the first steps of each size go through the compiled model

Dynamo reads and guards every parameter at every call: some hundred µs for a model of hundreds of them, more than all
else on the host. Here a call checks what a graph rests on, in this order:

    arguments    shape, dtype and number of the tensors in each; what numbers, words, types and containers beside them
                 are, to the bit; an argument none of whose tensors changes its size (a cache) is the same object
    addresses    of every parameter, buffer and cache tensor: one comparison in C++
    modules      no parameter, buffer or module was registered in the model since (hooks that torch offers)
    modes        of gradients, inference, autocast, the default dtype, determinism and the model's training

Anything else than before goes through the compiled model and its guards. What is not seen: another plain attribute (an
eps) or forward hook of a module, or of an argument's object that holds no tensor; other strides at the same address; a
parameter put past `register_parameter`, as torch.func.functional_call does. `forget()` after such a change.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from v41._compat import copy_each, modes_around, on_registration, same_addresses
from v41.runtime.replay import WATCHER, Seen, Whole
from v41.runtime.static_inputs import copies

Leaves = Callable[[tuple[Any, ...]], tuple[list[Tensor], tuple[Any, ...]]]

MOST = 4096  # routes: more than a model's buckets make, so a number that is another every step fills no memory
PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, type, torch.dtype, torch.device, torch.memory_format)


def past_guards(compiled: Callable[..., Any]) -> PastGuards:
    """A callable like `compiled`, which torch.compile(model, backend="v41") returned, for positional arguments."""
    return PastGuards(compiled)


@dataclass(frozen=True)
class Route:
    """A graph, and where its inputs and results lie among the leaves of a call."""

    whole: Whole
    inputs: list[Any]  # of the graph's plan, parameters among them
    moving: tuple[int, ...]  # leaves that are copied
    places: tuple[tuple[int, int], ...]  # (input, leaf) of those that stay
    same: tuple[tuple[int, Any], ...]  # (argument, object) of those that hold none that moves
    result: int

    def fits(self, args: Sequence[Any], leaves: Sequence[Tensor]) -> bool:
        whole = self.whole
        if whole.graph is None or whole.owner.graphs.capturing() or any(args[i] is not value for i, value in self.same):
            return False
        for place, leaf in self.places:
            self.inputs[place] = leaves[leaf]
        return same_addresses(self.inputs, whole.addresses, whole.owner.fixed)


class PastGuards:
    """Calls `compiled` past its guards where it can. See the head of this file for what it checks."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.model = getattr(compiled, "_orig_mod", None)
        self.routes: dict[object, Route] = {}
        self.read: Leaves | None = None
        if isinstance(self.model, nn.Module):
            watched = {id(module) for module in self.model.modules()}
            self._unwatch = on_registration(_forgetting(weakref.ref(self), watched))
            weakref.finalize(self, self._unwatch)

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            leaves, told = self.read(args) if self.read is not None else ([], ())
        except (AttributeError, LookupError, TypeError, ValueError):  # arguments of another form
            return self._learn(args)
        key = (told, modes_around(), self.model is not None and self.model.training)
        route = self.routes.get(key)
        if route is not None and not (owner := route.whole.owner).turn.is_mine():
            with owner.turn:  # another thread may be about to drop the graph
                if route.fits(args, leaves):
                    result = route.whole.replay([leaves[i] for i in route.moving])[route.result]
                    owner.log.host_ns += time.perf_counter_ns() - start
                    return result
        return self._learn(args)

    def parts(self, *args: Any) -> dict[str, Callable[[], object]]:
        """What a call like this does past Dynamo, part by part, for timing each alone. None where it has no graph."""
        if self.read is None:
            return {}
        leaves, told = self.read(args)
        route = self.routes.get((told, modes_around(), self.model is not None and self.model.training))
        if route is None or (graph := route.whole.graph) is None:
            return {}
        whole, moving = route.whole, [leaves[i] for i in route.moving]
        return {
            "read": lambda: self.read and self.read(args),
            "compare": lambda: route.fits(args, leaves),
            "copy_in": lambda: copy_each(whole.views, moving),
            "replay": graph.replay,
            "copy_out": lambda: copies(graph.results, whole.owner.plan.rebuilt),
        }

    def forget(self) -> None:
        """Sends the next call of every size through the compiled model."""
        self.routes.clear()

    def _learn(self, args: tuple[Any, ...]) -> Any:
        """Through the compiled model; if one graph was all that ran, the next call like this may go there."""
        seen: list[Seen] = []
        token = WATCHER.set(seen)
        try:
            result = self.compiled(*args)
        finally:
            WATCHER.reset(token)
        if len(seen) == 1 and seen[0].whole is not None and isinstance(result, Tensor):
            self.read = reader(args)
            leaves, told = self.read(args)
            route = route_of(seen[0], seen[0].whole, args, leaves, result)
            if route is not None:
                if len(self.routes) >= MOST:
                    self.routes.clear()
                key = (told, modes_around(), self.model is not None and self.model.training)
                self.routes[key] = route
        return result


def _forgetting(owner: weakref.ref[PastGuards], watched: set[int]) -> Callable[[nn.Module], None]:
    def registered(module: nn.Module) -> None:
        if id(module) in watched and (mine := owner()) is not None:
            mine.forget()

    return registered


def route_of(seen: Seen, whole: Whole, args: tuple[Any, ...], leaves: Sequence[Tensor], result: Tensor) -> Route | None:
    """How a later call finds the graph; None where an input that is copied is no leaf, the result is another's, or two
    leaves are one: the graph may read it for both, and of a call where they are two nobody knows which it would."""
    leaf_of = {_place(each): i for i, each in enumerate(leaves)}
    if any(each.numel() and leaf_of[_place(each)] != i for i, each in enumerate(leaves)):
        return None

    def leaf(place: int) -> int | None:
        return leaf_of.get(_place(seen.inputs[place]))

    moving = [leaf(place) for place in whole.owner.moving]
    results = [i for i, value in enumerate(seen.results) if value is result]
    if not results or any(i is None for i in moving):
        return None
    owner_of = [i for i, arg in enumerate(args) for _ in paths(arg, "")]
    alive = {owner_of[i] for i in moving if i is not None}
    return Route(
        whole,
        [None if i in set(whole.owner.moving) else value for i, value in enumerate(seen.inputs)],
        tuple(i for i in moving if i is not None),
        tuple((place, i) for place in whole.owner.fixed if (i := leaf(place)) is not None),
        tuple((i, arg) for i, arg in enumerate(args) if i not in alive),
        results[0],
    )


def _place(value: Tensor) -> tuple[object, ...]:
    """What no two tensors that are not the same have in common, unless they are empty."""
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def reader(args: tuple[Any, ...]) -> Leaves:
    """A function of arguments like these: their tensors, and all else that must be as it was for a graph to serve."""
    found = [(kind, path) for i, arg in enumerate(args) for kind, path in _parts(arg, f"a{i}")]
    tensors = [path for kind, path in found if kind == "tensor"]
    names = [f"t{i}" for i in range(len(tensors))]
    others = [f"type({path})" if kind == "object" else f"exactly({path})" for kind, path in found if kind != "tensor"]
    told = [*(f"{name}.shape" for name in names), *(f"{name}.dtype" for name in names), *others]
    lines = [
        "def read(args):",
        f"    [{', '.join(f'a{i}' for i in range(len(args)))}] = args",
        *(f"    {name} = {path}" for name, path in zip(names, tensors, strict=True)),
        f"    return [{', '.join(names)}], ({' '.join(f'{each},' for each in told)})",
    ]
    scope: dict[str, Any] = {"exactly": exactly}
    exec("\n".join(lines), scope)
    return scope["read"]


def exactly(value: Any) -> tuple[object, ...]:
    """Equal only for what a program cannot tell apart: 2 is not 2.0 nor True, 0.0 not -0.0, NaN is NaN. Of a container
    its type, length and keys."""
    kind = type(value)
    if isinstance(value, (tuple, list)):
        return kind, len(value)
    if isinstance(value, Mapping):
        return kind, tuple(value)
    if not isinstance(value, PLAIN):
        raise TypeError(f"a {kind.__name__}, where there was none")
    return kind, repr(value) if isinstance(value, (float, complex)) else value


def paths(value: Any, path: str) -> list[str]:
    """Where the tensors in `value` are, as Python: ".tokens", ".blocks[2]"."""
    return [found for kind, found in _parts(value, path) if kind == "tensor"]


def _parts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Tensors, what holds them, containers, plain values beside them; other objects without a tensor are passed by."""
    if isinstance(value, Tensor):
        yield "tensor", path
    elif isinstance(value, PLAIN):
        yield "constant", path
    elif is_dataclass(value):
        inside = [part for f in fields(value) for part in _parts(getattr(value, f.name), f"{path}.{f.name}")]
        if any(kind == "tensor" for kind, _ in inside):
            yield from [("object", path), *inside]
    elif isinstance(value, (tuple, list)):
        yield "container", path
        for i, item in enumerate(value):
            yield from _parts(item, f"{path}[{i}]")
    elif isinstance(value, Mapping):
        yield "container", path
        for i, (key, item) in enumerate(value.items()):
            spelled = f"[{key!r}]" if type(key) in (int, str) else f"[tuple({path})[{i}]]"
            yield from _parts(item, f"{path}{spelled}")
