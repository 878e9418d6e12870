"""read: a region's body becomes stores of expressions, or is NotRowwise with the reason.

    before   GraphModule of ATen nodes, fake tensors in meta, dimension 0 of row tensors symbolic
    after    Kept: inputs, outputs, the expressions to store and where, and the product in front, if there is one

Each store is asked for in lanes of its own. Where the answer is that a lane should be cut, or the store itself, that is
done and asked again: so tiles fall into the groups that the body folds, and nothing is computed for columns where it is
not needed. An output of parts laid side by side has a store for each, and so have the runs of a long axis.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.elementwise import ELEMENTWISE, FLOATS, FP8, INTS, scalar
from v41.lowering.rowwise.expr import Builder, Expr, reachable
from v41.lowering.rowwise.held import folds, lookups, products, ranks, views
from v41.lowering.rowwise.held.index import Index, Lane, NeedsSplit, Part
from v41.lowering.rowwise.held.products import Front
from v41.lowering.rowwise.held.values import Held, Indices, Lazy, TooLarge, aligned
from v41.lowering.rowwise.held.views import NeedsCut, shape_of
from v41.lowering.rowwise.read import (
    PLACEMENT,
    NotRowwise,
    Tensor,
    check_numbers,
    described,
    is_operand,
    outputs_of,
    walk,
)
from v41.regions import body_of, invoke_subgraph

APART = 8  # elements of an outer axis that are stored one by one where all are too many at once
TURNS = 200  # cuts of lanes and stores, after which something is wrong
SPELLED = 1500  # operations of a kernel without loops
HANDLERS = views.VIEWS | folds.FOLDS | lookups.LOOKUPS | products.PRODUCTS | ranks.RANKS
TYPES = (*FLOATS, *INTS, *FP8, torch.bool)


@dataclass(frozen=True)
class Store:
    """`value` goes to element row * stride + `offset` of output number `output`, for all lanes of `offset`."""

    output: int
    value: Expr
    offset: Index
    lanes: frozenset[Lane]


@dataclass(frozen=True)
class Kept:
    """What a body computes. `inputs` has None where the body takes a number."""

    builder: Builder
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    stores: list[Store]
    front: Front | None
    parts: int
    runs: int  # the most that an axis is cut into

    @property
    def order(self) -> list[Expr]:
        """What the stores need, in order."""
        return reachable([store.value for store in self.stores], self.builder.order)

    @property
    def elements(self) -> int:
        """Of the largest tile of a row, or of a part of it, all its runs taken together."""
        return max((int(np.prod([lane.padded for lane in expr.lanes])) for expr in self.order), default=1) * self.runs


class NeedsParts(Exception):
    """A row is too large for a program, and its results fall into parts."""


def read(body: GraphModule) -> Kept:
    """What `body` stores, or NotRowwise. Long axes are cut into runs, unless that is more than a kernel spells out, or
    what is beside them then seems too much at once."""
    try:
        kept = _in_parts(body, cuts=True)
    except NotRowwise:
        kept = None
    if kept is None or (kept.runs > 1 and len(kept.order) > SPELLED):
        kept = _in_parts(body, cuts=False)
    if (count := len(kept.order)) > SPELLED:
        raise NotRowwise(body.graph.output_node(), f"takes {count} operations to spell out")
    return kept


def _in_parts(body: GraphModule, cuts: bool) -> Kept:
    try:
        return _read(body, 1, cuts)
    except NeedsParts:
        return _read(body, parts_of(body), cuts)


def parts_of(body: GraphModule) -> int:
    """Into how many parts the results of a row fall: the size of axis 1, if it is not the last and all have it."""
    values = [node.meta["val"] for node in outputs_of(body) if isinstance(node, Node)]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    sizes = {shape[1] if len(shape) > 2 and isinstance(shape[1], int) else 1 for shape in shapes}
    return sizes.pop() if len(sizes) == 1 else 1


def _read(body: GraphModule, parts: int, cuts: bool) -> Kept:
    held = Held(Builder(), parts=parts, cuts=cuts)
    arguments = [_input(held, i, n) for i, n in enumerate(n for n in body.graph.nodes if n.op == "placeholder")]
    end = body.graph.output_node()
    if held.rows is None:
        raise NotRowwise(end, "reads no tensor whose first axis is symbolic: there are no rows")
    results = _run(held, body, arguments)
    outputs, stores = list[Tensor](), list[Store]()
    for number, (node, value) in enumerate(zip(outputs_of(body), results, strict=True)):
        if not isinstance(value, Lazy) or value.shape[:1] != (None,):
            raise NotRowwise(end, f"has no row axis in output {number}")
        if 0 in value.shape:
            raise NotRowwise(node, "returns no elements")
        outputs.append(described(f"out_{number}", node))
        try:
            stores += _stores(held, number, value, parts_of(body))
        except Refused as refusal:
            raise NotRowwise(node, refusal.reason) from None
    return Kept(held.builder, held.inputs, outputs, stores, held.front, held.parts, held.runs)


def _input(held: Held, index: int, node: Node) -> Any:
    meta = node.meta["val"]
    if not isinstance(meta, torch.Tensor):
        held.inputs.append(None)
        return meta
    tensor = described(node.name, node)
    if meta.dtype not in TYPES:
        raise NotRowwise(node, f"is of dtype {meta.dtype}")
    if tensor.per_row and held.rows is None:
        held.rows = meta.shape[0]
    held.inputs.append(tensor)
    try:
        shape = shape_of(held, meta)
    except Refused as refusal:
        raise NotRowwise(node, refusal.reason) from None
    if None in shape[1:]:
        raise NotRowwise(node, "has a symbolic size beyond its first axis")
    value = Lazy(held, shape, meta.dtype, lambda where: held.fetch(index, tensor, where))
    held.names[value] = node.name
    return value


def _run(held: Held, body: GraphModule, arguments: list[Any]) -> list[Any]:
    def call(node: Node, env: dict[Node, Any]) -> Any:
        found = _call(held, node, env)
        if isinstance(found, Lazy):
            held.names.setdefault(found, node.name)
        return found

    return walk(held.builder, body, arguments, call)


def _call(held: Held, node: Node, env: dict[Node, Any]) -> Any:
    if node.target is invoke_subgraph:
        return _run(held, body_of(node), [env[arg] for arg in node.args[2:]])  # type: ignore[index]
    meta = node.meta.get("val")
    if not isinstance(meta, (torch.Tensor, tuple, list)):
        return None  # arithmetic on sizes: the shapes in meta already hold its result
    check_numbers(node)
    args: Any = torch.fx.map_arg(node.args, lambda n: env[n])
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None}
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target in ELEMENTWISE:
        return _elementwise(held, node, args, kwargs)
    handler = HANDLERS.get(node.target)
    if handler is None:
        raise Refused(f"calls {node.target}, which this generator does not know")
    if any(part.dtype not in TYPES for part in ([meta] if isinstance(meta, torch.Tensor) else meta)):
        raise Refused(f"computes in {meta.dtype if isinstance(meta, torch.Tensor) else meta[0].dtype}")
    return handler(held, meta, *args, **kwargs)


def _elementwise(held: Held, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lazy:
    rule, meta = ELEMENTWISE[node.target], node.meta["val"]
    dtype = meta.dtype
    if dtype not in TYPES:
        raise Refused(f"computes in {dtype}")
    kwargs = {key: value for key, value in kwargs.items() if key not in PLACEMENT}
    unknown = sorted(kwargs.keys() - {"alpha", "min", "max"})
    if unknown:
        raise Refused(f"calls {node.target} with {unknown[0]}")
    beside = next((arg.dtype for arg in args if isinstance(arg, Lazy)), dtype)
    like = dtype if dtype != torch.bool else beside

    def compute(index: Indices) -> Expr:
        given = (
            arg.at(aligned(index, arg.shape)) if isinstance(arg, Lazy) else
            scalar(held.builder, arg, like) if is_operand(arg) else arg
            for arg in args
        )  # fmt: skip
        return rule(held.builder, dtype, *given, **kwargs)

    return Lazy(held, shape_of(held, meta), dtype, compute)


# ---- stores


def _stores(
    held: Held, output: int, value: Lazy, parts: int, base: int = 0, strides: tuple[int, ...] = ()
) -> list[Store]:
    """The stores of an output, which lies `base` elements into the row, its elements `strides` apart. NeedsParts where
    the row is too large, not in `parts` yet, and could be."""
    if not strides:
        sizes = [size or 1 for size in value.shape[1:]]
        strides = (0, *(int(torch.Size(sizes[i + 1 :]).numel()) for i in range(len(sizes))))
    in_parts = held.parts > 1  # axis 1 is all programs' then, and not to be cut
    if value.parts and not (in_parts and value.parts[0][0] == 1):
        return [store for dim, start, part in value.parts for store in
                _stores(held, output, part, parts, base + start * strides[dim], strides)]  # fmt: skip
    boxes = list(product(*(
        [(0, size or 1)] if in_parts and axis == 1 else _runs(held, size or 1)
        for axis, size in enumerate(value.shape))))  # fmt: skip
    found: list[Store] = []
    while boxes:
        box = boxes.pop(0)
        try:
            found.append(_store(held, output, value, box, base, strides))
        except NeedsCut as cut:
            first, last = box[cut.axis]
            middle = first + cut.place
            boxes[:0] = [(*box[: cut.axis], half, *box[cut.axis + 1 :]) for half in ((first, middle), (middle, last))]
        except TooLarge:
            if held.parts < parts and held.front is None:
                raise NeedsParts from None
            axis = next((i for i, (first, last) in enumerate(box[:-1])
                         if 1 < last - first <= APART and not (in_parts and i == 1)), None)  # fmt: skip
            if axis is None:
                raise
            boxes[:0] = [(*box[:axis], (i, i + 1), *box[axis + 1 :]) for i in range(*box[axis])]
    return found


def _runs(held: Held, size: int) -> list[tuple[int, int]]:
    """Where the runs of an axis begin and end."""
    run = size // held.runs_of(size)
    return [(start, start + run) for start in range(0, size, run)]


def _store(held: Held, output: int, value: Lazy, box: Any, base: int, strides: tuple[int, ...]) -> Store:
    held.splits_at = (output, base, box)
    for _ in range(TURNS):
        used: set[Lane] = set()
        held.store = tuple(held.axis(last - first, used) for first, last in box)
        if held.parts > 1:
            held.store = (held.store[0], Index(((1, Part(held.parts, 0)),)), *held.store[2:])
            used = {lane for each in held.store for lane in each.lanes()}
        index = tuple(each + first for each, (first, _last) in zip(held.store, box, strict=True))
        try:
            expr = value.at(index)
        except NeedsSplit as need:
            table = held.splits.setdefault(need.tables[0] if need.tables else held.splits_at, {})
            table[need.size] = need.inner
            continue
        offset = Index((), base)
        for each, stride in zip(index, strides, strict=True):
            offset = offset + each * stride
        return Store(output, expr, offset, frozenset(used))
    raise Refused("cannot be cut into lanes")
