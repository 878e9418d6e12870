"""executor: a Plan becomes one flat Python function: it calls the pieces in order and frees what nobody reads again.

    def run(inputs):
        arg0_1, arg1_1 = inputs
        inputs.clear()
        embedding, = piece_0(arg0_1, arg1_1)
        del arg0_1
        ...
        return embedding, None

The convention is AOTAutograd's boxed one: the list of inputs is emptied, so that nothing outside keeps a tensor
alive. `executor` returns the function; its text is in `source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from v41.plan import Plan
from v41.regions import flatten

Artifact = Callable[..., tuple[Any, ...]]


def eager_artifact(body: GraphModule) -> Artifact:
    """Runs the ATen nodes of a piece one by one. Regions are inlined, which is exact and spares their dispatch.

    A cast that the decompositions spell as a prim runs as ATen's: the same kernel without 100 µs of Python around it.
    """
    flat = flatten(body)
    for node in flat.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            node.target = torch.ops.aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
    flat.recompile()
    return flat.forward


def executor(plan: Plan, artifacts: Mapping[str, Artifact]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The function that runs `plan`; `artifacts` holds a callable for every key of its pieces."""
    text = source(plan)
    scope: dict[str, Any] = {piece.name: artifacts[piece.key] for piece in plan.pieces}
    taken = scope.keys() & ({"inputs", *plan.values})
    assert not taken and "inputs" not in plan.values, f"a value and a piece share a name: {sorted(taken)}"
    exec(compile(text, "<v41 plan>", "exec"), scope)
    run = scope["run"]
    run._boxed_call = True
    return run


def source(plan: Plan) -> str:
    """The Python text of the function that runs `plan`."""
    lines = ["def run(inputs):"]
    if plan.inputs:
        lines.append(f"    {_tuple(plan.inputs)} = inputs")
    lines.append("    inputs.clear()")
    read = {name for piece in plan.pieces for name in piece.reads} | {
        name for name in plan.outputs if isinstance(name, str)
    }
    lines += _del([name for name in plan.inputs if name not in read])
    for piece in plan.pieces:
        target = f"{_tuple(piece.returns)} = " if piece.returns else ""
        lines.append(f"    {target}{piece.name}({', '.join(piece.reads)})")
        lines += _del(piece.frees)
    results = [name if isinstance(name, str) else repr(name) for name in plan.outputs]
    return "\n".join([*lines, f"    return ({_tuple(results)})"])


def _tuple(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _del(names: tuple[str, ...] | list[str]) -> list[str]:
    return [f"    del {', '.join(names)}"] if names else []
