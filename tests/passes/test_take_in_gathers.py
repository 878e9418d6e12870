"""take_in_gathers takes in what gathers records, names the rule that a flaw breaks, and keeps every write in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch.fx import GraphModule, Node

from tests.invariants import (
    apply,
    check_fired_share,
    check_moves_only,
    check_pass,
    check_plan_holds,
    check_same_values,
    copy_program,
)
from tests.strategies.attention import Spelling
from tests.strategies.record_gathers import (
    ALONE,
    FLAWS,
    NO_PICKS,
    ONE_THING,
    PLACES,
    SLOT,
    WAITS,
    Lying,
    flawed,
    legal,
    prepared,
)
from v41.passes import record_gathers
from v41.passes import take_in_gathers as module
from v41.passes.analysis.cost import Costs, bytes_of
from v41.passes.outline_attention import KIND
from v41.passes.pipeline import CUT_AT, run_pipeline
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.passes.take_in_gathers import RULES, find_sites, take_in_gathers
from v41.passes.verify import SHARED, WRITES, facts, verify
from v41.regions import region_of, regions
from v41.report import Decision

FEW = settings(max_examples=settings.default.max_examples // 12, phases=[Phase.generate])  # a trace takes a second
MODEL = Lying()
TOLD = (
    "records are returned",
    "of other rows",
    "in other slots",
    "one cache, written in between",
    "one mask for both",
)  # by seeded bugs
QUICK = TOLD[::3]
LOOKS = {"_in_step": (2, torch.bool), "_rows": (2, torch.int64), "_records": (2, None), "slots": (1, torch.int64)}
OF_WINDOW = Lying(Spelling(rope="none", picked=None))


def taken_in(case: Lying) -> tuple[GraphModule, list[Decision]]:
    gm = copy_program(prepared(case))
    decisions = check_pass(take_in_gathers, gm, (0, 5))
    check(case.shaped(), gm, decisions)
    check_moves_only(copy_program(prepared(case)), gm)
    if case.flaw != "an input is written":
        check_writes_in_place(case, gm)
    return gm, decisions


def check(case: Lying, gm: GraphModule, decisions: list[Decision]) -> None:
    """What each region says, and which rule is named of the branch that a flaw is of."""
    calls = list(regions(gm, KIND))
    assert len(calls) == case.calls
    for call, told in zip(calls, batched(decisions, len(case.sources)), strict=True):
        check_region(case, call, dict(zip(module.BRANCHES, told, strict=False)))


def check_region(case: Lying, call: Node, told: dict[str, Decision]) -> None:
    attrs, sources = region_of(call).attrs, dict(zip(told, case.sources, strict=True))
    for role, operand in zip(attrs["operands"], call.args[2:], strict=True):
        check_operand(role, operand)
    of, rule = FLAWS[case.flaw] if case.flaw else ("", "")
    broken = {name for name in told if case.flaw and (name == of or case.flaw == "an input is written")}
    assert {name: decision.rule for name, decision in told.items() if sources[name] != "rows"} == {
        name: rule if name in broken else None for name, source in sources.items() if source != "rows"
    }
    wanted = {name: "rows" if name in broken else source for name, source in sources.items()}
    assert attrs["sources"] == tuple(wanted.values())
    assert [decision.applied for decision in told.values()] == [source != "rows" for source in wanted.values()]
    roles = [role for role in attrs["operands"] if role != "size"]
    assert len(attrs["operands"]) == len(call.args) - 2 and len(roles) == len(set(roles))
    assert ("slots" in roles) == ({*wanted.values()} != {"rows"})
    for name, source in wanted.items():
        by_picks = name == "picked" and case.places not in NO_PICKS and case.flaw != "one cache, written in between"
        assert (f"{name}_places" in roles) == (source != "rows" and not by_picks)
        for role in ("in_step", "records", "rows"):
            assert (f"{name}_{role}" in roles) == (source == "step")


def check_operand(role: str, operand: Any) -> None:
    """It looks like what it is said to be: by its axes, and what they hold."""
    for end, (axes, dtype) in LOOKS.items():
        if role.endswith(end):
            value = operand.meta["val"]
            assert (value.ndim, dtype or value.dtype) == (axes, value.dtype), f"{role} is {operand.format_node()}"


def batched(values: list[Any], count: int) -> list[list[Any]]:
    return [values[i : i + count] for i in range(0, len(values), count)]


def check_writes_in_place(case: Lying, gm: GraphModule) -> None:
    """What is written is written in place behind the region, with the same results."""
    gm, known = copy_program(gm), facts(gm)
    decisions = apply(reinplace_cache_writes, gm)
    assert [decision.rule for decision in decisions] == [None] * len(decisions)
    assert len(decisions) == (case.shaped().written or case.flaw == "one cache, written in between")
    verify(gm, known, name="reinplace_cache_writes", but=(WRITES, SHARED))
    for rows in (0, 1, 5):
        check_same_values(prepared(case), gm, rows)


@pytest.mark.slow
def test_legal_gathers_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEW
    @given(legal | flawed)
    def draw(case: Lying) -> None:
        _, decisions = taken_in(case)
        fired.extend(decision.applied for decision in decisions)

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize(
    "case",
    [MODEL, OF_WINDOW, Lying(layers=2), Lying(places="but for one"), replace(OF_WINDOW, again=True)],
    ids=["both", "window alone", "two layers", "places of their own", "what is written is read, too"],
)
def test_the_model_s_own_spelling_is_taken_in(case: Lying) -> None:
    gm, decisions = taken_in(case)
    assert all(decision.applied for decision in decisions)
    left = {str(node.target) for node in gm.graph.nodes}
    assert "aten.index.Tensor" not in left
    assert apply(take_in_gathers, gm) == []  # what was taken in is handed no records


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("slot", SLOT)
def test_every_spelling_is_taken_in(places: str, slot: str) -> None:
    _, decisions = taken_in(Lying(places=places, slot=slot))
    assert all(decision.applied for decision in decisions)


@pytest.mark.parametrize("flaw", [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in FLAWS])
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (_, rule) = Lying(flaw=flaw), FLAWS[flaw]
    taken_in(case)
    monkeypatch.setattr(module, "RULES", without(rule))
    try:
        again = apply(take_in_gathers, copy_program(prepared(case)))
    except (AssertionError, KeyError, AttributeError, TypeError, RuntimeError):  # damage is as good
        return
    assert all(decision.applied for decision in again)  # no other rule refuses it


def test_every_rule_has_a_flaw() -> None:
    assert {rule for _, rule in FLAWS.values()} == dict(RULES).keys()


def without(*rules: str) -> Any:
    return tuple(pair for pair in RULES if pair[0] not in rules)


def test_a_cache_is_read_by_picks_and_no_border_holds_it() -> None:
    """Bytes that the region reads follow rows, not the cache; a plan hands it caches as they lie, and copies none."""
    gm, _ = taken_in(MODEL)
    apply(reinplace_cache_writes, gm)
    (call,) = regions(gm, KIND)
    roles = dict(zip(region_of(call).attrs["operands"], call.args[2:], strict=True))
    symbols = {str(symbol) for symbol in Costs().node(call).read.free_symbols}
    assert len(symbols) == 1  # rows
    few = Costs().node(call).at(**dict.fromkeys(symbols, 1)).read
    assert few < bytes_of(roles["picked"]) + bytes_of(roles["window"])
    plan = check_plan_holds(gm, (5,), cut_at=(*CUT_AT, KIND))
    (own,) = (piece for piece in plan.pieces if piece.border == f"region {KIND}")
    assert own.uncapturable is None and {roles["picked"].name, roles["window"].name} <= {*own.reads}
    assert all(plan.buffers[roles[name].name].owner == "caller" for name in ("picked", "window"))
    (later,) = (piece for piece in plan.pieces if piece.writes)
    assert plan.pieces.index(later) > plan.pieces.index(own) and later.writes == (roles["window"].name,)


def test_it_waits_for_kernels_that_attend() -> None:
    for own, sources in ((CUT_AT, ("rows", "rows")), ((*CUT_AT, KIND), ("step", "slots"))):
        gm, runs = run_pipeline(copy_program(prepared(MODEL)), own=own, check="numeric", strict=True)
        (run,) = (each for each in runs if each.name == "take_in_gathers")
        assert (run.failure, run.applied) == (None, 0 if own is CUT_AT else 2)
        assert [region_of(call).attrs["sources"] for call in regions(gm, KIND)] == [sources]


@pytest.mark.slow
def test_a_key_that_shows_though_it_is_hidden_is_read_where_eager_reads_it() -> None:
    """Attention that sets no hidden key to 0 shows a NaN in one: so it matters which record a pick of -1 reads."""
    shows = replace(MODEL.spelling, zeroed="not")
    for places, role in (("the last", "picked_places"), ("clamp", "picks")):
        gm = copy_program(prepared(Lying(shows, places=places)))
        apply(take_in_gathers, gm)
        (call,) = regions(gm, KIND)
        assert region_of(call).attrs["reads_hidden"]
        assert ("picked_places" in region_of(call).attrs["operands"]) == (role == "picked_places")


# ---- seeded bugs


WRONG: dict[str, tuple[Any, str, Any]] = {
    "picks are tried that no comparison tells of": (
        record_gathers,
        "_worth_trying",
        lambda nodes: record_gathers.TRIED,
    ),
    "an operand may be two things": (module, "RULES", without(ONE_THING)),
    "who else reads the records goes without": (module, "RULES", without(ALONE)),
    "records of any rows are this step's": (module, "counts_other_rows", lambda site: None),
    "any slots are the same": (module, "RULES", without("all its records lie in one slot a row")),
    "what is written in front stays there": (module.Site, "written_over", []),
    "what is read of a write waits as well": (module, "RULES", without(WAITS)),
    "the region says what it said": (module, "attributes", lambda sites: region_of(sites[0].call).attrs),
    "shared attention stays closed": (module, "open_shared_attention", lambda gm: None),
    "the first branch alone is looked at": (module, "find_sites", lambda gm: [each[:1] for each in find_sites(gm)]),
}


def check_what_shows() -> None:
    """What the right pass does with a program that has something of everything."""
    for case in (MODEL, Lying(places="clamped twice"), Lying(places="but for one"), Lying(layers=2)):
        taken_in(case)
    for flaw in TOLD:
        taken_in(Lying(flaw=flaw))


@pytest.mark.slow
def test_what_shows_the_bugs_holds_of_the_right_pass() -> None:
    check_what_shows()


@pytest.mark.slow
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = WRONG[bug]
    if name == "counts_other_rows":
        rules = tuple((rule, wrong if find is module.counts_other_rows else find) for rule, find in RULES)
        owner, name, wrong = module, "RULES", rules
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception):  # noqa: B017  (a pass that raises is undone: any error is a notice)
        check_what_shows()
