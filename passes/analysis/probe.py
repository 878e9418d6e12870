"""probe: what a run of nodes computes, found by running them on numbers, in fp64 whatever their types.

A contraction over residual streams has many spellings (einsum, matmul, products and sums, one stream at a time). Their
values are the same polynomial, so a formula that agrees on random integers is the formula. In fp64 all sums of integers
are exact in any order, and a factor of 0.999 shows, which the cast to bf16 at the end of a contraction would hide. The
nodes run on the CPU, whatever device the graph is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, ops
from torch.fx import Node
from torch.fx.node import map_aggregate

from v41._compat import outside_fake_mode, size_with
from v41.passes.matching import fake

VIEWS_OF_ALL = (ops.aten.view.default, ops.aten._unsafe_view.default)
ROWS = 3
LIMIT = 2  # of the integers drawn; an odd size of streams and rows tells axes apart, signs tell sums from sizes


def evaluate(nodes: Iterable[Node], given: dict[Node, Tensor], result: Node, *, keep_types: bool = False) -> Tensor:
    """The value of `result` after running `nodes`, in order, on `given`: in fp64, all casts among float types left out.

    `keep_types` runs them as they are, for work on bits and integers. Sizes are read with ROWS for every symbol.
    """
    with outside_fake_mode(), torch.no_grad():
        values: dict[Node, Any] = dict(given)
        for node in nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), lambda arg: _value(arg, values, keep_types))
            # in another order of memory than the graph's, a view may need a copy
            target = ops.aten.reshape.default if node.target in VIEWS_OF_ALL else node.target
            values[node] = target(*args, **kwargs)  # type: ignore[operator]
        value = values[result]
    assert isinstance(value, Tensor)
    return value


def integers(node: Node, seed: int) -> Tensor:
    """An fp64 tensor of small random integers with the shape of `node`, ROWS for every symbol."""
    with outside_fake_mode():
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(-LIMIT, LIMIT + 1, shape_drawn(node), generator=generator, dtype=torch.int8)  # 2x as fast
        return drawn.double()


def numbers(node: Node, seed: int) -> Tensor:
    """An fp64 tensor of random numbers, normally distributed, with the shape of `node`."""
    with outside_fake_mode():
        return torch.randn(shape_drawn(node), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spelling(nodes: Iterable[Node], given: Iterable[Node], result: Node) -> str:
    """A digest, equal for runs of nodes that `evaluate` treats alike: whatever they give on one draw, they all do.

    Told are operators, wiring, numbers with ROWS for every symbol, shape and type of what is `given`; names are not.
    """
    number = {node: f"%{i}" for i, node in enumerate(given)}
    lines = [f"{fake(node).dtype} {shape_drawn(node)}" for node in number]  # type: ignore[union-attr]

    def spelled(arg: Any) -> Any:
        if not isinstance(arg, Node) or arg in number:
            return number.get(arg, arg) if isinstance(arg, Node) else arg
        value = arg.meta.get("val")
        return "no value" if value is None or isinstance(value, Tensor) else size_with(value, ROWS)

    for node in nodes:
        lines.append(f"{node.op} {node.target} {map_aggregate((node.args, node.kwargs), spelled)!r}")
        number[node] = f"%{len(number)}"
    return hashlib.sha256("\n".join([*lines, spelled(result)]).encode()).hexdigest()


def shape_drawn(node: Node) -> list[int]:
    """The shape of `node` with ROWS for every symbol."""
    value = fake(node)
    assert value is not None
    return [size_with(size, ROWS) for size in value.shape]


def _value(arg: Any, values: dict[Node, Any], keep_types: bool) -> Any:
    """What was computed or given for a node, a number for a size, the CPU for a device; fp64 for each float type."""
    if isinstance(arg, torch.dtype) and arg.is_floating_point and not keep_types:
        return torch.float64
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    if not isinstance(arg, Node):
        return arg
    if arg in values:
        return values[arg]
    assert not isinstance(arg.meta["val"], Tensor), f"{arg} has no value"
    return size_with(arg.meta["val"], ROWS)
