"""row_demand: rows that nobody reads may hold anything; they are filled with NaN here, in every value of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from tests.strategies.rows import FLOORED, LOCAL, MIXES, READS_BEFORE, WINDOW, WRITES, Program, build, programs, step
from tests.strategies.rows import Step as Inputs
from v41.passes.analysis import layouts, row_flows, rows
from v41.passes.analysis.layouts import ROWS, Layout
from v41.passes.analysis.meanings import Meaning
from v41.passes.analysis.rows import EVERY, NOTHING, Demand, Ragged, RowDemand, row_demand

SOME_CHUNKS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), min_size=2, max_size=4)


def promised(inputs: dict[str, Node], bounded: bool = False) -> Ragged:
    names = [f.name for f in fields(Ragged) if bounded or f.name != "late_floors"]
    return Ragged(**{name: inputs[name] for name in names})


def found(program: Program, returned: bool = False) -> tuple[Demand, RowDemand, dict[str, Node]]:
    """What is demanded of x, and the rest."""
    gm, inputs = build(program, returned)
    demand = row_demand(gm, promised(inputs))
    return demand.of[inputs["x"]], demand, inputs


# ---- poison ----------------------------------------------------------------------------------------------------------


def demanded_rows(demand: Demand, positions: Tensor, stops: Tensor, index: Callable[[Node], Tensor]) -> Tensor:
    """[T] bool"""
    row, taken = torch.arange(len(positions)), positions >= stops - demand.last
    for node, before in demand.chosen.items():
        behind = index(node).flatten().unsqueeze(-1) - row  # how far each row is in front of a chosen one
        taken = taken | ((behind >= 0) & (behind <= before)).any(0)
    return taken | demand.every


class Poisoned(Interpreter):
    """Runs a program and fills, in every value with rows, those that nobody demands."""

    def __init__(self, gm: GraphModule, demand: RowDemand, inputs: dict[str, Node]) -> None:
        super().__init__(gm)
        self.demand, self.inputs, self.filled = demand, inputs, 0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            return value
        layout = self.demand.at.get(n)
        if not isinstance(value, Tensor) or layout is None or layout.space.kind != ROWS or layout.dims == ():
            return value
        if not (value.is_floating_point() or value.dtype is torch.uint8):  # others are numbers of rows and the like
            return value
        taken = demanded_rows(self.demand.of[n], self.given["positions"], self.given["stops"], self.index)
        (dim,) = layout.dims
        nobodys = ~taken.repeat_interleave(value.shape[dim] // len(taken))
        self.filled += int(nobodys.sum())
        return poison(value, dim, nobodys)

    def index(self, node: Node) -> Tensor:
        (name,) = (name for name, each in self.inputs.items() if each is node)
        return self.given[name]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.given = dict(zip(self.inputs, args, strict=True))
        return super().run(*args, enable_io_processing=False)


def poison(value: Tensor, dim: int, nobodys: Tensor) -> Tensor:
    shape = [1] * value.ndim
    shape[dim] = len(nobodys)
    other = torch.full_like(value, 127) if value.dtype is torch.uint8 else torch.full_like(value.float(), torch.nan)
    return torch.where(nobodys.view(shape), other.to(value.dtype), value)


def check_poison(gm: GraphModule, demand: RowDemand, inputs: dict[str, Node], given: Inputs) -> int:
    """Asserts that no output and no cache differs, nobody's slot apart. How many rows were filled."""
    results = []
    poisoned = Poisoned(gm, demand, inputs)
    for run in (gm, poisoned.run):
        args = Inputs(*(each.clone() for each in given))
        outputs = run(*args)
        results.append([*outputs, *(cache[:-1] for cache in args[13:])])
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other), "poison reached somebody"
    return poisoned.filled


@given(programs(LOCAL, READS_BEFORE, WRITES, MIXES), SOME_CHUNKS, st.integers(0, 9), st.booleans())
def test_rows_that_nobody_demands_may_hold_anything(program: Program, chunks: list, seed: int, last: bool) -> None:
    gm, inputs = build(program)
    demand = row_demand(gm, promised(inputs))
    check_poison(gm, demand, inputs, step(chunks, seed, last))


@given(programs(LOCAL, READS_BEFORE, {name: WRITES[name] for name in WRITES if name != "cache"}), st.integers(0, 9))
def test_what_keeps_rows_apart_leaves_rows_that_nobody_demands(program: Program, seed: int) -> None:
    gm, inputs = build(program)
    demand = row_demand(gm, promised(inputs))
    assert not demand.of[inputs["x"]].every
    before = sum({"window": WINDOW - 1, "row before": 1, "two rows before": 2}.get(name, 0) for name in program)
    assert demand.of[inputs["x"]].chosen == {inputs["logit_rows"]: before}
    assert check_poison(gm, demand, inputs, step([(0, 40), (3, 30)], seed)) > 0


@given(programs(LOCAL, {"window above a floor": FLOORED["window above a floor"]}, WRITES), st.integers(0, 9))
def test_a_window_stops_at_a_floor_where_that_is_promised(program: Program, seed: int) -> None:
    program = [*program, "window above a floor", "gelu", "window above a floor"]
    gm, inputs = build(program)
    exact, stopped = (row_demand(gm, promised(inputs, bounded)).of[inputs["x"]] for bounded in (False, True))
    floored = Demand(last=WINDOW, chosen={inputs["logit_rows"]: 0})
    assert stopped == (EVERY if "cache" in program else floored) and floored.back(WINDOW - 1) <= exact
    check_poison(gm, row_demand(gm, promised(inputs, bounded=True)), inputs, step([(0, 12), (4, 9), (1, 1)], seed))


@pytest.mark.parametrize("name", [name for name in FLOORED if name != "window above a floor"])
def test_a_window_that_may_be_seen_below_the_floor_is_exact(name: str) -> None:
    gm, inputs = build([name])
    exact, same = (row_demand(gm, promised(inputs, bounded)).of[inputs["x"]] for bounded in (False, True))
    assert exact == same and exact.chosen == {inputs["logit_rows"]: WINDOW - 1}


@pytest.mark.parametrize("name", MIXES)
def test_mixed_rows_are_all_demanded_and_the_reason_is_named(name: str) -> None:
    demand, whole, inputs = found(["gelu", name, "norm"])
    assert demand == EVERY
    reason = whole.why[inputs["x"]]
    assert reason.why and reason.node.op == "call_function"


def test_about_half_of_the_programs_leave_rows() -> None:
    """So that neither test above is empty: what share of drawn programs demands less than all rows of x."""
    names = sorted(LOCAL | READS_BEFORE | WRITES | MIXES)
    generator = torch.Generator().manual_seed(0)
    drawn = [[names[int(torch.randint(len(names), (), generator=generator))] for _ in range(2)] for _ in range(24)]
    assert 0.3 <= sum(not found(program)[0].every for program in drawn) / 24 <= 0.9


# ---- the lattice -----------------------------------------------------------------------------------------------------

NODES = [torch.fx.Graph().placeholder(name) for name in "ab"]
DEMANDS = st.one_of(
    st.just(EVERY),
    st.builds(Demand, st.just(False), st.integers(0, 3), st.dictionaries(st.sampled_from(NODES), st.integers(0, 3))),
)


@given(DEMANDS, DEMANDS, DEMANDS, st.integers(0, 3))
def test_demands_are_a_lattice_and_widening_is_monotone(a: Demand, b: Demand, c: Demand, rows: int) -> None:
    assert a | b == b | a and (a | b) | c == a | (b | c) and a | a == a
    assert NOTHING <= a <= a | b <= EVERY
    assert (a | b).back(rows) == a.back(rows) | b.back(rows)
    assert a <= a.back(rows) and bool(a.back(rows)) == bool(a)


@given(programs(LOCAL, READS_BEFORE, WRITES))
def test_more_demanded_of_the_results_is_no_less_demanded_of_x(program: Program) -> None:
    assert found(program)[0] <= found(program, returned=True)[0] == EVERY


# ---- seeded bugs -----------------------------------------------------------------------------------------------------


def noticed(program: Program) -> bool:
    gm, inputs = build(program)
    demand = row_demand(gm, promised(inputs))
    given = step([(0, 12), (4, 9), (1, 1)])
    try:
        for chosen in given.logit_rows, torch.tensor([0]):  # the last row of each request; the first of all
            check_poison(gm, demand, inputs, given._replace(logit_rows=chosen))
    except AssertionError:
        return True
    return False


APPLIED, MEANING = rows.applied, row_flows.Look.meaning


def one_row_kept(flow: row_flows.Flow, demand: Demand) -> Demand:
    return Demand(last=1) if flow.how == "last" else APPLIED(flow, demand)


def never_negative(look: row_flows.Look, arg: object) -> Meaning | None:
    meaning = MEANING(look, arg)
    return meaning and replace(meaning, natural=True)


Plant = tuple[object, str, object]
BUGS: dict[str, tuple[Program, Plant]] = {
    "a window is as wide as its row": (["window"], (Demand, "back", lambda self, rows: self)),
    "a ring keeps one row": (["ring"], (rows, "applied", one_row_kept)),
    "sums along rows are row by row": (["rows so far"], (layouts, "apart", lambda layout, *_: layout)),
    "a write demands nothing": (["cache"], (rows, "effect_of", lambda node: None)),
    "a place is a number of its row": (["places"], (Layout, "at", lambda at, *dims: Layout(at.space, dims or (0,)))),
    "numbers below 0 are rows before": (["wrapped around"], (row_flows.Look, "meaning", never_negative)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plant = BUGS[bug]
    assert not noticed(program)
    monkeypatch.setattr(*plant)
    assert noticed(program)
