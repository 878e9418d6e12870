"""prefetch_engram: the host looks up before the layers; whatever the ids, no bit changes, on one stream or several."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import check_fired_share
from tests.side_streams import SideStreams
from tests.strategies.engrams import TABLE, VOCABULARY, Lookup
from tests.strategies.side_work import check_sides
from tests.strategies.tracing import trace
from v41.passes import prefetch_engram as module
from v41.passes import side_work
from v41.passes.assign_streams import STREAMS, assign_streams
from v41.passes.canonicalize import canonicalize
from v41.passes.check_plan import check_plan
from v41.passes.outline_engram import outline_engram
from v41.passes.partition import partition
from v41.passes.plan_passes import run_plan_pass
from v41.passes.prefetch_engram import RULES, prefetch_engram
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.passes.same_values import random_inputs, same_bits
from v41.plan import Plan, spec
from v41.regions import body_of, flatten, outline, regions
from v41.report import Decision
from v41.runtime.executor import Run, eager_artifact, executor

LOOKUP = Lookup()
ROWS, ORDERS, LAYERS = 5, len(LOOKUP.multipliers), 3
IDS = [LOOKUP.tensors()[0], torch.full((ROWS, ORDERS), -1)]  # of a text, and of images and pads alone
ids_of_a_step = (
    st.lists(  # tokens of several requests: a chunk's first ones have less before them, an image's have none
        st.tuples(st.integers(-1, VOCABULARY - 1), st.integers(0, ORDERS)), min_size=ROWS, max_size=ROWS
    )
)


@cache
def planned(flaw: str = "") -> Plan:
    """Three layers, then what is looked up is added; the look-up is a piece that the host runs."""

    def run(x: Tensor, ids: Tensor, *weights: Tensor) -> Any:
        *lookup, cache = weights
        for _ in range(LAYERS):
            x = x.tanh()
        if flaw == "ids hang on a layer":
            ids = torch.where(x[:, :1] > 9, ids - 1, ids)
        if flaw == "tables are written":
            cache[:5].copy_(x.sum(0))
            lookup[4][torch.arange(TABLE) + (x.sum() > 1e9).long()] = 120
        (kv,) = LOOKUP.run(ids, *lookup)
        return x + kv.float()

    x = torch.randn(ROWS, 8)
    gm = trace(run, x, LOOKUP.tensors()[0], static=[*LOOKUP.tensors()[1:], torch.zeros(6, 8)])
    canonicalize(gm)
    (decision,) = outline_engram(gm)
    assert decision.applied
    reinplace_cache_writes(gm)
    alone = [node for node in gm.graph.nodes if node.target is torch.ops.aten.tanh.default]
    for node in [*alone, *regions(gm, "engram_lookup")]:
        outline(gm, [node], kind="seam")
    plan = partition(gm, cut_at=["seam"], along="rows")
    host = [replace(p, uncapturable="a table on cpu") if looks_up(p) else p for p in plan.pieces]
    return replace(plan, pieces=tuple(host))


def looks_up(piece: Any) -> bool:
    inner = (body_of(call) for call in regions(piece.body))
    return any(True for body in inner for _ in regions(body, "engram_lookup"))


def place(plan: Plan) -> int:
    (at,) = (at for at, piece in enumerate(plan.pieces) if looks_up(piece))
    return at


def runs(*plans: Plan) -> dict[str, Any]:
    return {piece.key: eager_artifact(piece.body) for plan in plans for piece in plan.pieces}


def inputs(plan: Plan, ids: Tensor) -> list[Any]:
    """By what each input is: a flaw changes their order."""
    torch.manual_seed(0)
    named: dict[str, list[Tensor]] = {}
    for value in (torch.randn(ids.shape[0], 8), ids.clone(), *LOOKUP.tensors()[1:], torch.zeros(6, 8)):
        named.setdefault(spec(value).replace(f"[{ROWS},", "[u0,"), []).append(value)
    return [named[plan.values[name]].pop(0) if "[" in plan.values[name] else ROWS for name in plan.inputs]


def check_same(run: Run, other: Run, plan: Plan, ids: Tensor) -> None:
    pairs = zip(run(inputs(plan, ids)), other(inputs(plan, ids)), strict=True)
    assert all(same_bits(ours, theirs) for ours, theirs in pairs)


def test_the_host_looks_up_before_the_layers() -> None:
    plan = planned()
    made, (decision,) = prefetch_engram(plan)
    check_plan(made)
    assert decision.applied and (place(plan), place(made)) == (LAYERS + 1, 1)
    assert sorted(p.name for p in made.pieces) == sorted(p.name for p in plan.pieces) and not made.events
    assert prefetch_engram(made)[0] == made


@pytest.mark.parametrize("ids", IDS, ids=["text", "images and pads"])
def test_no_bit_changes(ids: Tensor) -> None:
    plan = planned()
    made, _ = prefetch_engram(plan)
    artifacts = runs(plan, made)
    check_same(executor(plan, artifacts), executor(made, artifacts), plan, ids)


@given(ids_of_a_step, st.integers(0, 2**16))
@settings(max_examples=4, phases=[Phase.generate])
def test_on_side_streams_no_bit_changes_whatever_the_ids(tokens: Sequence[tuple[int, int]], seed: int) -> None:
    """Tables on the device: images, pads, borders of chunks, and what stood before a prefix that was found cached."""
    plan = replace(planned(), pieces=tuple(replace(piece, uncapturable=None) for piece in planned().pieces))
    made, _ = assign_streams(plan, (1, 8), lambda body, rows: 10.0)
    assert made.pieces[1].stream == STREAMS["early"] and looks_up(made.pieces[1])
    check_sides(made)
    ids = torch.tensor([[token if at <= before else -1 for at in range(ORDERS)] for token, before in tokens])
    artifacts, order = runs(plan, made), random.Random(seed)
    side = SideStreams(made, artifacts, order.choice)
    check_same(executor(plan, artifacts), side.run, plan, ids)


# ---- any program: layers, writes, and look-ups that the host runs

TABLES = torch.randn(2, 3, 4)  # a table of three rows, and a cache of as many
STEPS = ("layer", "layer", "write", "by ids", "by ids", "by what a layer gave", "in the cache")


@cache
def hosted(*steps: str) -> tuple[GraphModule, Plan]:
    """The program of these steps, and its plan; each look-up is a piece of the host's."""

    def run(x: Tensor, ids: Tensor, table: Tensor, cache: Tensor) -> Tensor:
        for step in steps:
            match step:
                case "layer":
                    x = x.tanh()
                case "write":
                    cache[0].copy_(x.sum(0))
                case "by ids":
                    x = x + table[ids].relu()
                case "by what a layer gave":
                    x = x + table[ids.masked_fill(x.sum(-1) > 0, 2)].relu()
                case _:
                    x = x + cache[ids].relu()
        return x * 2

    gm = trace(run, torch.randn(3, 4), torch.tensor([1, 0, 1]), static=[*TABLES])
    canonicalize(gm)
    reinplace_cache_writes(gm)
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.tanh.default:
            outline(gm, [node], kind="seam")
        elif node.target is torch.ops.aten.relu.default:
            outline(gm, [node.args[0], node], kind="look_up")
    plan = partition(gm, cut_at=["seam", "look_up"], along="rows")
    host = [replace(p, uncapturable="a table on cpu" if p.border == "region look_up" else None) for p in plan.pieces]
    return gm, replace(plan, pieces=tuple(host))


def check_prefetched(steps: Sequence[str], seed: int) -> list[bool]:
    """Of each look-up whether it moved. Nothing else moves, no bit changes, and then there is nothing left to move."""
    gm, plan = hosted(*steps)
    made, run = run_plan_pass("prefetch_engram", prefetch_engram, plan, strict=True)
    moved = {each.node for each in run.decisions if each.applied}
    order = [[piece.name for piece in each.pieces if piece.name not in moved] for each in (plan, made)]
    assert order[0] == order[1] and {piece.name for piece in made.pieces} == {piece.name for piece in plan.pieces}
    assert prefetch_engram(made)[0] == made
    artifacts, given = runs(plan), random_inputs(flatten(gm), 3, seed=seed)
    twins = [value.clone() if isinstance(value, Tensor) else value for value in given]
    results = [executor(each, artifacts)(list(values)) for each, values in ((plan, given), (made, twins))]
    pairs = zip([*given, *results[0]], [*twins, *results[1]], strict=True)
    assert all(same_bits(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)
    return [each.applied for each in run.decisions]


def test_of_any_look_ups_those_move_that_hang_on_what_is_there() -> None:
    fired: list[bool] = []

    @given(st.lists(st.sampled_from(STEPS), min_size=2, max_size=7), st.integers(0, 2**16))
    @settings(max_examples=max(6, settings.default.max_examples // 3), phases=[Phase.generate])
    def draw(steps: list[str], seed: int) -> None:
        still = () if "write" in steps else ("in the cache",)
        wanted = [bool(at) and step in ("by ids", *still) for at, step in enumerate(steps) if step[:2] in ("by", "in")]
        assert check_prefetched(steps, seed) == wanted, steps
        fired.extend(wanted)

    draw()
    check_fired_share(fired)


@given(st.lists(st.sampled_from(["layer", "write", "by what a layer gave", "in the cache"]), min_size=1, max_size=6))
@settings(max_examples=max(4, settings.default.max_examples // 5), phases=[Phase.generate])
def test_nothing_moves_that_hangs_on_a_layer_or_a_write(steps: list[str]) -> None:
    assert not any(check_prefetched(["write", *steps], 0))


FLAWS = {"ids hang on a layer": RULES[1][0], "tables are written": RULES[1][0], "it draws": RULES[0][0]}


def decided(flaw: str) -> tuple[Plan, Plan, Decision]:
    plan = planned(flaw if flaw != "it draws" else "")
    if flaw == "it draws":
        pieces = [_drawing(p) if looks_up(p) else p for p in plan.pieces]
        plan = replace(plan, pieces=tuple(pieces))
    made, (decision,) = prefetch_engram(plan)
    return plan, made, decision


def _drawing(piece: Any) -> Any:
    """`piece` with a draw of random numbers that nobody reads."""
    graph = torch.fx.Graph()
    results = graph.graph_copy(piece.body.graph, {})
    drawn = graph.call_function(torch.ops.aten.rand.default, ([2],))
    drawn.meta["val"] = torch.empty(2)
    graph.output(results)
    return replace(piece, body=torch.fx.GraphModule(piece.body, graph))


@pytest.mark.parametrize("flaw", FLAWS)
def test_names_the_rule_that_a_piece_breaks(flaw: str) -> None:
    plan, made, decision = decided(flaw)
    assert (decision.applied, decision.rule) == (False, FLAWS[flaw]) and made == plan


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == set(dict(RULES))


@pytest.mark.parametrize("rule", ["only computes"])
def test_a_deleted_rule_lets_its_flaw_through(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RULES", tuple(each for each in RULES if each[0] != rule))
    assert decided("it draws")[2].rule != rule


ready = side_work.Finder._ready


def unwritten(finder: side_work.Finder, at: int, piece: Any) -> Any:
    finder.written = set()
    return ready(finder, at, piece)


WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "a written table is there from the start": (side_work.Finder, "_ready", unwritten, "tables are written"),
    "it goes to the start, whatever it waits for": (
        side_work.Finder, "_ready", lambda self, at, piece: (dict.fromkeys(piece.body.graph.nodes, -1),
                                                             set(piece.body.graph.nodes)), "ids hang on a layer"),
    "buffers live as they did": (module, "buffers_again", lambda plan: plan.buffers, ""),
}  # fmt: skip


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_prefetch_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, flaw = WRONG[bug]
    plan = planned(flaw)

    def shows() -> None:
        made, _ = prefetch_engram(plan)
        check_plan(made)
        artifacts = runs(plan, made)
        check_same(executor(plan, artifacts), executor(made, artifacts), plan, IDS[0])

    shows()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception):  # noqa: B017
        shows()
