"""executor: a Plan becomes one flat Python function: it calls the pieces in order and frees what nobody reads again.

    def run(inputs):
        arg0_1, arg1_1 = inputs
        inputs.clear()
        embedding, = piece_0(arg0_1, arg1_1)
        del arg0_1
        ...
        return embedding, None

The convention is AOTAutograd's boxed one: the list of inputs is emptied, so that nothing outside keeps a tensor
alive. `executor` returns the function; its text is in `source`. Captured execution calls segments the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from v41.plan import Plan
from v41.regions import flatten
from v41.text_code import define

Artifact = Callable[..., tuple[Any, ...]]
Run = Callable[[list[Any]], tuple[Any, ...]]  # empties the list it is given


def eager_artifact(body: GraphModule) -> Artifact:
    """Runs the ATen nodes of a piece one by one. Regions are inlined, which is exact and spares their dispatch.

    A cast that the decompositions spell as a prim runs as ATen's: the same kernel without 100 µs of Python around it.
    """
    flat = flatten(body)
    for node in flat.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            node.target = torch.ops.aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
    code = flat.graph.python_code("self")
    names = [str(node.target) for node in flat.graph.find_nodes(op="get_attr")]
    constants = SimpleNamespace(**{name: getattr(flat, name) for name in names})
    return MethodType(define(code.src, "forward", code.globals, "<v41 eager piece>"), constants)


class Step(Protocol):
    """A call of the function: `name` is what is called. A Piece is one."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def returns(self) -> tuple[str, ...]: ...
    @property
    def frees(self) -> tuple[str, ...]: ...


def executor(plan: Plan, artifacts: Mapping[str, Artifact]) -> Run:
    """The function that runs `plan`; `artifacts` holds a callable for every key of its pieces."""
    scope = {piece.name: artifacts[piece.key] for piece in plan.pieces}
    taken = scope.keys() & ({"inputs", *plan.values})
    assert not taken and "inputs" not in plan.values, f"a value and a piece share a name: {sorted(taken)}"
    return flat_function(plan.inputs, plan.pieces, plan.outputs, scope)


def flat_function(
    inputs: Sequence[str], steps: Sequence[Step], outputs: Sequence[object], calls: Mapping[str, Callable[..., Any]]
) -> Run:
    """The function that calls `steps` in order; `calls` holds a callable for the name of each."""
    scope = dict(calls)
    exec(_compiled(source(inputs, steps, outputs)), scope)
    run = scope["run"]
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@lru_cache(maxsize=16)
def _compiled(text: str) -> CodeType:
    """Graphs of one plan at several sizes share their text."""
    return compile(text, "<v41 plan>", "exec")


def source(inputs: Sequence[str], steps: Sequence[Step], outputs: Sequence[object]) -> str:
    """The Python text of the function. `outputs`: names, or constants that are no text."""
    lines = ["def run(inputs):"]
    if inputs:
        lines.append(f"    {_tuple(inputs)} = inputs")
    lines.append("    inputs.clear()")
    read = {name for step in steps for name in step.reads} | {name for name in outputs if isinstance(name, str)}
    lines += _del([name for name in inputs if name not in read])
    for step in steps:
        target = f"{_tuple(step.returns)} = " if step.returns else ""
        lines.append(f"    {target}{step.name}({', '.join(step.reads)})")
        lines += _del(step.frees)
    results = [name if isinstance(name, str) else repr(name) for name in outputs]
    return "\n".join([*lines, f"    return ({_tuple(results)})"])


def _tuple(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _del(names: Sequence[str]) -> list[str]:
    return [f"    del {', '.join(names)}"] if names else []
