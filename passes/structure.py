"""structure_key: one hash for all graphs that do the same work on the same kinds of inputs, whatever the names.

In the key: operators, wiring, constants (floats bit by bit, tensors by content), region kinds and attributes, and of
every input its dtype, device, shape, strides and offset. Out of it: names, stack traces, messages of assertions.
Unbacked symbols are numbered as they appear, and stand with their range; a backed symbol keeps its name, for
compiling one piece may guard on it, and that guard would not bind another. Two graphs with one key can share a
compiled artifact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import FunctionType

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node

from v41._compat import content_of, renamed, symbol_facts
from v41.passes.analysis.effects import ASSERTS
from v41.regions import META, invoke_subgraph


def structure_key(gm: GraphModule) -> str:
    """Hexadecimal, 16 digits; the same in every process."""
    text = "\n".join(_lines(gm, Symbols()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Symbols:
    """Names symbols by their first appearance."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def spell(self, size: int | float | bool | SymInt | SymFloat | SymBool) -> str:
        if not isinstance(size, (SymInt, SymFloat, SymBool)):
            return _constant(size)
        facts = symbol_facts(size)
        for symbol in sorted(facts):
            self.names.setdefault(symbol, f"k{len(self.names)}({facts[symbol]})")
        return renamed(size, self.names)

    def spec(self, value: object) -> str:
        if not isinstance(value, Tensor):
            return f"{type(value).__name__} {self.spell(value)}"  # type: ignore[arg-type]
        sizes = (
            ",".join(map(self.spell, numbers)) for numbers in (value.shape, value.stride(), (value.storage_offset(),))
        )
        return f"{value.dtype} {value.device} " + " ".join(f"[{part}]" for part in sizes)


def _lines(gm: GraphModule, symbols: Symbols) -> Iterator[str]:
    number: dict[Node, str] = {}
    for node in gm.graph.nodes:
        number[node] = f"%{len(number)}"
        if node.op == "placeholder":
            yield f"{number[node]} input {symbols.spec(node.meta.get('val'))}"
        elif node.op == "get_attr":
            yield from _attribute(gm, node, symbols, number[node])
        else:
            args, kwargs = node.args, dict(sorted(node.kwargs.items()))
            if node.target is invoke_subgraph:
                args = (args[0], None, *args[2:])  # the identifier is a name
            elif node.target in ASSERTS:
                args, kwargs = args[:1], {}  # what remains is the message
            yield f"{number[node]} {node.op} {_called(node.target)} {_spell((args, kwargs), number, symbols)}"


def _called(target: object) -> str:
    """What a node calls; of a function in Python (torch.sym_min) its place, for its text tells its address."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


def _attribute(gm: GraphModule, node: Node, symbols: Symbols, number: str) -> Iterator[str]:
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(gm.get_submodule(owner), name)
    if isinstance(value, GraphModule):
        region = value.meta.get(META)
        yield f"{number} body {region and (region.kind, sorted(region.attrs.items()))}"
        yield from ("  " + line for line in _lines(value, symbols))
        return
    content = content_of(value)
    told = hashlib.sha256(content).hexdigest() if content is not None else f"unknown content of {node.target}"
    yield f"{number} constant {symbols.spec(value)} {told}"


def _spell(value: object, number: dict[Node, str], symbols: Symbols) -> str:
    match value:
        case Node():
            return number[value]
        case tuple() | list():
            return f"({', '.join(_spell(item, number, symbols) for item in value)})"
        case dict():
            return f"{{{', '.join(f'{key}: {_spell(item, number, symbols)}' for key, item in value.items())}}}"
        case slice():
            return f"slice{_spell((value.start, value.stop, value.step), number, symbols)}"
        case SymInt() | SymFloat() | SymBool():
            return symbols.spell(value)
    return _constant(value)


def _constant(value: object) -> str:
    return value.hex() if isinstance(value, float) else f"{type(value).__name__} {value}"
