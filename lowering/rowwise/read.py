"""read: a region's body becomes expressions, or is Refused with the reason.

    before   GraphModule of ATen nodes, fake tensors in meta, dimension 0 of row tensors symbolic
    after    Program: inputs, and per output the expressions of its elements

Readable when every node works on each row by itself (reductions over trailing axes, a product with a weight matrix
that has few outputs, views, elementwise ops), in ops of the tables beside this file. Every cast stays; whatever the
body rounds to bf16 is rounded there. An expression is made once. Nested regions are read in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.lowering.rowwise import products, reductions, views
from v41.lowering.rowwise.axes import ROW, SMALL_LIMIT, WIDE, Axes, Refused, Value, broadcast
from v41.lowering.rowwise.elementwise import DIVISIONS, ELEMENTWISE, FLOATS
from v41.lowering.rowwise.expr import Builder, Expr
from v41.regions import body_of, invoke_subgraph

PLACEMENT = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")  # in meta, or no matter
WIDE_FROM = 33  # a shorter trailing axis is spelled out


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name in the kernel, dtype, dimensions (None for the row axis) and steps between
    elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    steps: tuple[int, ...]

    @property
    def per_row(self) -> bool:
        return self.shape[:1] == (None,)

    @property
    def stride(self) -> int:
        """From one row to the next; 0 for a tensor that all rows share."""
        return self.steps[0] if self.per_row else 0

    @property
    def elements(self) -> int:
        """Of a row."""
        return int(np.prod([size for size in self.shape if size is not None], dtype=np.int64))


@dataclass
class Program:
    """What a body computes. `inputs` has None where the body takes a number (the row count)."""

    axes: Axes
    builder: Builder
    rows: int | torch.SymInt | None = None  # the size of the row axis
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[tuple[Tensor, Value]] = field(default_factory=list)
    once: int = -1  # the input that the first phase alone can read, if there is one


class NotRowwise(Refused):
    """A Refused that names the node of the body."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def read(body: GraphModule) -> Program:
    """The Program of `body`, or NotRowwise."""
    program = Program(Axes(_wide_size(body)), Builder())
    arguments: list[Any] = []
    for index, node in enumerate(n for n in body.graph.nodes if n.op == "placeholder"):
        arguments.append(_input(program, index, node))
    if program.rows is None:
        raise NotRowwise(body.graph.output_node(), "reads no tensor whose first axis is symbolic: there are no rows")
    results = _run(program, body, arguments)
    outputs = outputs_of(body)
    for index, (node, value) in enumerate(zip(outputs, results, strict=True)):
        if not isinstance(value, Value) or value.dims[:1] != ((ROW,),):
            raise NotRowwise(body.graph.output_node(), f"has no row axis in output {index}")
        _same_rows(program, node, node.meta["val"].shape[0])
        program.outputs.append((described(f"out_{index}", node), value))
    return program


def outputs_of(body: GraphModule) -> list[Any]:
    """What the output node lists."""
    (outputs,) = body.graph.output_node().args
    assert isinstance(outputs, (list, tuple))
    return list(outputs)


def _wide_size(body: GraphModule) -> int:
    """The last dimension of the largest input or output that has rows: what is spread over lanes; 0 if all are
    short."""
    rows = row_shapes(body)
    largest = max(rows, key=lambda shape: np.prod(shape[1:], dtype=np.int64), default=())
    return largest[-1] if len(largest) > 1 and largest[-1] >= WIDE_FROM else 0


def row_shapes(body: GraphModule) -> list[tuple[Any, ...]]:
    """The shapes of inputs and outputs that have rows."""
    nodes = [n for n in body.graph.nodes if n.op == "placeholder"]
    nodes += [n for n in outputs_of(body) if isinstance(n, Node)]
    shapes = [tuple(n.meta["val"].shape) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return [shape for shape in shapes if shape and not isinstance(shape[0], int)]


def described(name: str, node: Node) -> Tensor:
    """The Tensor that a node of the body is."""
    meta = node.meta["val"]
    if not all(isinstance(step, int) for step in meta.stride()):
        raise NotRowwise(node, "lies in memory with a symbolic stride")
    shape = tuple(size if isinstance(size, int) else None for size in meta.shape)
    return Tensor(name, meta.dtype, shape, tuple(meta.stride()))


def _input(program: Program, index: int, node: Node) -> Any:
    meta = node.meta["val"]
    if not isinstance(meta, torch.Tensor):
        program.inputs.append(None)
        return meta
    tensor = described(node.name, node)
    if None in tensor.shape[1:]:
        raise NotRowwise(node, "has a symbolic size beyond its first axis")
    if meta.dtype not in (*FLOATS, torch.bool):
        raise NotRowwise(node, f"is of dtype {meta.dtype}")
    if tensor.per_row:
        _same_rows(program, node, meta.shape[0])
    program.inputs.append(tensor)
    program.builder.name = node.name
    try:
        return elements(program, index, tensor, tuple(meta.shape))
    except Refused as refusal:
        raise NotRowwise(node, refusal.reason) from None


def _same_rows(program: Program, node: Node, rows: int | torch.SymInt) -> None:
    """Every row axis is one: a launch has one number of rows."""
    if program.rows is None:
        program.rows = rows
    if not known_equal(program.rows, rows):
        raise NotRowwise(node, f"has {rows} rows beside others of {program.rows}")


def elements(program: Program, source: int, tensor: Tensor, shape: tuple[Any, ...]) -> Value:
    """What each element of input number `source` is, a `tensor` of that `shape`."""
    axes, dims = program.axes, tuple(map(program.axes.factors, shape))
    if tensor.elements > SMALL_LIMIT * max(axes.width, 1):
        raise Refused("holds too many values a row and column")
    factors = [factor for group in dims for factor in group]
    if factors.count(WIDE) > 1:
        raise Refused("has the wide axis twice")
    full = [axes.width if factor == WIDE else max(factor, 1) for factor in factors]
    offsets = _offsets(tensor).reshape(full)
    column = 0
    if WIDE in factors:
        at = factors.index(WIDE)
        column = int(np.diff(offsets.take([0, 1], axis=at), axis=at).flat[0])
        offsets = offsets.take([0], axis=at)
    loads = np.empty(offsets.shape, dtype=object)
    for index in np.ndindex(loads.shape):
        loads[index] = program.builder.load(source, tensor.dtype, tensor.stride, int(offsets[index]), column)
    return axes.value(dims, loads, tensor.dtype)


def _offsets(tensor: Tensor) -> np.ndarray:
    """Where each element of a row lies."""
    sizes = [1 if size is None else size for size in tensor.shape]
    steps = [0 if size is None else step for size, step in zip(tensor.shape, tensor.steps, strict=True)]
    grids = np.indices(sizes).reshape(len(sizes), -1)
    return np.array(steps, dtype=np.int64) @ grids if sizes else np.zeros(1, dtype=np.int64)


def walk(
    builder: Builder, body: GraphModule, arguments: list[Any], call: Callable[[Node, dict[Node, Any]], Any]
) -> list[Any]:
    """Reads `body` with `arguments` for its placeholders, each node by `call`; what its output node lists."""
    env: dict[Node, Any] = {}
    given = iter(arguments)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr" and not isinstance(getattr(body, str(node.target), None), GraphModule):
            raise NotRowwise(node, "reads a constant tensor")
        elif node.op == "call_function":
            builder.name = node.name
            try:
                env[node] = call(node, env)
            except NotRowwise:
                raise
            except Refused as refusal:
                raise NotRowwise(node, refusal.reason) from None
    return [env.get(node) if isinstance(node, Node) else None for node in outputs_of(body)]


def _run(program: Program, body: GraphModule, arguments: list[Any]) -> list[Any]:
    return walk(program.builder, body, arguments, partial(value_of, program))


def value_of(program: Program, node: Node, env: dict[Node, Any]) -> Any:
    """What `node` of a body returns, `env` holding what it reads. Refused."""
    if node.target is invoke_subgraph:
        return _run(program, body_of(node), [env[arg] for arg in node.args[2:]])  # type: ignore[index]
    if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return None  # arithmetic on sizes: the shapes in meta already hold its result
    check_numbers(node)
    args: Any = torch.fx.map_arg(node.args, lambda n: env[n])
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None}
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target in ELEMENTWISE:
        return _elementwise(program, node, args, kwargs)
    handler: Callable[..., Any] | None = (views.VIEWS | reductions.REDUCTIONS | products.PRODUCTS).get(node.target)
    if handler is None:
        raise Refused(f"calls {node.target}, which this generator does not know")
    return handler(program, node.meta["val"], *args, **kwargs)


def _elementwise(program: Program, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    rule = ELEMENTWISE[node.target]
    dtype = node.meta["val"].dtype
    if dtype not in (*FLOATS, torch.bool):
        raise Refused(f"computes in {dtype}")
    kwargs = {key: value for key, value in kwargs.items() if key not in PLACEMENT}
    unknown = sorted(kwargs.keys() - {"alpha", "min", "max"})
    if unknown:
        raise Refused(f"calls {node.target} with {unknown[0]}")
    operands = [i for i, arg in enumerate(args) if is_operand(arg)]
    values = dict(zip(operands, broadcast(program.axes, [_as_value(program, args[i]) for i in operands]), strict=True))
    first = values[operands[0]]
    if node.target in DIVISIONS and _is_shared(values[1]) and not any(item.wide for item in values[0].items()):
        kwargs["shared"] = True
    out = np.empty(first.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        given = (values[i].elements[index] if i in values else arg for i, arg in enumerate(args))
        out[index] = rule(program.builder, dtype, *given, **kwargs)
    return Value(first.dims, out, dtype)


def _is_shared(divisors: Value) -> bool:
    """Whether several quotients have the same divisor. Of numbers it is inverted once; of tiles each quotient is a
    division, since the error of one inverse would be the same in all columns and would not average out in their
    sum."""
    return len(set(divisors.items())) < len(divisors.items())


def is_operand(arg: Any) -> bool:
    """Whether an elementwise op computes with `arg`."""
    return isinstance(arg, (Value, int, float))


def check_numbers(node: Node) -> None:
    """Refused where `node` takes a number that a run brings, such as that of rows. Sizes in a list are in its meta."""
    for arg in (*node.args, *node.kwargs.values()):
        if isinstance(arg, Node) and not isinstance(arg.meta.get("val"), (torch.Tensor, tuple, list)):
            raise Refused("computes with a size that is not fixed")


def _as_value(program: Program, arg: Any) -> Value:
    if isinstance(arg, Value):
        return arg
    constant: Expr = program.builder.const(float(arg))
    return Value((), np.array(constant, dtype=object).reshape(()), torch.float32)
