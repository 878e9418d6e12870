"""take_in_combine takes in every legal sum of experts' outputs, names the rule that a flaw breaks, changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch.fx import GraphModule, Node

from tests.invariants import apply, check_fired_share, check_moves_only, check_pass, check_plan_holds, copy_program
from tests.strategies.combines import FLAWS, RETURNED, Combine, flawed, legal, prepared
from tests.strategies.ranks import ranks
from tests.strategies.reduced import RANKS, Sum
from v41.lowering.templates.all_reduce import SummingKernel, generate
from v41.passes import take_in_combine as module
from v41.passes.analysis.effects import effect_of
from v41.passes.outline_experts import KIND as EXPERTS
from v41.passes.pipeline import CUT_AT, run_pipeline
from v41.passes.same_values import random_inputs, same_bits
from v41.passes.take_in_combine import RULES, take_in_combine
from v41.regions import REDUCED, behind_sum, body_of, flatten, front_of_sum, region_of, regions
from v41.report import Decision

slow = pytest.mark.slow
FEW = settings(max_examples=settings.default.max_examples // 12, phases=[Phase.generate])  # a trace takes seconds


@pytest.fixture(autouse=True)
def of_several() -> Iterator[None]:
    with ranks(RANKS):
        yield


def taken_in(case: Combine) -> tuple[GraphModule, Decision]:
    gm = copy_program(prepared(case))
    (decision,) = check_pass(take_in_combine, gm, (0, 5))
    check(case, gm, decision)
    check_moves_only(copy_program(prepared(case)), gm)
    return gm, decision


def check(case: Combine, gm: GraphModule, decision: Decision) -> None:
    """Whether a legal one makes its part in the region, which a kernel can be generated of; a flawed one names why."""
    (call,) = regions(gm, REDUCED)
    if case.flaw:
        assert decision.rule == FLAWS[case.flaw], decision
        assert region_of(call).attrs["part"] is not None
        return
    assert decision.region is not None, decision
    attrs = region_of(call).attrs
    assert attrs["part"] is None and attrs["producer"] == "combine" and not list(regions(gm, EXPERTS))
    assert len(attrs["operands"]) == len(call.args) - 2 and "part" not in attrs["operands"]
    gathers = case.mixture.sums == "inverse"
    assert [attrs["operands"].count(role) for role in ("rows", "places", "residual")] == [gathers, gathers, True]
    assert "term" in attrs["operands"]
    check_halves(body_of(call))
    made = generate(body_of(call), RANKS)
    assert isinstance(made, SummingKernel) and made.part is None, made


def check_halves(body: GraphModule) -> None:
    """What is in front of the sum, and what is behind, give what the body gives."""
    front, behind = front_of_sum(body), behind_sum(body)
    assert front is not None
    names = [node.name for node in body.graph.find_nodes(op="placeholder")]
    inputs = dict(zip(names, random_inputs(flatten(body), 5), strict=True))
    with torch.no_grad():
        expected = body(*inputs.values())
        (part,) = front(*(inputs[node.name] for node in front.graph.find_nodes(op="placeholder")))
        read = [node.name for node in behind.graph.find_nodes(op="placeholder")]
        found = behind(part * RANKS, *(inputs[name] for name in read[1:]))
    assert all(map(same_bits, found, expected))
    assert not [node for half in (front, behind) for node in half.graph.nodes if effect_of(node)]


@slow
def test_legal_combines_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEW
    @given(legal | flawed)
    def draw(case: Combine) -> None:
        _, decision = taken_in(case)
        fired.append(decision.applied)

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", [pytest.param(f, marks=[slow] * (f != "named otherwise")) for f in FLAWS])
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Combine(flaw=flaw)
    taken_in(case)
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw]))
    try:
        again = apply(take_in_combine, copy_program(prepared(case)))
    except (AssertionError, KeyError, AttributeError, TypeError, RuntimeError):  # damage is as good
        return
    assert FLAWS[flaw] not in [decision.rule for decision in again]


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == dict(RULES).keys()


def test_the_plan_holds_and_who_else_reads_the_sum_gets_it() -> None:
    gm, decision = taken_in(Combine(sum=Sum(also="the sum")))
    assert decision.region is not None and decision.region.attrs["reduced"] == (0,)
    plan = check_plan_holds(gm, (5,), cut_at=(*CUT_AT, REDUCED))
    (own,) = (piece for piece in plan.pieces if piece.border == f"region {REDUCED}")
    assert own.uncapturable is None and {*own.sizes} <= {*plan.sizes}


def test_it_waits_for_kernels_that_add_up() -> None:
    gm, runs = run_pipeline(copy_program(prepared(Combine())), strict=True)
    (run,) = (each for each in runs if each.name == "take_in_combine")
    assert run.decisions == [] and run.failure is None
    assert [region_of(call).attrs["part"] for call in regions(gm, REDUCED)] != [None]
    gm, runs = run_pipeline(copy_program(prepared(Combine())), own=(*CUT_AT, REDUCED), check="numeric", strict=True)
    (run,) = (each for each in runs if each.name == "take_in_combine")
    assert run.applied == 1 and [region_of(call).attrs["part"] for call in regions(gm, REDUCED)] == [None]


# ---- seeded bugs


def reads_nothing_else(site: module.Site) -> Node | None:
    return None


def without(*rules: str) -> Any:
    return tuple(pair for pair in RULES if pair[0] not in rules)


WRONG: dict[str, tuple[Any, str, Any]] = {
    "any part is a combine": (module, "RULES", without(RETURNED)),
    "who else reads what is on the way goes without": (module, "RULES", without(FLAWS["read on the way"])),
    "numbers of rows may be negative": (module, "_names_each_row", lambda gather: True),
    "what adds up scattered rows stays outside": (module, "RULES", without(FLAWS["scattered rows are added"])),
    "casts stay outside": (module, "BY_ROWS", module.BY_ROWS[:-5] + module.BY_ROWS[-4:]),
    "the region has a part still": (module, "attributes", lambda site: site.attrs),
    "experts stay closed": (module, "open_experts", lambda gm, call: None),
}


def check_what_shows() -> None:
    """What the right pass does with a program that has something of everything."""
    for flaw in ("", "a product", "read on the way", "named otherwise", "scattered rows are added"):
        taken_in(Combine(flaw=flaw))


@slow
def test_what_shows_the_bugs_holds_of_the_right_pass() -> None:
    check_what_shows()


@slow
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises(Exception):  # noqa: B017  (a pass that raises is undone: any error is a notice)
        check_what_shows()
