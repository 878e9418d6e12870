"""outline_mhc finds every boundary of a stack in any spelling, and names the rule that a flawed one breaks."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import ops
from torch.fx import GraphModule, Node

from tests.invariants import apply, check_fired_share, check_pass, check_same_values, copy_program
from tests.strategies.configs import configs
from tests.strategies.mhc import NEAR_MISSES, PlainStack, Spelling, Stack, spellings, stacks
from tests.strategies.noise import disturb
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.mhc import boundary
from v41.passes import outline_mhc as module
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.matching import is_narrowing, shape
from v41.passes.outline_mhc import RULES, outline_mhc
from v41.regions import NotOutlinable, body_of, is_region, region_of, regions, slice_of
from v41.report import Decision
from v41.tools.inspect import first_layers


@cache
def captured(stack: Stack, backed: bool = False) -> GraphModule:
    fn, rows, weights = stack.to_trace()
    return trace(fn, rows, static=weights, backed=backed)


@cache
def traced(stack: Stack, backed: bool) -> GraphModule:
    gm = copy_program(captured(stack, backed))
    apply(canonicalize, gm)
    apply(fold_sinkhorn, gm)
    return gm


def prepared(stack: Stack, *, backed: bool = False) -> GraphModule:
    """A graph of `stack` as outline_mhc gets it."""
    return copy_program(traced(stack, backed))


def kinds(decisions: list[Decision]) -> Counter[str]:
    """How many sites of which kind and form were applied; refused ones by rule."""
    return Counter(d.region.name if d.region else str(d.rule) for d in decisions)


def expected(stack: Stack) -> Counter[str]:
    """Without the loops, which are folded before."""
    return Counter({name: count for name, count in stack.found().items() if name != "sinkhorn"})


FEWER, FEWEST = (settings(max_examples=settings.default.max_examples // n) for n in (3, 6))  # seconds each


@FEWEST
@given(stacks(), st.booleans())
def test_finds_every_boundary_in_any_spelling(stack: Stack, backed: bool) -> None:
    gm = prepared(stack, backed=backed)
    decisions = check_pass(outline_mhc, gm)
    assert kinds(decisions) == expected(stack)
    for call in regions(gm, "mhc_boundary"):
        attrs = body_of(call).meta["v41_region"].attrs
        assert (attrs["streams"], attrs["hidden"]) == (stack.count, stack.width)
        assert attrs["sinkhorn"] == {"first_axis": -2, "steps": 2 * stack.iters - 1, "eps": stack.eps}
        assert (attrs["pre"], attrs["post"]) == ((1.0, stack.eps), (stack.factor, 0.0))
        assert attrs["head"] == ("softmax", -1, stack.eps) and attrs["columns"] == ("pre", "post", "comb")
        assert attrs["rms_eps"] == attrs["norm_eps"] == stack.norm_eps and attrs["norm_weight"] is stack.weighted
        assert attrs.get("comb_axes") in (None, "kj" if stack.transposed_comb else "jk")
        assert len(attrs["operands"]) == len(call.args) - 2 and len(attrs["outputs"]) == len(call.meta["val"])
        check_cones(call)


def check_cones(call: Node) -> None:
    """What the critical outputs need holds no part of the coefficients, and the other way round no norm."""
    attrs, body = body_of(call).meta["v41_region"].attrs, body_of(call)
    names = attrs["outputs"]
    critical, late = slice_of(body, attrs["critical"]), slice_of(body, attrs["coefficients"])
    assert {names[i] for i in attrs["critical"]} >= {"input"} and "extra" not in names
    assert {names[i] for i in attrs["coefficients"]} <= {"pre", "post", "comb"}
    gates = {node for node in body.graph.nodes if node.target is ops.aten.sigmoid.default or is_region(node)}
    assert gates and not gates & critical
    assert gates <= late
    assert len(critical & late) < len(critical)


# ---- the plain model's own boundaries, in the numbers that a config promises


def check_counts(config: V41Config) -> None:
    gm = trace(PlainStack(config), torch.randn(5, 8).bfloat16())
    apply(canonicalize, gm)
    sites, folded = config.boundary_sites(), apply(fold_sinkhorn, gm)
    assert len(folded) == sites.coefficient_sites and all(decision.applied for decision in folded)
    found = kinds(apply(outline_mhc, gm))
    wanted = {"mhc_boundary entry": sites.entry, "mhc_boundary seam": sites.seams, "mhc_exit": sites.exit}
    wanted |= {"mhc_boundary after_engram": sites.after_engram, "mhc_post": sites.after_engram}
    assert found == +Counter(wanted)


def test_counts_are_those_of_a_config_with_every_form() -> None:
    two = first_layers(V41Config.preset("tiny"), 2).replace(hc_sinkhorn_iters=2)
    sites = two.boundary_sites()
    assert min(sites.entry, sites.seams, sites.after_engram, sites.exit) > 0
    check_counts(two)


@pytest.mark.slow
@FEWEST
@given(configs(max_layers=2), st.integers(2, 4))
def test_counts_are_those_of_the_config(config: V41Config, iters: int) -> None:
    event(str(config.boundary_sites()))
    check_counts(config.replace(hc_sinkhorn_iters=iters))


def test_a_boundary_alone_is_a_seam() -> None:
    """Coefficients that come as inputs of the program are as good as predicted ones."""
    model = PlainStack(V41Config.preset("tiny"))
    n, T, D = model.config.hc_mult, 5, 8
    X, y = torch.randn(T, n, D).bfloat16(), torch.randn(T, D).bfloat16()
    rows = X, y, torch.rand(T, n), torch.rand(T, n, n), torch.rand(T, n)
    gm = trace(lambda X, y, C, B, A: boundary(X, y, C, B, A, model.mix(1)), *rows)
    apply(canonicalize, gm)
    apply(fold_sinkhorn, gm)
    decisions = check_pass(outline_mhc, gm)
    assert kinds(decisions) == {"mhc_boundary seam": 1}
    (call,) = regions(gm, "mhc_boundary")
    roles = region_of(call).attrs["operands"]
    assert Counter(roles) == Counter(["streams", "pending", "post", "comb", "carried"] + ["weight"] * 4)


@pytest.mark.slow
def test_flash_has_its_eighty_boundaries() -> None:
    flash = V41Config.preset("flash")
    sites = flash.boundary_sites()
    assert (sites.entry, sites.seams, sites.after_engram, sites.exit) == (1, 77, 2, 1)
    check_counts(flash)


# ---- flaws: what breaks one rule at one site, and no other

BASE = Stack(sites=3, engrams=(2,))  # entry, seam, post map alone, after_engram, exit
FLAWS: dict[tuple[str, str], tuple[str, int]] = {
    ("mhc_boundary", "one pre, one post and one comb are predicted"): ("another gate", 1),
    ("mhc_boundary", "the projection is divided by the RMS of the streams it reads"): ("the RMS of one stream", 1),
    ("mhc_boundary", "there are as many streams as pre, post and rows of comb"): ("a spare column", 1),
    ("mhc_boundary", "comb is one Sinkhorn chain"): ("changes eps", 1),
    ("mhc_boundary", "the streams are collapsed once, for one norm"): ("collapses twice", 1),
    ("mhc_boundary", "the collapse is sum_j pre_j X_j"): ("collapses with a rest", 1),
    ("mhc_boundary", "the carried pre comes from an earlier boundary"): ("its own pre", 1),
    ("mhc_boundary", "the post map is post_k y + sum_j comb_jk X_j"): ("mixes twice as much", 1),
    ("mhc_boundary", "no path leaves it and comes back"): ("comes back", 1),
    ("mhc_boundary", "nothing is written in between, and no effect reads it there"): ("an effect inside", 1),
    ("mhc_exit", "the streams are collapsed once, for one norm"): ("collapses twice", 3),
    ("mhc_exit", "the collapse is sum_j pre_j X_j"): ("collapses with a rest", 3),
    ("mhc_exit", "the carried pre comes from an earlier boundary"): ("its own pre", 3),
    ("mhc_exit", "the post map is post_k y + sum_j comb_jk X_j"): ("mixes twice as much", 3),
    ("mhc_exit", "no path leaves it and comes back"): ("comes back", 3),
    ("mhc_post", "the post map is post_k y + sum_j comb_jk X_j"): ("mixes twice as much", 2),
    ("mhc_post", "no path leaves it and comes back"): ("comes back", 2),
}


@pytest.mark.parametrize(("kind", "rule"), FLAWS)
def test_names_the_rule_and_leaves_the_other_sites_alone(kind: str, rule: str) -> None:
    decisions = check_pass(outline_mhc, prepared(replace(BASE, flaw=FLAWS[kind, rule])))
    assert [d.rule for d in decisions if not d.applied] == [rule]
    assert len(decisions) == expected(BASE).total()


@pytest.mark.parametrize("miss", NEAR_MISSES)
@pytest.mark.parametrize(("what", "rule"), [
    ("the collapse", "the collapse is sum_j pre_j X_j"),
    ("the mix", "the post map is post_k y + sum_j comb_jk X_j"),
])  # fmt: skip
def test_a_near_miss_is_refused(miss: str, what: str, rule: str) -> None:
    """However close: the streams are bf16, which 0.999 of them rounds to as well."""
    decisions = apply(outline_mhc, prepared(Stack(sites=1, flaw=(f"{miss} {what}", 1))))
    assert [d.rule for d in decisions if not d.applied] == [rule]


@pytest.mark.parametrize(("kind", "rule"), FLAWS)
def test_a_deleted_rule_lets_its_flaw_through(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = prepared(replace(BASE, flaw=FLAWS[kind, rule]))
    monkeypatch.setitem(module.RULES, kind, tuple(pair for pair in RULES[kind] if pair[0] != rule))
    with suppress(NotOutlinable, ValueError):  # damage is as good
        assert rule not in [d.rule for d in apply(outline_mhc, gm)]


@pytest.mark.slow
def test_stacks_fire_and_a_flaw_is_named_in_any_spelling() -> None:
    fired: list[bool] = []

    @FEWER
    @given(spellings, st.sampled_from([site for flaw in sorted(FLAWS) for site in (None, flaw)]))
    def draw(spelling: Spelling, site: tuple[str, str] | None) -> None:
        event(str(site))
        flaw = None if site is None else FLAWS[site]
        if flaw is not None and flaw[0] == "the RMS of one stream":
            spelling = replace(spelling, scaled="after")
        decisions = check_pass(outline_mhc, prepared(replace(BASE, flaw=flaw, spellings=(spelling,))))
        assert [d.rule for d in decisions if not d.applied] == ([] if site is None else [site[1]])
        fired.append(all(d.applied for d in decisions))

    draw()
    check_fired_share(fired)


def test_a_tap_in_between_waits_behind_the_region() -> None:
    decisions = check_pass(outline_mhc, prepared(replace(BASE, flaw=("a tap inside", 1))))
    assert kinds(decisions) == expected(BASE)
    assert all("extra" not in d.region.attrs["outputs"] for d in decisions if d.region)


def test_what_others_read_inside_becomes_an_extra_output() -> None:
    gm = prepared(BASE)
    scores = next(node for node in gm.graph.nodes if node.target is ops.aten.rsqrt.default and "u" in str(shape(node)))
    (results,) = gm.graph.output_node().args
    gm.graph.output_node().args = ([*results, scores],)  # type: ignore[misc]
    decisions = check_pass(outline_mhc, gm)
    assert kinds(decisions) == expected(BASE)
    assert next(d.region.attrs["outputs"].count("extra") for d in decisions if d.region) == 1


def test_streams_are_rounded_where_others_read_them_before_that() -> None:
    """The cast that the projection reads ends the map, though another result is the same sum in fp32."""
    gm = prepared(BASE)
    cast = next(node for node in gm.graph.nodes if is_narrowing(node) and len(shape(node)) == 3)
    (results,) = gm.graph.output_node().args
    gm.graph.output_node().args = ([*results, cast.args[0]],)  # type: ignore[misc]
    decisions = check_pass(outline_mhc, gm)
    assert kinds(decisions) == expected(BASE)
    assert next(d.region.attrs["outputs"].count("extra") for d in decisions[1:] if d.region) == 1


def test_every_rule_has_a_flaw() -> None:
    effect = "nothing is written in between, and no effect reads it there"
    wanted = {(kind, rule) for kind, rules in RULES.items() for rule, _ in rules}
    assert wanted - FLAWS.keys() == {("mhc_exit", effect), ("mhc_post", effect)}  # one rule, one predicate: shown above


def test_a_stack_without_boundaries_has_no_sites() -> None:
    gm = trace(lambda x: torch.tanh(x @ x.mT).softmax(-1), torch.randn(3, 4, 4))
    assert check_pass(outline_mhc, gm) == []


@FEWER
@given(st.sampled_from([BASE, replace(BASE, flaw=("changes eps", 1))]), st.integers(0, 2**32))
def test_meaningless_changes_change_nothing(stack: Stack, seed: int) -> None:
    plain = captured(stack)
    disturbed = disturb(copy_program(plain), seed)
    for rows_given in (1, 5):
        check_same_values(plain, disturbed, rows_given)
    outcomes = []
    for gm in (copy_program(plain), disturbed):
        apply(canonicalize, gm)
        decisions = [*apply(fold_sinkhorn, gm), *apply(outline_mhc, gm)]
        outcomes.append([(d.applied, d.rule, d.region) for d in decisions])
        check_same_values(plain, gm, 2)
    assert outcomes[0] == outcomes[1]
