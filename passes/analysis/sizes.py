"""sizes: which symbols a value has, which a node works with, and what the symbols of a program's inputs are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node

from v41._compat import shape_ids, symbols_of


def symbols_in(value: object) -> dict[str, None]:
    """The symbols in the shape and strides of a tensor, in an int, or in any of several; in order of appearance."""
    if isinstance(value, (tuple, list)):
        return {symbol: None for each in value for symbol in symbols_in(each)}
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return {symbol: None for size in sizes if isinstance(size, SymInt) for symbol in sorted(symbols_of(size))}


class NodeSizes:
    """Symbols of nodes, each looked up once."""

    def __init__(self) -> None:
        self._of: dict[Node, dict[str, None]] = {}

    def made(self, node: Node) -> dict[str, None]:
        """Those of its value, also where it is a number that is no size, or a bool that follows from data."""
        if node not in self._of:
            value: Any = node.meta.get("val")
            told = isinstance(value, SymFloat) or (isinstance(value, SymBool) and _from_data(node))
            self._of[node] = dict.fromkeys(sorted(symbols_of(value))) if told else symbols_in(value)
        return self._of[node]

    def worked_with(self, node: Node) -> dict[str, None]:
        """Those of its arguments and of its value."""
        return {symbol: None for each in (*node.all_input_nodes, node) for symbol in self.made(each)}


def _from_data(node: Node) -> bool:
    """Whether no piece can work it out from sizes for itself."""
    return node.op == "placeholder" or any(isinstance(arg.meta.get("val"), Tensor) for arg in node.all_input_nodes)


def size_names(gm: GraphModule, called: Mapping[str, str]) -> dict[str, str]:
    """Symbol of the inputs -> its name: that by which it was marked, else the first dimension that has it: "tokens.0".

    called: input -> what the user calls it.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = shape_ids([node.meta.get("val") for node in inputs])
    names: dict[str, str] = {}
    for node in sorted(inputs, key=lambda node: not isinstance(node.meta.get("val"), Tensor)):  # tensors first
        value, name = node.meta.get("val"), called.get(node.name, node.name)
        for dim, size in enumerate(value.shape) if isinstance(value, Tensor) else ():
            for symbol in symbols_in(size):
                names.setdefault(symbol, known.get(symbol, f"{name}.{dim}"))
        for symbol in symbols_in(value):  # of strides, or of an int
            names.setdefault(symbol, known.get(symbol, name))
    return names
