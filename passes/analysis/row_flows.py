"""row_flows: what is known of a tensor, and which rows of its operands a node reads: the words of row rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from v41.passes.analysis.algebra import Expr, expression
from v41.passes.analysis.layouts import Found, Layout
from v41.passes.analysis.meanings import MEANINGS, Meaning, number
from v41.passes.matching import fake, shape


@dataclass(frozen=True)
class Value:
    """What is known of a tensor. Without a layout it has no rows: who reads a part may read all of it."""

    layout: Layout | None = None
    meaning: Meaning | None = None


@dataclass(frozen=True)
class Flow:
    """Which rows of an operand are read: those demanded of the result ("same"), they and `rows` rows before each
    ("back"), those that `index` says and `rows` before each ("chosen"), the last `rows` of each chunk ("last"), those
    and the ones that `index` says ("kept"), all ("every")."""

    how: str
    rows: int = 0
    index: Node | None = None
    why: str = ""


SAME = Flow("same")
Values = Value | tuple[Value, ...]
Made = tuple[Values, list[tuple[Node, Flow]]]


class Look:
    """What a rule may ask: how many rows a step has, and what is known of the nodes before."""

    def __init__(self, rows: Expr, values: dict[Node, Values]) -> None:
        self.rows, self.values = rows, values

    def layout(self, arg: object) -> Layout | None:
        value = self.values.get(arg) if isinstance(arg, Node) else None
        return value.layout if isinstance(value, Value) else None

    def meaning(self, arg: object) -> Meaning | None:
        if not isinstance(arg, Node):
            return number(arg)
        size, value = arg.meta.get("val"), self.values.get(arg)
        if isinstance(size, torch.SymInt):
            return Meaning("last row") if expression(size) == self.rows - 1 else None
        return value.meaning if isinstance(value, Value) else None

    def meant(self, node: Node) -> Meaning | None:
        rule = MEANINGS.get(node.target)
        return rule(node, tuple(map(self.meaning, node.args))) if rule is not None else None


Rule = Callable[[Node, Look], "Made | str"]


def tensors(node: Node) -> list[Node]:
    return [arg for arg in node.all_input_nodes if fake(arg) is not None or isinstance(arg.meta.get("val"), tuple)]


def local(found: Found, node: Node, look: Look) -> Made | str:
    """A node each of whose results lies as `found` says, and reads of each operand the rows demanded of it."""
    if isinstance(found, str):
        return found
    flows = [(arg, SAME) for arg in tensors(node)]
    results = node.meta.get("val")
    if isinstance(results, (tuple, list)):
        return tuple(Value(found) for _ in results), flows
    return Value(found, look.meant(node)), flows


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def dims_of(value: object) -> Sequence[int]:
    return [value] if isinstance(value, int) else cast("Sequence[int]", value or ())


def ndim(node: Node) -> int:
    """Of its first argument."""
    return len(shape(cast("Node", node.args[0])))


def steps(node: Node) -> tuple[object, object]:
    """Of an iota."""
    return node.kwargs.get("start"), node.kwargs.get("step")
