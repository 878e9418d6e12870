"""trim_replay leaves out rows that nobody reads, of any program, and changes no bit of a row that somebody does.

Steps are ragged ones, and keep rows as batches do: the last so many of each chunk, as many before each row of logits,
and some that were not needed. What is not kept may hold NaN.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import check_fired_share, check_in_another_process
from tests.strategies.rows import (
    CACHES,
    FLOORED,
    LOCAL,
    MIXES,
    READS_BEFORE,
    SIZED,
    STEPS,
    WINDOW,
    WRITES,
    Program,
    build,
    captured,
    fakes,
    programs,
    step,
)
from tests.strategies.rows import Step as Inputs
from tests.strategies.tracing import trace
from v41.passes import replay_edit, replay_rows, trim_replay
from v41.passes.analysis.rows import Demand, Ragged
from v41.passes.analysis.sizes import symbols_in
from v41.passes.matching import fake
from v41.passes.pipeline import Pass, run_pipeline
from v41.passes.replay_rows import KNOWN, Kept, LateRows
from v41.passes.structure import structure_key
from v41.regions import body_of, invoke_subgraph, outline, regions
from v41.report import Decision

CHUNKS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 14)), min_size=1, max_size=4)
LAST = st.integers(WINDOW, 12)
ALL_ROWS = ["cache", *sorted(MIXES.keys() - {"sum of rows", "softmax of rows", "first row"})]  # these end row by row
IN_ORDER = {name: STEPS[name] for name in STEPS if name != "transposed product"}  # memory as the next step was traced
HANDED_ON = {name: IN_ORDER[name] for name in IN_ORDER if name != "ring otherwise"}  # which keeps what no step reads
RINGS = {name: WRITES[name] for name in WRITES if name != "cache"}


def kept_of(inputs: dict[str, Node], last: int, bounded: bool = False) -> Kept:
    names = {f.name for f in fields(Ragged)} - (set() if bounded else {"late_floors"})
    return Kept(inputs["kept_rows"], inputs["kept_longest"], last, Ragged(**{name: inputs[name] for name in names}))


def trimmed(program: Program, last: int, bounded: bool = False) -> tuple[GraphModule, GraphModule, list[Decision]]:
    """The program, what became of it, and what was decided."""
    (whole, _), (gm, inputs) = (writing_at_its_end(*build(program)) for _ in range(2))
    decisions = trim_replay.trim(gm, kept_of(inputs, last, bounded))
    gm.graph.lint()
    gm.recompile()
    return whole, gm, decisions


def writing_at_its_end(gm: GraphModule, inputs: dict[str, Node]) -> tuple[GraphModule, dict[str, Node]]:
    """As AOTAutograd has it. What reads a cache behind a write then reads what was there before: another program."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            gm.graph.output_node().prepend(node)
    gm.recompile()
    return gm, inputs


def run(gm: GraphModule, given: Inputs) -> list[Tensor]:
    """What a step returns and leaves in the caches, nobody's slot apart."""
    args = Inputs(*(each.clone() for each in given))
    results = gm(*args)
    return [*results, *(cache[:-1] for cache in args[CACHES:])]


def check_same(whole: GraphModule, gm: GraphModule, clean: Inputs, given: Inputs) -> None:
    """`gm` makes of `given` what the whole program makes of `clean`. Small products of other sizes sum up in another
    order, so not bit by bit; another row differs in the first digit."""
    for expected, found in zip(run(whole, clean), run(gm, given), strict=True):
        limit = 1e-2 * (1 + expected.nan_to_num().abs().max()) if expected.numel() else 1
        assert torch.equal(expected.isnan(), found.isnan())
        assert not ((expected - found).nan_to_num().abs() > limit).any(), (expected - found).abs().max()


def poisoned(given: Inputs) -> Inputs:
    """NaN in every row that is not kept."""
    x = torch.full_like(given.x, torch.nan)
    x[given.kept_rows] = given.x[given.kept_rows]
    return given._replace(x=x)


def gathers(gm: GraphModule) -> list[Node]:
    """What takes the kept rows of something early."""
    (kept,) = (node for node in gm.graph.nodes if node.op == "placeholder" and node.target == "kept_rows")
    return [user for user in kept.users if user.target is invoke_subgraph or "index" in str(user.target)]


@given(programs(LOCAL, READS_BEFORE, FLOORED, WRITES, MIXES), CHUNKS, LAST, st.integers(0, 9), st.booleans())
def test_every_row_that_is_read_has_the_bits_of_the_whole_program(
    program: Program, chunks: list[tuple[int, int]], last: int, seed: int, ends: bool
) -> None:
    whole, gm, _ = trimmed(program, last)
    given = step(chunks, seed, ends, last, more=seed)
    check_same(whole, gm, given, given)


@given(programs(LOCAL, READS_BEFORE, RINGS), CHUNKS, st.integers(0, 9), st.booleans())
def test_dropped_rows_may_hold_anything(program: Program, chunks: list[tuple[int, int]], seed: int, ends: bool) -> None:
    """With as many rows kept as the program reads back, NaN in the others reaches nothing."""
    last = WINDOW + 2 * len(program)
    whole, gm, decisions = trimmed(["gelu", *program], last)
    assert [each.applied for each in decisions] == [True]
    given = step(chunks, seed, ends, last, more=seed)
    check_same(whole, gm, given, poisoned(given))


@given(programs(LOCAL, {"window above a floor": FLOORED["window above a floor"]}, RINGS), CHUNKS, st.integers(0, 9))
def test_with_floors_one_window_is_enough(program: Program, chunks: list[tuple[int, int]], seed: int) -> None:
    program = [*program, "window above a floor", "gelu", "window above a floor"]
    whole, gm, decisions = trimmed(program, WINDOW, bounded=True)
    assert [each.applied for each in decisions] == [True]
    given = step(chunks, seed, last=WINDOW, more=seed)
    check_same(whole, gm, given, poisoned(given))


def test_what_is_read_further_back_than_rows_are_kept_stays_whole() -> None:
    """Late nodes alone read it, by number: that does not make its rows there."""
    whole, gm, _ = trimmed(["gelu", "window", "window", "window"], 5)
    given = step([(0, 14), (4, 9), (1, 1)], 1, last=5, more=3)
    check_same(whole, gm, given, given)


def trimmed_twice(program: Program, last: int, inner: int) -> tuple[GraphModule, GraphModule, list[Decision]]:
    (whole, _), (gm, inputs) = (writing_at_its_end(*build(program)) for _ in range(2))
    outer = kept_of(inputs, last)
    few = replace(outer, rows=inputs["inner_rows"], longest=inputs["inner_longest"], last=inner)
    decisions = trim_replay.trim(gm, few, outer)
    gm.graph.lint()
    gm.recompile()
    return whole, gm, decisions


@given(programs(LOCAL, READS_BEFORE, RINGS), CHUNKS, st.integers(0, 9), st.integers(0, 4), st.booleans())
def test_rows_go_twice_where_the_last_steps_need_fewer(
    program: Program, chunks: list[tuple[int, int]], seed: int, more: int, ends: bool
) -> None:
    program = ["gelu", "window", *program, "window", "norm", "window"]
    last, inner = WINDOW + 2 * len(program), WINDOW + 2
    whole, gm, decisions = trimmed_twice(program, last, inner)
    assert [(each.applied, each.region and each.region.attrs["last"]) for each in decisions] == [
        (True, inner), (True, last),
    ]  # fmt: skip
    given = step(chunks, seed, ends, last, more, inner)
    check_same(whole, gm, given, poisoned(given))


def inputs_of(gm: GraphModule) -> dict[str, Node]:
    return {str(node.target): node for node in gm.graph.nodes if node.op == "placeholder"}


@pytest.mark.parametrize("name", sorted(LOCAL | READS_BEFORE | RINGS))
def test_each_step_is_trimmed_alone(name: str) -> None:
    whole, gm, decisions = trimmed(["gelu", name], 5)
    assert [each.applied for each in decisions] == [True]
    made = [node for node in gm.graph.nodes if node.op == "call_function" and fake(node) is not None]
    late = [node for node in made if symbols_in(node.meta["val"])]  # numbers of the whole program may stay
    assert late and not any("u0" in symbols_in(node.meta["val"]) for node in late[-3:])
    for chunks in ([(0, 12), (4, 9), (1, 1)], [(0, 1)], [(2, 14), (0, 13)]):
        for ends in (True, False):
            given = step(chunks, 1, ends, last=5, more=3)
            check_same(whole, gm, given, poisoned(given))


@pytest.mark.parametrize("name", sorted(MIXES))
def test_what_mixes_rows_is_named(name: str) -> None:
    whole, gm, decisions = trimmed(["gelu", name, "norm", "product", "ring"], 4)
    named = {each.culprit for each in decisions if each.rule == KNOWN and not each.applied}
    assert named
    given = step([(0, 12), (4, 9), (1, 1)], last=4)
    check_same(whole, gm, given, given)


@pytest.mark.parametrize("name", sorted(SIZED))
@pytest.mark.parametrize("in_body", [False, True], ids=["alone", "in a body"])
def test_sizes_that_are_more_than_how_many_rows_there_are_stay(name: str, in_body: bool) -> None:
    """Of a table a program takes as many as it has rows, or makes a column of each row: kept rows would have others."""
    whole, _ = writing_at_its_end(*build(["gelu", name]))
    gm, inputs = in_two_bodies(name) if in_body else writing_at_its_end(*build(["gelu", name]))
    trim_replay.trim(gm, kept_of(inputs, 5))
    gm.graph.lint()
    gm.recompile()
    for chunks in ([(0, 12), (4, 9), (1, 1)], [(2, 14), (0, 13)], [(0, 1)]):
        given = step(chunks, 1, last=5, more=3)
        check_same(whole, gm, given, given)


def read_by_all(positions: Tensor, kept_rows: Tensor, kept_longest: Tensor) -> tuple[Tensor, ...]:
    return positions + 1, kept_rows + 1, kept_longest + 1


@pytest.mark.parametrize(
    ("size", "names", "last"),
    [
        ("last 5", ("positions", "kept_rows", "kept_longest"), 5),
        ("rows that are kept", ("positions", "kept_rows", "kept_longest"), None),  # of another number each step
        ("last 5", ("positions", "tokens", "kept_longest"), None),
        ("last 5", ("starts", "kept_rows", "kept_longest"), None),
    ],
)
def test_what_a_batch_promises_is_told_by_names(size: str, names: tuple[str, ...], last: int | None) -> None:
    gm = trace(read_by_all, *(torch.arange(3) for _ in range(3)), sizes=("rows", size, "longest kept"))
    tensors = [node for node in gm.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], Tensor)]
    called = {node.name: f"batch.{name}" for node, name in zip(tensors, names, strict=True)}
    assert [kept.last for kept in replay_rows.kept_levels(gm, called)] == ([last] if last else [])
    assert trim_replay.trim_replay(gm) == [] == trim_replay.trim_replay(gm, called)


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_kept_rows_that_the_program_reads_already_are_no_promise(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes with them: it has been trimmed, or has a use of its own for them."""
    gm, inputs = writing_at_its_end(*build(["gelu"]))
    if reads:
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.aten.neg.default, (inputs["kept_rows"],))
    monkeypatch.setattr(trim_replay, "kept_levels", lambda *_: [kept_of(inputs, 6)])
    assert [each.applied for each in trim_replay.trim_replay(gm)] == [True] * (not reads)


def in_two_bodies(name: str) -> tuple[GraphModule, dict[str, Node]]:
    """A step that is computed in a body that a body calls, behind one that is not."""
    gm, inputs = writing_at_its_end(*build(["gelu", name]))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    before = sum(node.op == "call_function" for node in build(["gelu"])[0].graph.nodes) - 1  # the rows of logits
    inner = outline(gm, calls[before:-1], kind="inner")
    outline(gm, [inner], kind="outer")
    gm.recompile()
    return gm, inputs


@pytest.mark.parametrize(("name", "opened"), [("norm", False), ("window", True)])
def test_bodies_in_bodies_have_kept_rows_or_are_opened(name: str, opened: bool) -> None:
    """Rows of their own they are computed of as they are; what counts rows inside is computed outside."""
    (whole, _), (gm, inputs) = (in_two_bodies(name) for _ in range(2))
    (decision,) = trim_replay.trim(gm, kept_of(inputs, 5))
    gm.graph.lint()
    gm.recompile()
    assert decision.applied and [*regions(gm, "outer"), *regions(gm, "inner")] == [*regions(gm, "outer")][: not opened]
    for call in regions(gm, "outer"):
        for body in (body_of(call), *map(body_of, regions(body_of(call)))):
            assert not any("u0" in symbols_in(node.meta.get("val")) for node in body.graph.nodes)
    given = step([(0, 12), (4, 9), (1, 1)], 1, last=5, more=3)
    check_same(whole, gm, given, poisoned(given))


def test_a_second_run_finds_nothing_and_names_do_not_matter() -> None:
    program = ["norm", "cache", "window", "experts", "by request", "ring", "gelu"]
    _, gm, _ = trimmed(program, 9)
    once = structure_key(gm)
    assert trim_replay.trim_replay(gm, {name: f"batch.{name}" for name in inputs_of(gm)}) == []
    _, other, _ = trimmed(program, 9)
    assert structure_key(gm) == structure_key(other) == once


def key_of_a_program() -> str:
    for made in (fakes, captured):  # sizes that other programs made are of this process
        made.cache_clear()
    return structure_key(trimmed(["norm", "cache", "window", "experts", "by request", "ring"], 9)[1])


@pytest.mark.slow
def test_another_process_makes_the_same_program() -> None:
    check_in_another_process("tests.passes.test_trim_replay", "key_of_a_program", key_of_a_program())


def reads_stay_in_front() -> bool:
    """Whether the ring as it was is read by late rows before it is written by all."""
    _, gm, _ = trimmed(["window above a floor", "cache", "window above a floor"], WINDOW, bounded=True)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    (ring,) = (node for node in order if node.op == "placeholder" and node.target == "ring")
    reads = [user for user in ring.users if user.target is torch.ops.aten.index.Tensor]
    writes = [user for user in ring.users if user.target is torch.ops.aten.index_put.default]
    assert len(reads) == len(writes) == 2
    return all(order[read] < order[write] for read, write in zip(reads, writes, strict=True))


def test_what_a_step_reads_before_it_writes_stays_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_stay_in_front()
    monkeypatch.setattr(replay_edit.Editor, "_waits_for", lambda *_: {})
    assert not reads_stay_in_front()


def test_all_that_is_early_comes_first() -> None:
    _, gm, _ = trimmed(["norm", "cache", "window", "by request", "ring", "gelu"], 9)
    seam = [i for i, node in enumerate(gm.graph.nodes) if node in gathers(gm)]
    wide = [i for i, node in enumerate(gm.graph.nodes) if node.op == "call_function" and "u0" in _made(node)]
    assert max(wide) < min(seam)


def _made(node: Node) -> dict[str, None]:
    return symbols_in(node.meta.get("val")) if node not in gathers(node.graph.owning_module) else {}  # type: ignore[arg-type]


def by_the_driver(program: Program) -> bool:
    """Whether rows go, by the driver, which holds what comes out to every rule."""
    gm, inputs = writing_at_its_end(*build(program))
    settings = {"kept": kept_of(inputs, 6)}
    gm, (run,) = run_pipeline(gm, [Pass(trim_replay.trim, settings=settings)], check=True, strict=True)
    assert any(each.applied for each in run.decisions) == bool(gathers(gm))
    return bool(gathers(gm))


def test_some_drawn_programs_lose_rows_and_some_do_not() -> None:
    fired: list[bool] = []

    @given(programs(IN_ORDER))
    def draw(program: Program) -> None:
        fired.append(by_the_driver(program))

    draw()
    check_fired_share(fired)


@given(programs(HANDED_ON), st.sampled_from(ALL_ROWS))
def test_no_row_goes_where_the_last_step_reads_all(program: Program, last: str) -> None:
    assert not by_the_driver([*program, last])


def test_what_nobody_reads_is_no_trouble() -> None:
    """Of two halves of heads one goes unread, and reads what is late: it has no rows to keep, and is dropped."""
    gm, inputs = writing_at_its_end(*build(["heads", "heads"]))
    unread = [node for node in gm.graph.nodes if node.op == "call_function" and not node.users]
    assert unread and by_the_driver(["heads", "heads"])
    trim_replay.trim(gm, kept_of(inputs, 6))
    assert [node for node in gm.graph.nodes if node.op == "call_function" and not node.users] == []


# ---- seeded bugs -----------------------------------------------------------------------------------------------------


def covers_one_row_more(kept: Kept, demand: Demand) -> bool:
    return COVERS(replace(kept, last=kept.last + 1), demand)


def place_as_it_was(editor: replay_edit.Editor, rows: Node) -> Node:
    return editor._once(("place of", rows), torch.ops.aten.clamp_max.default, (rows, editor._last_row), rows)


COVERS = Kept.covers
NEVER = staticmethod(lambda *_: None)
INPUTS = step([(0, 12), (4, 9), (1, 1)], last=5, more=2)
WRONG: dict[str, tuple[Program, int, tuple[Any, str, Any]]] = {
    "one row fewer is enough": (["window"], WINDOW - 1, (Kept, "covers", covers_one_row_more)),
    "rows are numbered from 0": (["window"], 5, (LateRows, "_counts_rows", lambda rows, node: False)),
    "any operand has rows to take": (["row behind", "norm"], 5, (LateRows, "_operand_problem", NEVER)),
    "a window counts rows as before": (["window"], 5, (replay_edit.Editor, "_place", place_as_it_was)),
    "logits count rows as before": (["gelu"], 5, (replay_edit.Editor, "_place", place_as_it_was)),
    "columns are those of all rows": (
        ["by request"],
        5,
        (replay_edit.Editor, "_columns", property(lambda self: self._late(self.ragged.columns))),
    ),
    "the grid is that of all rows": (
        ["by request"],
        5,
        (replay_edit.Editor, "_grid", property(lambda self: inputs_grid(self))),
    ),
    "places of picks are numbers of rows": (
        ["experts"],
        5,
        (LateRows, "numbers", lambda rows, node: any_index(rows, node)),
    ),
}


def inputs_grid(editor: replay_edit.Editor) -> Node:
    first = editor._once(
        "whole grid", torch.ops.aten.unsqueeze.default, (editor.ragged.first_rows, 1), editor.kept.rows
    )
    place = editor._once("whole place", torch.ops.aten.add.Tensor, (first, editor.kept.longest), editor.kept.rows)
    return editor._once("grid", torch.ops.aten.clamp_max.default, (place, editor._last_row), editor.kept.rows)


def any_index(rows: LateRows, node: Node) -> Node | None:
    found = replay_rows.indices(node)
    return found[0] if len(found) == 1 and node.args[0] in rows.late else None


def noticed(program: Program, last: int) -> bool:
    try:
        whole, gm, _ = trimmed(program, last)
        given = step([(0, 12), (4, 9), (1, 1)], last=last, more=2)
        keeps_apart = not MIXES.keys() & {*program} and "cache" not in program
        check_same(whole, gm, given, poisoned(given) if keeps_apart else given)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("bug", WRONG)
def test_a_seeded_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, last, plant = WRONG[bug]
    assert not noticed(program, max(last, WINDOW))
    monkeypatch.setattr(*plant)
    assert noticed(program, last)
