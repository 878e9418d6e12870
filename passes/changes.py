"""changes: what a pass did to a program, node by node, as values that outlive the graph.

    before   mul_3 = aten.mul.Tensor(x, 2)              Change("moved", "mul_3", ..., body="relu_0")
             relu_1 = aten.relu.default(mul_3)          Change("moved", "relu_1", ..., body="relu_0")
    after    invoke_subgraph = region relu_0(x) -> relu_1   Change("added", ...)
             add_2 = aten.add.Tensor(relu_1, 1)         no change: it reads what it read

Nodes go by their names, which no pass changes, and those in a body by the name of the body as well: one that layers
share calls its own regions as another does, so theirs are "shared_1/relu_0". What a region returns goes by the name it
has inside: who reads it was not rewired. Inputs and the references of bodies are left out.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from v41.plan import spec
from v41.regions import META, body_of, invoke_subgraph, is_region
from v41.report import Change, source_of

ORIGIN = "v41_origin"  # in a node's meta: its Key in the program that the passes left
Key = tuple[str, str]  # body, name
Lines = dict[Key, tuple[str, str]]  # in order of the program -> what the node calls, its line of the model


def lines_of(gm: GraphModule) -> Lines:
    """Every node of `gm` and of its bodies, each body once, as a line."""
    lines: Lines = {}
    for body, inside in bodies(gm):
        lines |= {(body, name): line for name, line in own_lines(inside).items()}
    return lines


def own_lines(gm: GraphModule) -> dict[str, tuple[str, str]]:
    """The same of `gm` alone, by name."""
    return {node.name: line for node in gm.graph.nodes if (line := _line(gm, node)) is not None}


def bodies(gm: GraphModule) -> list[tuple[str, GraphModule]]:
    """`gm` itself, as "", and every body that it calls at any depth, each once, behind those that it calls itself."""
    found: list[tuple[str, GraphModule]] = []
    _collect(gm, "", "", found, set())
    return found


def inner_name(call: Node, owner: str) -> str:
    """The name of the body that `call` calls, in a program or in the shared body `owner` ("" or "shared_1/")."""
    return owner + str(call.args[0].target)  # type: ignore[union-attr]


def owner_in(call: Node, owner: str) -> str:
    """The owner for calls in the body that `call` calls: a region's are named by who made the region."""
    return owner if is_region(call) else f"{inner_name(call, owner)}/"


def mark(gm: GraphModule) -> None:
    """Gives every node its Key, which copies of it keep, so that what became of it can be told."""
    for body, inside in bodies(gm):
        for node in inside.graph.nodes:
            node.meta[ORIGIN] = (body, node.name)


def changes(before: Lines, after: Lines) -> list[Change]:
    """What differs: first what is there afterwards, in order, then what is gone."""
    gone = {key: line for key, line in before.items() if key not in after}
    by_name: dict[str, list[Key]] = {}
    for key in gone:
        by_name.setdefault(key[1], []).append(key)
    found = []
    for (body, name), (text, source) in after.items():
        if (body, name) in before:
            old, _ = before[body, name]
            if old != text:
                found.append(Change("rewired", name, old, text, source, body))
            continue
        origin = next((key for key in by_name.get(name, ()) if operator_of(gone[key][0]) == operator_of(text)), None)
        if body and origin is not None:
            by_name[name].remove(origin)
            old, _ = gone.pop(origin)
            found.append(Change("moved", name, old, text, source, body))
        else:
            found.append(Change("added", name, None, text, source, body))
    return found + [Change("removed", name, text, None, source, body) for (body, name), (text, source) in gone.items()]


def operator_of(text: str) -> str:
    """What a line calls, without the arguments."""
    return text.partition("(")[0]


def _collect(
    gm: GraphModule, name: str, owner: str, found: list[tuple[str, GraphModule]], seen: set[GraphModule]
) -> None:
    seen.add(gm)
    for node in gm.graph.nodes:
        if node.target is invoke_subgraph and body_of(node) not in seen:
            _collect(body_of(node), inner_name(node, owner), owner_in(node, owner), found, seen)
    found.append((name, gm))


def _line(gm: GraphModule, node: Node) -> tuple[str, str] | None:
    """What `node` calls, and its line of the model; None of what is left out."""
    if node.op in ("placeholder", "get_attr") or _is_result_of_region(node):
        return None
    if node.op != "output":
        return _text(node), source_of(node)
    return None if META in gm.meta else (f"return {_spell(node.args[0])}", source_of(node))  # else the region's line


def _text(node: Node) -> str:
    if node.target is invoke_subgraph:
        body = str(node.args[0].target)  # type: ignore[union-attr]
        given = ", ".join(_spell(arg) for arg in node.args[2:])
        if not is_region(node):
            return f"subgraph {body}({given})"
        return f"region {body}({given}) -> {_spell(body_of(node).graph.output_node().args[0])}"
    given = ", ".join([*map(_spell, node.args), *(f"{name}={_spell(arg)}" for name, arg in node.kwargs.items())])
    value = node.meta.get("val")
    told = f"  {spec(value)}" if isinstance(value, (Tensor, SymInt)) else ""
    return f"{node.target if isinstance(node.target, str) else _called(node.target)}({given}){told}"


def _called(target: Any) -> str:
    return str(target) if "." in str(target) and " " not in str(target) else getattr(target, "__name__", str(target))


def _is_result_of_region(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and is_region(source)


def named(node: Node) -> str:
    """The name of a node; of what a region returns, the one that it has inside."""
    while _is_result_of_region(node):
        call, index = node.args
        result = body_of(call).graph.output_node().args[0][index]  # type: ignore[arg-type, index]
        if not isinstance(result, Node):
            break
        node = result
    return node.name


def _spell(value: Any) -> str:
    match value:
        case Node():
            return named(value)
        case tuple() | list():
            return f"[{', '.join(map(_spell, value))}]"
        case dict():
            return f"{{{', '.join(f'{name}: {_spell(each)}' for name, each in value.items())}}}"
        case slice():
            return f"{_spell(value.start)}:{_spell(value.stop)}:{_spell(value.step)}"
    return repr(value) if isinstance(value, str) else str(value)
