"""row_demand: rows that nobody reads may hold anything; they are filled with NaN here, in every value of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from tests.strategies.rows import (
    CACHES,
    FLOORED,
    LOCAL,
    MIXES,
    READS_BEFORE,
    WINDOW,
    WRITES,
    Program,
    build,
    programs,
    step,
)
from tests.strategies.rows import Step as Inputs
from v41._compat import input_name
from v41._compat_trace import functional_aten
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.analysis import layouts, row_flows, rows
from v41.passes.analysis.layouts import ROWS, Layout
from v41.passes.analysis.meanings import Meaning
from v41.passes.analysis.rows import EVERY, NOTHING, Demand, Ragged, RowDemand, ragged, row_demand
from v41.passes.canonicalize import canonicalize
from v41.passes.same_values import same_bits
from v41.regions import outline

SOME_CHUNKS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), min_size=2, max_size=4)


def promised(inputs: dict[str, Node], bounded: bool = False) -> Ragged:
    names = [f.name for f in fields(Ragged) if bounded or f.name != "late_floors"]  # as if nothing read them
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
    """NaN in these rows; in bytes 127, which is NaN as fp8."""
    shape = [1] * value.ndim
    shape[dim] = len(nobodys)
    if value.dtype.itemsize == 1:
        return torch.where(nobodys.view(shape), 127, value.view(torch.uint8)).to(torch.uint8).view(value.dtype)
    return torch.where(nobodys.view(shape), torch.nan, value).to(value.dtype)


def check_poison(gm: GraphModule, demand: RowDemand, inputs: dict[str, Node], given: Inputs) -> int:
    """Asserts that no output and no cache differs, nobody's slot apart. How many rows were filled."""
    results = []
    poisoned = Poisoned(gm, demand, inputs)
    for run in (gm, poisoned.run):
        args = Inputs(*(each.clone() for each in given))
        outputs = run(*args)
        results.append([*outputs, *(cache[:-1] for cache in args[CACHES:])])
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
    ones = {"row before": 1, "row before, of those there are": 1}
    before = sum((ones | {"window": WINDOW - 1, "two rows before": 2}).get(name, 0) for name in program)
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


@pytest.mark.parametrize("program", [["gelu"], ["norm", "window"], ["product", "row before", "ring"]])
def test_rows_that_a_body_takes_by_index_are_those_of_the_index_outside(program: Program) -> None:
    """Two results of one body: what each demands is told of the caller's inputs, not of the body's."""
    gm, inputs = build(program)
    plain = row_demand(gm, promised(inputs)).of[inputs["x"]]
    taken = [node for node in inputs["logit_rows"].users if node.target is torch.ops.aten.index.Tensor]
    outline(gm, [taken[-1]], kind="part")
    assert not plain.every and row_demand(gm, promised(inputs)).of[inputs["x"]] == plain


def test_channels_that_are_taken_by_index_leave_rows_apart() -> None:
    gm, inputs = build(["gelu"])
    gelu = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_after(gelu):
        taken = gm.graph.call_function(torch.ops.aten.index.Tensor, (gelu, [None, inputs["kept_rows"]]))
    with gelu.meta["val"].fake_mode:
        taken.meta["val"] = torch.ops.aten.index.Tensor(gelu.meta["val"], [None, inputs["kept_rows"].meta["val"]])
    results = gm.graph.output_node()
    with gm.graph.inserting_before(results):
        rows = gm.graph.call_function(torch.ops.aten.index.Tensor, (taken, [inputs["logit_rows"]]))
    with gelu.meta["val"].fake_mode:
        rows.meta["val"] = torch.ops.aten.index.Tensor(taken.meta["val"], [inputs["logit_rows"].meta["val"]])
    results.args = ((rows,),)
    whole = row_demand(gm, promised(inputs))
    assert whole.of[inputs["x"]].chosen == {inputs["logit_rows"]: 0} and taken not in whole.forward.mixing


def test_an_operator_of_higher_order_that_nobody_knows_mixes_rows() -> None:
    gm, inputs = build(["gelu", "norm"])
    gelu = next(node for node in gm.graph.nodes if node.op == "call_function")
    unknown = torch.ops.higher_order.cond
    with gm.graph.inserting_after(gelu):
        call = gm.graph.call_function(unknown, (True, None, None, [gelu]))
    call.meta["val"] = gelu.meta["val"]
    gelu.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    whole = row_demand(gm, promised(inputs))
    assert whole.of[inputs["x"]] == EVERY and str(unknown) in str(whole.forward.mixing[call])


def test_about_half_of_the_programs_leave_rows() -> None:
    """So that neither test above is empty: what share of two steps demands less than all rows of x."""
    pairs = [*product(sorted(LOCAL | READS_BEFORE | WRITES | MIXES), repeat=2)][::41]
    assert 0.3 <= sum(not found([*pair])[0].every for pair in pairs) / len(pairs) <= 0.9


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
    "a write demands nothing": (["cache"], (rows, "effects_of", dict.fromkeys)),
    "a place is a number of its row": (["places"], (Layout, "at", lambda at, *dims: Layout(at.space, dims or (0,)))),
    "numbers below 0 are rows before": (["wrapped around"], (row_flows.Look, "meaning", never_negative)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plant = BUGS[bug]
    assert not noticed(program)
    monkeypatch.setattr(*plant)
    assert noticed(program)


# ---- the plain model -------------------------------------------------------------------------------------------------


class Traced:
    """The preset "tiny" as a canonical program; what a step does in it, plain or poisoned."""

    def __init__(self, replay: str) -> None:
        self.config = V41Config.preset("tiny").replace(swa_bounded_replay=replay)
        self.model = V41ForCausalLM.random(self.config).eval()
        self.compiled = torch.compile(self.model, backend=self.backend, fullgraph=True)
        self.names: list[str] = []
        self.args: list[Any] = []

    def backend(self, gm: GraphModule, inputs: Any) -> Any:
        self.names = [input_name(node) for node in gm.graph.nodes if node.op == "placeholder"]
        return functional_aten(gm, inputs, self.keep, self.keep)

    def keep(self, gm: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.gm = gm

        def run(args: list[Any]) -> Any:
            self.args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @torch.no_grad()
    def step(self) -> None:
        """Long chunks, a short one, and one that goes on, all in one step."""
        config, cache = self.config, Cache.zeros(self.config, 4, 96)
        ids = torch.randint(0, config.vocab_size, (4, 96), generator=torch.Generator().manual_seed(0)).tolist()
        self.model(build_batch(config, cache, [Chunk(ids[0], 0, 0, 21), Chunk(ids[1], 0, 1, 7)]), cache)
        chunks = [Chunk(ids[0], 21, 0, 90), Chunk(ids[1], 7, 1, 8), Chunk(ids[2], 0, 2, 50), Chunk(ids[3], 0, 3, 9)]
        self.compiled(build_batch(config, cache, chunks), cache)

    def demand(self) -> tuple[RowDemand, dict[str, Node]]:
        given = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        inputs = {name.removeprefix("batch."): node for name, node in zip(self.names, given, strict=True)}
        called = {node.name: name for name, node in zip(self.names, given, strict=True)}
        promise = ragged(self.gm, called)
        assert promise is not None
        return row_demand(self.gm, promise), inputs

    def check(self) -> None:
        """Poison reaches neither the logits nor a cache, nobody's slot apart."""
        demand, inputs = self.demand()
        poisoned, results = Poisoned(self.gm, demand, inputs), []
        for run in (self.gm, poisoned.run):
            args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in self.args]
            with torch.no_grad():
                (logits,) = run(*args)
            caches = [arg[:-1] for name, arg in zip(self.names, args, strict=True) if name.startswith("cache.")]
            results.append([logits, *caches])
        assert all(map(same_bits, *results)) and poisoned.filled > 1000

    def borders(self) -> list[str]:
        """What is demanded of what each layer writes into its ring: of what enters its attention, for that alone."""
        demand, inputs = self.demand()
        rings = {node: name for name, node in inputs.items() if name.startswith("cache.rings")}
        writes = [node for node in self.gm.graph.nodes if "index_put" in str(node.target) and node.args[0] in rings]
        values = {rings[node.args[0]]: demand.of[node.args[2]] for node in writes}
        rows_of_logits = inputs["logit_rows"].name
        return [str(values[f"cache.rings[{i}]"]).replace(rows_of_logits, "logits") for i in range(len(values))]


@cache
def traced(replay: str) -> Traced:
    model = Traced(replay)
    model.step()
    canonicalize(model.gm)
    model.gm.recompile()
    return model


@pytest.mark.slow
def test_rows_of_the_plain_model() -> None:
    """All up to the last KV source, whose entries need them; behind it one window less a layer, or one in all."""
    config = traced("off").config
    source, layers, W = config.last_kv_source, config.num_hidden_layers, config.sliding_window
    exact = [f"last {W + n * (W - 1)}, logits and {(n + 1) * (W - 1)} before" for n in range(layers - source)]
    kept = [f"last {W}, logits"] * (layers - source - 1) + [f"last {2 * W - 1}, logits and {W - 1} before"]
    assert traced("off").borders() == ["all"] * source + exact[::-1]
    assert traced("after_source").borders() == ["all"] * source + kept[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["off", "after_source"])
def test_poison_does_not_reach_what_the_plain_model_keeps(replay: str) -> None:
    traced(replay).check()
