"""Every rule of row demand is needed: without it a program that keeps rows apart seems to mix them, or poison gets out.

For each operator that has a rule there is a program with it whose rows are told apart, and are not once it is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from tests.passes.test_rows import check_poison, promised
from tests.strategies.rows import WINDOW, Program, Step, build, fakes, step
from v41._compat import fake_mode_of
from v41.passes.analysis import rows
from v41.passes.analysis.row_flows import Flow
from v41.passes.analysis.row_rules import RULES
from v41.passes.analysis.rows import EVERY, NOTHING, Demand, RowDemand, row_demand
from v41.regions import outline

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional


class Writer:
    """Writes a graph node by node on the inputs of a step."""

    def __init__(self) -> None:
        self.graph, self.inputs = Graph(), dict[str, Node]()
        self.mode = fake_mode_of(list(fakes()))
        for name, value in zip(Step._fields, fakes(), strict=True):
            self.inputs[name] = self.graph.placeholder(name)
            self.inputs[name].meta["val"] = value

    def __call__(self, op: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """like: has the shape of the result, which torch cannot tell where a size is a symbol."""
        node = self.graph.call_function(op, args, kwargs)
        if like is not None:
            node.meta["val"] = like.meta["val"]
            return node
        given = torch.fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = op(*given[0], **given[1])
        return node

    def finish(self, result: Node) -> GraphModule:
        while isinstance(result.meta["val"], (tuple, list)):
            result = self(operator.getitem, result, 0)
        self.graph.output((result,))
        return GraphModule({}, self.graph)


Write = Callable[[Writer, Node], Node]


def of_x(op: Any, *args: Any, **kwargs: Any) -> Write:
    return lambda write, x: write(op, x, *args, **kwargs)


def of_wide(op: Any, *args: Any) -> Write:
    """Of x as [T, 1, 8]."""
    return lambda write, x: write(op, write(aten.unsqueeze.default, x, 1), *args)


def twice(op: Any, *args: Any) -> Write:
    return lambda write, x: write(op, write(op, x, *args), *args)


def dot(write: Writer, x: Node) -> tuple[Node, Node, Node]:
    """x as [T, 1, 8] and [T, 8, 1], and their product."""
    left, right = write(aten.unsqueeze.default, x, 1), write(aten.unsqueeze.default, x, 2)
    return left, right, write(aten.bmm.default, left, right)


def added_dot(write: Writer, x: Node) -> Node:
    left, right, product = dot(write, x)
    return write(aten.baddbmm.default, corner(write), left, right, like=product)


def corner(write: Writer) -> Node:
    return write(aten.slice.Tensor, write(aten.slice.Tensor, write.inputs["weight"], 0, 0, 1), 1, 0, 1)


ALONG_CHANNELS = (
    aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.sort.default,
    aten.any.dim, aten.all.dim, aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
    aten.unbind.int,
)  # fmt: skip
ALL_OF_CHANNELS = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dims, aten.all.dims,
    aten.logsumexp.default, aten.flip.default, prims.rev.default,
)  # fmt: skip
PROGRAMS: dict[Any, Write | Program] = {
    **{op: of_x(op, 1) for op in ALONG_CHANNELS},
    **{op: of_x(op, [1]) for op in ALL_OF_CHANNELS},
    **{op: of_x(op, [-1, 4, 2]) for op in (aten.view.default, aten._unsafe_view.default)},
    aten.unsqueeze.default: of_x(aten.unsqueeze.default, 1),
    aten.squeeze.default: of_wide(aten.squeeze.default),
    aten.squeeze.dim: of_wide(aten.squeeze.dim, 1),
    aten.squeeze.dims: of_wide(aten.squeeze.dims, [1]),
    aten.permute.default: twice(aten.permute.default, [1, 0]),
    aten.transpose.int: twice(aten.transpose.int, 0, 1),
    aten.t.default: twice(aten.t.default),
    aten.expand.default: of_wide(aten.expand.default, [-1, 3, -1]),
    aten.repeat.default: of_x(aten.repeat.default, [1, 2]),
    aten.view.dtype: of_x(aten.view.dtype, torch.int32),
    aten.alias.default: of_x(aten.alias.default),
    aten.detach.default: of_x(aten.detach.default),
    aten._to_copy.default: of_x(aten._to_copy.default, dtype=torch.float64),
    aten.constant_pad_nd.default: lambda write, x: write(aten.constant_pad_nd.default, x, [1, -1], like=x),
    aten.slice.Tensor: of_x(aten.slice.Tensor, 1, 0, 4),
    aten.select.int: of_x(aten.select.int, 1, 0),
    aten.split.Tensor: of_x(aten.split.Tensor, 4, 1),
    aten.split_with_sizes.default: of_x(aten.split_with_sizes.default, [4, 4], 1),
    aten.cat.default: lambda write, x: write(aten.cat.default, [x, x], 1),
    aten._softmax.default: of_x(aten._softmax.default, 1, False),
    aten._log_softmax.default: of_x(aten._log_softmax.default, 1, False),
    aten.topk.default: of_x(aten.topk.default, 2),
    aten.sort.stable: of_x(aten.sort.stable, stable=True, dim=1),
    aten.linalg_vector_norm.default: of_x(aten.linalg_vector_norm.default, 2, [1]),
    aten.mm.default: lambda write, x: write(aten.mm.default, x, write.inputs["weight"]),
    aten.bmm.default: lambda write, x: dot(write, x)[-1],
    aten.addmm.default: lambda write, x: write(aten.addmm.default, corner(write), x, write.inputs["weight"]),
    aten.baddbmm.default: added_dot,
    aten.embedding.default: lambda write, x: write(
        aten.mul.Tensor, x, write(aten.embedding.default, write.inputs["weight"], write.inputs["columns"])
    ),
    aten.index_select.default: lambda write, x: write(
        aten.mul.Tensor, x, write(aten.index_select.default, write.inputs["weight"], 0, write.inputs["columns"])
    ),
    c10d.all_reduce.default: of_x(c10d.all_reduce.default, "sum", "0"),
    c10d.wait_tensor.default: of_x(c10d.wait_tensor.default),
    c10d.all_gather_into_tensor.default: lambda write, x: write(
        aten.view.default, write(c10d.all_gather_into_tensor.default, x, 2, "0"), [2, -1, 8]
    ),
    aten.index.Tensor: ["own row"],
    aten.gather.default: ["best channels"],
    aten.searchsorted.Tensor: ["grouped experts"],
    aten._grouped_mm.default: ["grouped experts"],
    aten.index_put.default: ["ring"],
    aten.index_put_.default: lambda write, x: write(
        aten.index_put_.default, write.inputs["tail"], [write.inputs["slots"]], x
    ),
    aten.copy_.default: ["ring"],
    prims.iota.default: ["own row"],
    aten.full.default: lambda write, x: write(aten.mul.Tensor, x, write(aten.full.default, [8], 2.0)),
    aten.scalar_tensor.default: ["best channels"],
}


def written(program: Write | Program) -> tuple[GraphModule, dict[str, Node]]:
    if isinstance(program, list):
        return build(program)
    write = Writer()
    return write.finish(program(write, write.inputs["x"])), write.inputs


def unknown_to(program: Write | Program) -> list[object]:
    """The operators that seem to mix rows."""
    gm, inputs = written(program)
    return [node.target for node in row_demand(gm, promised(inputs)).forward.mixing]


def test_every_rule_has_a_program() -> None:
    assert PROGRAMS.keys() == RULES.keys()


@pytest.mark.parametrize("op", PROGRAMS, ids=str)
def test_without_its_rule_an_operator_mixes_rows(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_to(PROGRAMS[op]) == []
    monkeypatch.delitem(RULES, op)
    assert op in unknown_to(PROGRAMS[op])


# ---- what a flow demands ---------------------------------------------------------------------------------------------

APPLIED = rows.applied
FLOWS: dict[str, Program] = {  # how -> a program that needs it; not "kept", which asks what a ring's write asks anyway
    "same": ["norm"],
    "back": ["window"],
    "chosen": ["gelu"],
    "last": ["ring"],
    "every": ["sum of rows"],
}


def poison_gets_out(program: Program) -> bool:
    gm, inputs = build(program)
    demand = row_demand(gm, promised(inputs))
    try:
        check_poison(gm, demand, inputs, step([(0, 12), (4, 9), (1, 1)]))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("how", FLOWS)
def test_a_flow_that_demands_nothing_lets_poison_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not poison_gets_out(FLOWS[how])

    def applied(flow: Flow, demand: Demand) -> Demand:
        return NOTHING if flow.how == how else APPLIED(flow, demand)

    monkeypatch.setattr(rows, "applied", applied)
    assert poison_gets_out(FLOWS[how])


def test_every_flow_is_tried() -> None:
    index = build(["gelu"])[1]["logit_rows"]
    demands = {how: APPLIED(Flow(how, 2, index), Demand(last=1)) for how in (*FLOWS, "kept")}
    assert demands == {
        "same": Demand(last=1),
        "back": Demand(last=3),
        "chosen": Demand(chosen={index: 2}),
        "last": Demand(last=2),
        "kept": Demand(last=2, chosen={index: 0}),
        "every": EVERY,
    }


# ---- where a window stops --------------------------------------------------------------------------------------------

STOPS: dict[str, tuple[str, tuple[object, str, Any]]] = {  # what is not asked -> a program, and how it is not
    "keys below the floors reach nothing": (
        "window seen below the floor", (rows, "matter_only_where", lambda *_: True),
    ),
    "floors are of the keys that are read": (
        "another window above a floor", (rows.Forward, "masks", lambda self, of, offsets: self.values.keys()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", STOPS)
def test_a_window_stops_only_at_a_floor_of_its_own(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plant = STOPS[what]
    gm, inputs = build([program])
    assert row_demand(gm, promised(inputs, bounded=True)).of[inputs["x"]].chosen == {inputs["logit_rows"]: WINDOW - 1}
    monkeypatch.setattr(*plant)
    if what.startswith("floors"):
        monkeypatch.setattr(rows, "matter_only_where", lambda *_: True)
    assert row_demand(gm, promised(inputs, bounded=True)).of[inputs["x"]].chosen == {inputs["logit_rows"]: 0}


# ---- guards of rules


def demanded_of(make: Write) -> tuple[Demand, RowDemand]:
    """What is demanded of x where the rows of logits of this are returned, and the rest."""
    write = Writer()
    x = write.inputs["x"]
    gm = write.finish(write(aten.index.Tensor, make(write, x), [write.inputs["logit_rows"]]))
    whole = row_demand(gm, promised(write.inputs))
    return whole.of[x], whole


def first_row(write: Writer, of: Node) -> Node:
    return write(aten.select.int, of, 0, 0)


WITHOUT_ROWS: dict[str, Write] = {
    "a gather": lambda write, x: write(
        aten.add.Tensor,
        x,
        first_row(
            write,
            write(
                aten.gather.default,
                write.inputs["weight"],
                1,
                write(operator.getitem, write(aten.sort.default, write.inputs["weight"], 1), 1),
            ),
        ),
    ),
    "a split": lambda write, x: write(
        aten.add.Tensor,
        x,
        first_row(write, write(operator.getitem, write(aten.split.Tensor, write.inputs["weight"], 4, 0), 1)),
    ),
}


@pytest.mark.parametrize("what", WITHOUT_ROWS)
def test_what_is_done_to_weights_alone_mixes_no_rows(what: str) -> None:
    demand, whole = demanded_of(WITHOUT_ROWS[what])
    (index,) = demand.chosen
    assert demand == Demand(chosen={index: 0}) and index.name == "logit_rows" and not whole.forward.mixing


def test_elements_of_a_table_that_are_taken_at_the_places_of_rows_are_not_of_fewer_rows() -> None:
    """gather(table, 1, picks) reads row r of a larger table for row r; gather(table, 0, picks) any row."""

    def make(write: Writer, x: Node, dim: int) -> Node:
        table = write(aten.view.default, write.inputs["cache"], [-1, 8])
        picks = write(operator.getitem, write(aten.sort.default, x, 1), 1)
        return write(aten.gather.default, table, dim, picks, like=x)

    for dim, mixes in ((1, True), (-1, True), (0, False)):
        demand, whole = demanded_of(lambda write, x, dim=dim: make(write, x, dim))  # type: ignore[misc]
        assert (demand == EVERY) == mixes == bool(whole.forward.mixing)


def test_a_draw_of_every_element_is_no_row_by_itself() -> None:
    """Fewer rows would draw other numbers."""
    demand, whole = demanded_of(lambda write, x: write(aten.bernoulli.p, x, 0.5))
    assert demand == EVERY and len(whole.forward.mixing) == 1


@pytest.mark.parametrize(("behind", "rows"), [(0, 0), (-2, 2), (1, None)])
def test_rows_behind_those_that_are_told_are_not_known(behind: int, rows: int | None) -> None:
    """x[arange(T)[logit_rows] + behind]: numbers of rows, of those that are told."""
    write = Writer()
    x, index = write.inputs["x"], write.inputs["logit_rows"]
    count = write(aten.sym_size.int, x, 0)
    how = {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
    told = write(aten.index.Tensor, write(prims.iota.default, count, **how), [index])
    if behind:
        told = write(aten.clamp_min.default, write(aten.add.Tensor, told, behind), 0)
    demand = row_demand(write.finish(write(aten.index.Tensor, x, [told])), promised(write.inputs)).of[x]
    assert demand == (EVERY if rows is None else Demand(chosen={index: rows}))


def test_of_what_has_no_rows_all_is_demanded_or_nothing() -> None:
    gm, inputs = build(["product"])
    whole = row_demand(gm, promised(inputs))
    assert not whole.of[inputs["x"]].every
    assert (whole.of[inputs["weight"]], whole.of[inputs["experts"]]) == (EVERY, NOTHING)


def test_what_is_inside_a_region_is_known_behind_it() -> None:
    """Rows of its results are rows of the program: what reads some of them demands some."""
    gm, inputs = build(["gelu", "norm"])
    plain = row_demand(gm, promised(inputs)).of[inputs["x"]]
    gelu = next(node for node in gm.graph.nodes if node.op == "call_function")
    call = outline(gm, [gelu], kind="part")
    whole = row_demand(gm, promised(inputs))
    assert not plain.every and whole.of[inputs["x"]] == plain and not whole.of[call].every


def test_a_number_that_is_taken_from_rows_demands_them_all() -> None:
    """x[0, 0] as a number of Python's: no rule follows it, so all that it may hang on is kept."""

    def make(write: Writer, x: Node) -> Node:
        number = write.graph.call_function(aten._local_scalar_dense.default, (first_row(write, first_row(write, x)),))
        number.meta["val"] = 1.0
        return write(aten.mul.Tensor, x, number, like=x)

    demand, whole = demanded_of(make)
    assert demand == EVERY
    assert [node.target for node in whole.forward.mixing] == [aten.select.int, aten._local_scalar_dense.default]


def test_a_constant_of_the_program_mixes_nothing() -> None:
    write = Writer()
    x = write.inputs["x"]
    held = write.graph.get_attr("held")
    held.meta["val"] = write.inputs["weight"].meta["val"]
    taken = write(aten.index.Tensor, write(aten.mm.default, x, held), [write.inputs["logit_rows"]])
    write.graph.output((taken,))
    gm = GraphModule({"held": torch.ones(8, 8)}, write.graph)
    whole = row_demand(gm, promised(write.inputs))
    assert not whole.of[x].every and not whole.forward.mixing


def test_a_demand_says_which_rows_it_is() -> None:
    index = Graph().placeholder("logit_rows")
    said = {str(demand) for demand in (NOTHING, EVERY, Demand(last=1), Demand(chosen={index: 0}))}
    assert said == {"nothing", "all", "last 1", "logit_rows"}
    assert str(Demand(last=2, chosen={index: 1})) == "last 2, logit_rows and 1 before"
