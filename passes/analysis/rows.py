"""rows: which rows of each value of a program anybody reads, found backward from what it returns and writes.

    logits = head(norm(X)[logit_rows])      X               rows that logit_rows says
    ring[last W of each chunk] = records    records         the last W of each chunk
    keys = records[row - W + 1 .. row]      records         and the W - 1 rows before each row demanded of keys
    entries[every group] = latent           latent          all

Rows of a result are read row by row (row_rules.py) or all at once: then the demand says which node mixes them. Regions
and other subgraphs are looked into. What is demanded too much costs time; what is demanded too little is a wrong
program, so whatever is not known demands all rows. Pad rows are nobody's: what they hold reaches no other row.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import OpOverload
from v41.passes.analysis.algebra import Expr, sizes
from v41.passes.analysis.effects import effect_of, effects_of
from v41.passes.analysis.layouts import ROWS, Layout, Space
from v41.passes.analysis.masks import Ended, matter_only_where
from v41.passes.analysis.meanings import FLOORS, Meaning
from v41.passes.analysis.row_flows import Flow, Look, Value, Values
from v41.passes.analysis.row_rules import rule_of
from v41.passes.matching import fake
from v41.regions import body_of, invoke_subgraph


@dataclass(frozen=True)
class Ragged:
    """Inputs that say how the rows of a step belong to requests. Naming one is a promise that no graph can prove:

    positions, stops      rows of a chunk follow each other, their positions count up by one to stop - 1; pads come
                          last, at -1. The last slot of what is written by slot is nobody's.
    first_rows, longest, requests, columns      row = first_rows[requests] + columns, and columns are among `longest`
    starts, late_floors, logit_rows     a key at or above both (starts: the chunk's first position) is of a row that the
                          ring of its layer keeps, or one of logit_rows: so where batches bound their replay (SWA)
    """

    positions: Node  # [T]: its size is the number of rows
    stops: Node | None = None
    first_rows: Node | None = None
    longest: Node | None = None
    requests: Node | None = None
    columns: Node | None = None
    starts: Node | None = None
    late_floors: Node | None = None
    logit_rows: Node | None = None


def ragged(gm: GraphModule, called: Mapping[str, str]) -> Ragged | None:
    """The inputs by what the user calls them, "batch.positions" and so on; None where no input is called so.

    Late floors that nothing reads are no promise: where batches do not bound their replay, they are as low as all
    others.
    """
    names = {f.name for f in fields(Ragged)}
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and fake(node) is not None]
    found = {name: node for node in inputs if (name := called.get(node.name, "").rpartition(".")[2]) in names}
    if "late_floors" in found and not found["late_floors"].users:
        del found["late_floors"]
    return Ragged(**found) if "positions" in found else None


# ---- the lattice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """A set of rows: all; or the last `last` of each chunk, and for each index tensor in `chosen` the rows it says with
    so many before each. Indices are inputs. Ordered by inclusion, as far as that is known."""

    every: bool = False
    last: int = 0
    chosen: Mapping[Node, int] = field(default_factory=dict)

    def __or__(self, other: Demand) -> Demand:
        if self.every or other.every:
            return EVERY
        before = {index: max(self.chosen.get(index, 0), rows) for index, rows in other.chosen.items()}
        return Demand(False, max(self.last, other.last), {**self.chosen, **before})

    def __le__(self, other: Demand) -> bool:
        return self | other == other

    def __hash__(self) -> int:
        return hash((self.every, self.last, frozenset(self.chosen.items())))

    def __bool__(self) -> bool:
        return self.every or self.last > 0 or bool(self.chosen)

    def back(self, rows: int) -> Demand:
        """With so many rows before each; the row before a chunk's first is the last of another."""
        return Demand(self.every, self.last + rows * (self.last > 0), {i: n + rows for i, n in self.chosen.items()})

    def __str__(self) -> str:
        parts = [f"last {self.last}"] * (self.last > 0)
        parts += [f"{index}" + f" and {rows} before" * (rows > 0) for index, rows in self.chosen.items()]
        return "all" if self.every else ", ".join(parts) or "nothing"


NOTHING, EVERY = Demand(), Demand(every=True)


@dataclass(frozen=True)
class Reason:
    """The node that demands more than the rows demanded of itself, and what it does."""

    node: Node
    why: str


@dataclass(frozen=True)
class RowDemand:
    """For each node that computes, or comes in: where its rows lie, None where it has none; which of them are demanded,
    all or nothing of one without; and of those demanded, who widened the demand last."""

    at: Mapping[Node, Layout | None]
    of: Mapping[Node, Demand]
    why: Mapping[Node, Reason]
    forward: Forward  # how results depend on operands


def row_demand(gm: GraphModule, inputs: Ragged, known: Known | None = None) -> RowDemand:
    """The rows that anybody reads of each value of `gm`. known: what was found of bodies that have not changed since,
    in a program of so many rows; what is found here is added."""
    (rows,) = sizes(inputs.positions)
    named = {getattr(inputs, f.name): MEANT[f.name] for f in fields(Ragged) if f.name in MEANT}
    given = [_input(node, rows, named.get(node)) for node in gm.graph.nodes if node.op == "placeholder"]
    forward = Forward(gm, given, rows, {} if known is None else known)
    if inputs.starts is not None and inputs.late_floors is not None and inputs.logit_rows is not None:
        stop_at_floor(forward, inputs.logit_rows)
    returned = EVERY, Reason(gm.graph.output_node(), "is returned")
    backward = Backward(forward, [returned] * len(forward.results))
    at = {node: forward.layout(node) for node in forward.values}
    return RowDemand(at, {node: backward.demand(node) for node in at}, backward.why, forward)


MEANT = {
    "positions": Meaning("position"),
    "stops": Meaning("stop"),
    "first_rows": Meaning("first row"),
    "longest": Meaning("column"),
    "requests": Meaning("request"),
    "columns": Meaning("column of row"),
    "starts": Meaning("start"),
    "late_floors": Meaning("late floor"),
}


def _input(node: Node, rows: Expr, meaning: Meaning | None) -> Value:
    """What is known of an input: a dimension as long as the step has rows is that of rows."""
    dims = [dim for dim, size in enumerate(sizes(node)) if size == rows] if fake(node) is not None else []
    return Value(Layout(Space(ROWS, (rows,)), (dims[0],)) if len(dims) == 1 else None, meaning)


def stop_at_floor(forward: Forward, logit_rows: Node) -> None:
    """A window whose keys below the late floors reach nothing reads what the ring keeps, and the rows of logits."""
    rings = {values: flow.rows for flows in forward.flows.values() for values, flow in flows if flow.how == "last"}
    ended: Ended = {}
    for node, flows in forward.flows.items():
        (source, flow), *others = flows or [(node, Flow("same"))]
        if flow.how != "back" or source not in rings:
            continue
        offsets = {forward.meaning(arg).offsets for arg, _ in others}  # type: ignore[union-attr]
        keys = sizes(node)[:2]  # a mask of channels is none of them, as many as they may be
        masks = [[mask for mask in forward.masks(of, offsets) if sizes(mask) == keys] for of in FLOORS.values()]
        if all(masks) and matter_only_where(forward.gm, node, masks, ended):
            stopped = Flow("kept", rings[source], logit_rows, "reads rows of its window above the late floor")
            forward.flows[node] = [(source, stopped), *others]


# ---- forward: how results depend on operands -------------------------------------------------------------------------

Known = dict[tuple[GraphModule, tuple[Value, ...]], "Forward"]


class Forward:
    """Where the rows lie in each value of a program, and which rows of its operands each node reads."""

    def __init__(self, gm: GraphModule, given: Sequence[Value], rows: Expr, known: Known) -> None:
        self.gm, self.rows, self.known = gm, rows, known
        self.values: dict[Node, Values] = {}
        self.flows: dict[Node, list[tuple[Node, Flow]]] = {}
        self.inside: dict[Node, Forward] = {}  # of subgraph calls
        self.mixing: dict[Node, str] = {}  # nodes whose rule is not known, or that break it, and how
        self.backwards: dict[tuple[Demand, ...], Backward] = {}  # by what is demanded of the results
        look, inputs = Look(rows, self.values), iter(given)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(inputs)
            elif node.op == "call_function":
                self._call(node, look)
        (results,) = gm.graph.output_node().args
        self.results: list[object] = list(results) if isinstance(results, (tuple, list)) else [results]

    def _call(self, node: Node, look: Look) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, at = node.args
            held = self.values.get(source)  # type: ignore[arg-type]
            self.values[node] = held[at] if isinstance(held, tuple) else Value()  # type: ignore[index]
            self.flows[node] = [(source, Flow("same"))]  # type: ignore[list-item]
        elif node.target is invoke_subgraph:
            self._subgraph(node)
        elif isinstance(value, (Tensor, tuple, list)) or effect_of(node) is not None or _reads_data(node):
            rule = rule_of(node)
            made = rule(node, look) if rule is not None else f"mixes rows: v41 knows no rule of {node.target}"
            if isinstance(made, str):
                self.mixing[node] = made
                self.values[node] = tuple(Value() for _ in value) if isinstance(value, (tuple, list)) else Value()
                self.flows[node] = [(arg, Flow("every", why=made)) for arg in node.all_input_nodes]
            else:
                self.values[node], self.flows[node] = made

    def _subgraph(self, node: Node) -> None:
        body = body_of(node)
        given = tuple(self._operand(arg) for arg in node.args[2:])
        if (body, given) not in self.known:
            self.known[body, given] = Forward(body, given, self.rows, self.known)
        inside = self.inside[node] = self.known[body, given]
        foreign = {step for value in given for step in _sorts_of(value)}
        results = (inside.values.get(each) if isinstance(each, Node) else None for each in inside.results)
        self.values[node] = tuple(
            _behind(value, node, foreign) if isinstance(value, Value) else Value() for value in results
        )

    def _operand(self, arg: object) -> Value:
        value = self.values.get(arg) if isinstance(arg, Node) else None
        return value if isinstance(value, Value) else Value()

    def meaning(self, node: Node) -> Meaning | None:
        value = self.values.get(node)
        return value.meaning if isinstance(value, Value) else None

    def masks(self, of: str, offsets: Collection[tuple[int, ...]]) -> list[Node]:
        """Those that say this of keys at one of these offsets."""
        return self._masks.get((of, *offsets), []) if len(offsets) == 1 else []

    @cached_property
    def _masks(self) -> dict[tuple[object, ...], list[Node]]:
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self.values:
            meaning = self.meaning(node)
            if meaning is not None and meaning.of in FLOORS.values():
                found.setdefault((meaning.of, meaning.offsets), []).append(node)
        return found

    @cached_property
    def effects(self) -> frozenset[Node]:
        """Those that do something besides computing. A sum over ranks whose rule is known only computes: each rank
        has the rows that all have."""
        found = effects_of(self.gm.graph.nodes)
        computes = [node for node, what in found.items() if what == "collective" and rule_of(node) is not None]
        return frozenset(node for node, what in found.items() if what is not None and node not in computes)

    @cached_property
    def numbers(self) -> frozenset[Node]:
        """Those that take a number from a tensor. Who reads a number demands no rows, so what it hangs on always is."""
        held = (Tensor, tuple, list)
        return frozenset(n for n in self.mixing if _reads_data(n) and not isinstance(n.meta.get("val"), held))

    def layout(self, node: Node) -> Layout | None:
        value = self.values.get(node)
        values = value if isinstance(value, tuple) else (value,)
        return next((each.layout for each in values if each is not None and each.layout is not None), None)


def _reads_data(node: Node) -> bool:
    """Whether a node that gives a number takes it from the elements of a tensor, not from its shape."""
    return isinstance(node.target, OpOverload) and not node.target._opname.startswith("sym_")


def _sorts_of(value: Value) -> list[tuple[Node, ...]]:
    of_layout = value.layout.space.by if value.layout is not None else ()
    of_meaning = value.meaning.by if value.meaning is not None else ()
    return [by for by in (of_layout, of_meaning) if by]


def _behind(value: Value, call: Node, foreign: Collection[tuple[Node, ...]]) -> Value:
    """A value that leaves the body of `call`: its own sorts are other sorts in another call."""

    def by(known: tuple[Node, ...]) -> tuple[Node, ...]:
        return (call, *known) if known and known not in foreign else known

    layout, meaning = value.layout, value.meaning
    return Value(
        layout and replace(layout, space=replace(layout.space, by=by(layout.space.by))),
        meaning and replace(meaning, by=by(meaning.by)),
    )


# ---- backward: what of them is read ----------------------------------------------------------------------------------


class Backward:
    """The demand on each value of a program, given those on its results. Writes demand by themselves."""

    def __init__(
        self, forward: Forward, wanted: Sequence[tuple[Demand, Reason]], places: Sequence[Reason] = ()
    ) -> None:
        self.forward, self.places = forward, places  # places: reasons of `wanted` that stand for those of each call
        self.demands: dict[Node, Demand] = {}
        self.why: dict[Node, Reason] = {}
        self._wanted: dict[Node, dict[int, tuple[Demand, Reason]]] = {}  # subgraph call -> result -> demand
        for result, (demand, reason) in zip(forward.results, wanted, strict=True):
            if isinstance(result, Node):
                self._ask(result, demand, reason)
        for node in reversed(forward.gm.graph.nodes):
            if node in forward.inside:
                self._subgraph(node)
            elif node in forward.flows:
                self._pass_on(node)

    def demand(self, node: Node) -> Demand:
        return self.demands.get(node, NOTHING)

    def _ask(self, node: Node, demand: Demand, reason: Reason) -> None:
        before = self.demand(node)
        after = before | (demand if self.forward.layout(node) is not None or not demand else EVERY)
        if after != before:
            self.demands[node], self.why[node] = after, reason

    def _pass_on(self, node: Node) -> None:
        always = node in self.forward.effects or node in self.forward.numbers
        demand = EVERY if always else self.demand(node)
        if not demand:
            return
        for operand, flow in self.forward.flows[node]:
            wanted = applied(flow, demand)
            inherited = self.why.get(node) if flow.how != "every" and wanted == demand else None
            reason = inherited or Reason(node, flow.why)
            if operand in self.forward.inside:
                self._ask_result(operand, node.args[1], wanted, reason)  # type: ignore[arg-type]
            else:
                self._ask(operand, wanted, reason)

    def _ask_result(self, call: Node, at: int, demand: Demand, reason: Reason) -> None:
        wanted = self._wanted.setdefault(call, {})
        before, known = wanted.get(at, (NOTHING, reason))
        wanted[at] = (before | demand, reason if before | demand != before else known)

    def _subgraph(self, call: Node) -> None:
        inside, wanted = self.forward.inside[call], self._wanted.get(call, {})
        if not wanted and call not in self.forward.effects:
            return
        known = [wanted.get(at, (NOTHING, Reason(call, ""))) for at in range(len(inside.results))]
        asked = tuple(demand for demand, _ in known)
        if asked not in inside.backwards:  # by its place among the results stands who asked
            places = [Reason(call, str(at)) for at in range(len(known))]
            inside.backwards[asked] = Backward(inside, list(zip(asked, places, strict=True)), places)
        inner = inside.backwards[asked]
        inputs = [node for node in inside.gm.graph.nodes if node.op == "placeholder"]
        outside = dict(zip(inputs, call.args[2:], strict=True))
        for each in inputs:
            operand, demand = outside[each], inner.demand(each)
            if isinstance(operand, Node) and demand:
                at = next((at for at, place in enumerate(inner.places) if place is inner.why[each]), None)
                reason = inner.why[each] if at is None else known[at][1]
                self._ask(operand, self._outside(demand, call, outside), reason)

    def _outside(self, demand: Demand, call: Node, outside: Mapping[Node, object]) -> Demand:
        """What a body demands of an operand, in terms of inputs outside."""
        chosen: dict[Node, int] = {}
        for index, rows in demand.chosen.items():
            operand = outside.get(index) if index in self.forward.inside[call].values else index
            if not isinstance(operand, Node) or operand.op != "placeholder":
                return EVERY
            chosen[operand] = max(rows, chosen.get(operand, 0))
        return Demand(demand.every, demand.last, chosen)


def applied(flow: Flow, demand: Demand) -> Demand:
    """What is read of an operand where `demand` is what is read of the result."""
    match flow.how:
        case "same":
            return demand
        case "back":
            return demand.back(flow.rows)
        case "chosen":
            return Demand(chosen={flow.index: flow.rows})  # type: ignore[dict-item]
        case "last":
            return Demand(last=flow.rows)
        case "kept":
            return Demand(last=flow.rows, chosen={flow.index: 0})  # type: ignore[dict-item]
    return EVERY
