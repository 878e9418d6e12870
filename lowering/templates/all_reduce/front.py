"""front: what a rank adds to the sum, where the kernel computes it: the nodes in front of the collective as tiles.

    before   rows bf16[6 T, D], places i64[6 T], shared bf16[T, D] -> rows[places] -> [T, 6, D] -> sum, + shared -> part
    after    Front: whoever sends a tile of the part computes it, in registers; the part lies in no memory

Rows of a table that integers name, casts, sums and products of rows, views; no sum over a whole row, which a program
that sends a few columns has not. A few values are added one after the other and no product is fused into a sum, as
eager on a CPU and Inductor do: the part has the bits that it has in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.lowering.rowwise.axes import ROW, WIDE, Axes, Refused, Value
from v41.lowering.rowwise.expr import SUMS, Builder, Expr, reachable
from v41.lowering.rowwise.lines import Lines, times
from v41.lowering.rowwise.names import Names
from v41.lowering.rowwise.read import NotRowwise, Program, Tensor, described, elements, outputs_of, value_of, walk

aten = torch.ops.aten
MOST = 64  # rows of a table that one row reads


class Table(Tensor):
    """An input whose rows others name, as [T, k, D]: what a row reads of it."""

    @property
    def per_row(self) -> bool:
        return False


class InTurn(Builder):
    """Adds a few values one after the other."""

    def fold(self, op: str, items: list[Expr]) -> Expr:
        if op != "add":
            return super().fold(op, items)
        total = items[0]
        for item in items[1:]:
            total = self.apply("add", total, item)
        return total


@dataclass(frozen=True)
class Front:
    """`program` reads `inputs`, by the name of their placeholder; `folded`: of which one a row of the sum has so many
    rows. order: what is computed of a row and column, `part` last."""

    program: Program
    inputs: dict[str, Tensor]
    folded: dict[str, int]
    order: list[Expr]
    part: Expr

    def numbers(self, names: Names) -> Iterator[str]:
        """Lines that compute what a row has once; `row` and `live` are there."""
        return self._lines(names, wide=False)

    def tiles(self, names: Names) -> Iterator[str]:
        """Lines that compute a tile, at `cols`, of which `columns` are there."""
        return self._lines(names, wide=True)

    def _lines(self, names: Names, wide: bool) -> Iterator[str]:
        text = _Text(self.program, names)
        return (text.line(expr) for expr in self.order if expr.wide is wide and expr.op != "const")


@dataclass(frozen=True)
class SumOf:
    """What `ranks` ranks add up: `source`, laid out like the part. `inputs`: of the kernel, None where a number is that
    it does not need. number: which input of what reads the sum stands for it. front: None if the part is an input."""

    number: int
    source: Tensor
    ranks: int
    inputs: list[Tensor | None]
    front: Front | None

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of the inputs that the part is, or is made of, in their order."""
        wanted = {self.source.name} if self.front is None else self.front.inputs.keys()
        return tuple(each.name for each in self.inputs if each is not None and each.name in wanted)

    def numbers(self, names: Names) -> list[str]:
        """Lines that compute what a row of the part needs once; `row` and `live` are there."""
        return [] if self.front is None else list(self.front.numbers(names))

    def tile(self, names: Names, offset: int) -> tuple[list[str], str]:
        """Lines that compute a tile of the part, `offset` elements into the row, and its name; `cols` are there, and
        which of the `columns` the row has."""
        if self.front is not None:
            return list(self.front.tiles(names)), names[self.front.part]
        where = f"{self.source.name}_ptr + row * {self.source.stride} + {offset} + cols"
        return [f"mine = tl.load({where}, mask=live & columns, other=0.0)"], "mine"


class _Text(Lines):
    def __init__(self, program: Program, names: Names) -> None:
        super().__init__(program)
        self.names = names

    def line(self, expr: Expr) -> str:
        return f"{self.names[expr]} = {self._text(expr, masked=True)}"

    def _text(self, expr: Expr, masked: bool = False) -> str:
        if expr.op != "gather":
            return super()._text(expr, masked)
        (place,), (source, stride, column) = expr.args, expr.data
        table = self.program.inputs[int(str(source))]
        assert table is not None
        where = f"{table.name}_ptr + {self.names[place]}.to(tl.int64) * {stride} + {times('cols', int(str(column)))}"
        return f"tl.load({where}, mask=live & columns, other=0.0)"


def read_front(front: GraphModule, axes: Axes) -> Front:
    """The Front of a body that returns the part alone, or NotRowwise. `axes`: of what reads the sum."""
    (part,) = outputs_of(front)
    program = Program(axes, InTurn(), part.meta["val"].shape[0])
    arguments: list[Any] = []
    folded: dict[str, int] = {}
    for index, node in enumerate(front.graph.find_nodes(op="placeholder")):
        arguments.append(_input(program, index, node, _is_table(node), folded))
    (value,) = walk(program.builder, front, arguments, lambda node, env: _call(program, node, env))
    if not isinstance(value, Value) or value.dims != ((ROW,), (WIDE,)):
        raise NotRowwise(part, "is computed, and is not one row of the sum's width a row")
    (element,) = value.items()
    order = reachable([element], program.builder.order)
    if any(expr.op in SUMS for expr in order) or not element.row:
        raise NotRowwise(part, "is computed from whole rows, of which a program sends a few columns")
    inputs = {tensor.name: tensor for tensor in program.inputs if tensor is not None}
    return Front(program, inputs, folded, order, element)


def _input(program: Program, index: int, node: Node, table: bool, folded: dict[str, int]) -> Any:
    meta = node.meta["val"]
    if not isinstance(meta, torch.Tensor):
        program.inputs.append(None)
        return meta
    tensor = described(node.name, node)
    assert program.rows is not None
    count = next((k for k in range(1, MOST + 1) if known_equal(meta.shape[0], k * program.rows)), None)
    if not tensor.per_row or None in tensor.shape[1:] or count is None:
        raise NotRowwise(node, f"is of shape {tuple(meta.shape)} beside {program.rows} rows, in front of the sum")
    program.builder.name = node.name
    if table:
        if meta.ndim != 2 or not meta.dtype.is_floating_point:
            raise NotRowwise(node, f"is a table of shape {tuple(meta.shape)} and dtype {meta.dtype}")
        program.inputs.append(Table(node.name, meta.dtype, (None, count, tensor.shape[1]), (0, *tensor.steps)))
        return node
    if count == 1:
        program.inputs.append(tensor)
        return elements(program, index, tensor, tuple(meta.shape))
    first, *rest = tensor.steps
    many = Tensor(node.name, meta.dtype, (None, count, *tensor.shape[1:]), (count * first, first, *rest))
    program.inputs.append(many)
    folded[node.name] = count
    value = elements(program, index, many, (program.rows, count, *meta.shape[1:]))
    return program.axes.value(((ROW, *value.dims[1]), *value.dims[2:]), value.elements, meta.dtype)


def _is_table(node: Node) -> bool:
    """Whether rows of it are taken, and nothing else is done with it."""
    readers = [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]
    return all(user.target is aten.index.Tensor and user.args[0] is node and len(user.args[1]) == 1 for user in readers)  # type: ignore[arg-type]


def _call(program: Program, node: Node, env: dict[Node, Any]) -> Any:
    if node.target is not aten.index.Tensor:
        return value_of(program, node, env)
    table, (places,) = env[node.args[0]], [env[each] for each in node.args[1]]  # type: ignore[index, union-attr]
    if not isinstance(table, Node):
        raise Refused("takes rows of what the kernel computes")
    source = next(i for i, each in enumerate(program.inputs) if each is not None and each.name == table.name)
    what = program.inputs[source]
    if what is None or what.shape[-1] != program.axes.width:
        raise Refused(f"takes rows of {what and what.shape[-1]} beside a sum of {program.axes.width}")
    out = np.empty(places.elements.shape, dtype=object)
    for index in np.ndindex(out.shape):
        out[index] = program.builder.make(
            "gather", (places.elements[index],), what.dtype, source, *what.steps[1:], row=True, wide=True
        )
    return program.axes.value((*places.dims, (WIDE,)), out[..., None], what.dtype)
