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

Where the plan has side streams and there are any, the function switches between them, marks events and waits for them,
as the plan says; without streams it runs the pieces in order, which is one of the orders the plan allows. Where a plan
holds others with side streams, the number of rows decides which of them runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from v41.plan import END, START, Plan
from v41.regions import flatten
from v41.runtime.static_inputs import place_of
from v41.runtime.streams import Lanes
from v41.text_code import define

Artifact = Callable[..., tuple[Any, ...]]
Run = Callable[[list[Any]], tuple[Any, ...]]  # empties the list it is given
LanesOf = Callable[[Plan], Lanes]
OWN = ("inputs", "flight", "begin")  # names that the function takes for itself


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


def executor(plan: Plan, artifacts: Mapping[str, Artifact], lanes: LanesOf | None = None) -> Run:
    """The function that runs `plan`; `artifacts` holds a callable for every key of its pieces. lanes: makes the side
    streams of a plan; without, all runs on the caller's."""
    alone = _executor(plan, artifacts, lanes)
    if not plan.sides or lanes is None:
        return alone
    runs = [(each.pays_at, _executor(each, artifacts, lanes)) for each in plan.sides]
    return by_rows(plan, alone, {rows: run for rungs, run in runs for rows in rungs})


def _executor(plan: Plan, artifacts: Mapping[str, Artifact], lanes: LanesOf | None) -> Run:
    scope: dict[str, Callable[..., Any]] = {piece.name: artifacts[piece.key] for piece in plan.pieces}
    taken = scope.keys() & ({*OWN, *plan.values})
    assert not taken and not plan.values.keys() & {*OWN}, f"a value and a piece share a name: {sorted(taken)}"
    if lanes is None or not plan.events:
        return flat_function(plan.inputs, plan.pieces, plan.outputs, scope)
    text = source_with_streams(plan)
    return _function(text, scope | {"begin": lanes(plan)})


def by_rows(plan: Plan, alone: Run, overlapped: Mapping[int, Run]) -> Run:
    """That of `overlapped` for numbers of rows at which one pays, else `alone`. Between two rungs the upper counts."""
    symbol = next(symbol for symbol, name in plan.sizes.items() if name == "rows")
    place, axis = place_of(plan, symbol)
    rungs = sorted({*overlapped, *plan.buckets.get("rows", ())})

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        rows = inputs[place] if axis is None else inputs[place].shape[axis]
        rung = rungs[at] if (at := bisect_left(rungs, rows)) < len(rungs) else 0
        return overlapped.get(rung, alone)(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def flat_function(
    inputs: Sequence[str], steps: Sequence[Step], outputs: Sequence[object], calls: Mapping[str, Callable[..., Any]]
) -> Run:
    """The function that calls `steps` in order; `calls` holds a callable for the name of each."""
    return _function(source(inputs, steps, outputs), calls)


def _function(text: str, calls: Mapping[str, Callable[..., Any]]) -> Run:
    scope = dict(calls)
    exec(_compiled(text), scope)
    run = scope["run"]
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@lru_cache(maxsize=16)
def _compiled(text: str) -> CodeType:
    """Graphs of one plan at several sizes share their text."""
    return compile(text, "<v41 plan>", "exec")


def source(inputs: Sequence[str], steps: Sequence[Step], outputs: Sequence[object]) -> str:
    """The Python text of the function. `outputs`: names, or constants that are no text."""
    lines = _head(inputs, steps, outputs)
    for step in steps:
        lines += [_call(step), *_del(step.frees)]
    return "\n".join(["def run(inputs):", *indented([*lines, _return(outputs)])])


def source_with_streams(plan: Plan) -> str:
    """The same for a plan with side streams; `begin` makes a Flight. What a piece frees goes when the waits behind it
    are issued: a stream that still has to be told to wait must not be given its memory, by whichever thread."""
    marks = {after: i for i, after in enumerate(dict.fromkeys(event.after for event in plan.events))}
    waits: dict[str, list[str]] = {}
    for event in plan.events:
        waits.setdefault(event.before, []).append(f"flight.wait({marks[event.after]})")
    lines = [f"flight.mark({marks[START]})"] if START in marks else []
    current, dead = 0, tuple[str, ...]()
    for piece in plan.pieces:
        lines += [f"flight.switch({piece.stream})"] if piece.stream != current else []
        lines += [*waits.get(piece.name, []), *_del(dead), _call(piece)]
        lines += [f"flight.mark({marks[piece.name]})"] if piece.name in marks else []
        current, dead = piece.stream, piece.frees
    lines += ["flight.switch(0)"] if current else []
    lines += waits.get(END, [])
    body = ["flight = begin()", "try:", *indented(lines), "except BaseException:", "    flight.abandon()", "    raise"]
    head = _head(plan.inputs, plan.pieces, plan.outputs)
    tail = ["flight.end()", *_del(dead), _return(plan.outputs)]
    return "\n".join(["def run(inputs):", *indented([*head, *body, *tail])])


def events_of(plan: Plan) -> int:
    """How many events its function marks."""
    return len({event.after for event in plan.events})


def _head(inputs: Sequence[str], steps: Sequence[Step], outputs: Sequence[object]) -> list[str]:
    read = {name for step in steps for name in step.reads} | {name for name in outputs if isinstance(name, str)}
    taken = [f"{_tuple(inputs)} = inputs"] if inputs else []
    return [*taken, "inputs.clear()", *_del([name for name in inputs if name not in read])]


def _call(step: Step) -> str:
    target = f"{_tuple(step.returns)} = " if step.returns else ""
    return f"{target}{step.name}({', '.join(step.reads)})"


def _return(outputs: Sequence[object]) -> str:
    return f"return ({_tuple([name if isinstance(name, str) else repr(name) for name in outputs])})"


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _tuple(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _del(names: Sequence[str]) -> list[str]:
    return [f"del {', '.join(names)}"] if names else []
