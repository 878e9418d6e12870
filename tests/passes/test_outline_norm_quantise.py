"""outline_norm_quantise finds a norm in any spelling, with what follows, and names the rule that a flaw breaks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.norms import (
    FLAWS,
    FORMATS,
    NEARLY,
    ROPES,
    ROTARY,
    SCALES,
    Row,
    flawed,
    legal,
    together,
    trace_as_is,
)
from tests.strategies.tracing import trace
from v41.model_def.attention import Attention
from v41.model_def.config import V41Config
from v41.model_def.quantization import FP4_RECORD, MXFP4_RECORD
from v41.model_def.rope import Turn, rotate
from v41.passes import norms, number_formats, row_tails
from v41.passes import outline_norm_quantise as module
from v41.passes.canonicalize import canonicalize
from v41.passes.number_formats import Format
from v41.passes.outline_norm_quantise import KIND, RULES, outline_norm_quantise
from v41.regions import region_of, regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 6, phases=[Phase.generate])  # each is three norms
ALL = (  # every rope and every format once
    Row(rope="the model's", format="fp8 apart", also="normed"),
    Row("power", "sum over width", "reciprocal", "none", "backwards", "fp4 record", "normed", 512, 1e-6),
    Row("product", "mean, axis put back", "sqrt", "behind a rounding", "strided", "mxfp4 record by sums", "turned"),
    Row(division="rsqrt first", rope="halves", format="fp8 by logarithm", also="normed", width=32),
)
REST = tuple(Row(format=name) for name in FORMATS if name not in {row.format for row in ALL})


@cache
def traced(rows: tuple[Row, ...], symbolic: bool) -> GraphModule:
    """With as many rows as come, or with five: Dynamo and sizes that are symbols make a trace ten times as slow."""
    fn, moving, still = together(rows)
    gm = trace(fn, *moving, static=still) if symbolic else trace_as_is(fn, [*moving, *still])
    apply(canonicalize, gm)
    return gm


def prepared(*rows: Row, symbolic: bool = False) -> GraphModule:
    return copy_program(traced(rows, symbolic))


def check(decision: Decision, row: Row) -> bool:
    """Whether `row` became a region; it must say what `row` is, or name the rule of its flaw."""
    if row.flaw:
        assert decision.rule == FLAWS[row.flaw]
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    wanted = {"width": row.width, "eps": row.eps, "weighted": row.weight != "none", "then": row.then}
    assert {name: attrs.get(name) for name in wanted} == wanted
    if row.rope is not None:
        where = "first" if row.rope == "strided" else "last"
        pairs = (row.width, "halves") if row.rope == "halves" else (ROTARY, "adjacent")
        assert attrs["rope"] == (*pairs, where)
    if row.format in FORMATS:
        name, _, group = FORMATS[row.format]
        assert attrs["format"]["group"] == (group or row.width)
        assert (attrs["format"]["bytes"] is not None) is name.endswith("_record")
    ends = [name for name, also in (("normed", row.also == "normed"), ("turned", row.also == "turned")) if also]
    last = "quantised" if row.format in FORMATS else "turned" if row.rope is not None else "normed"
    scales = {"scales"} if row.then and row.then[-1].endswith("_apart") else set()
    found = {end if row.rope or end == "normed" else "normed" for end in ends}
    assert sorted(attrs["outputs"]) == sorted(found | {last} | scales)
    tables = {"cos", "sin"} if row.rope is not None else set()
    assert set(attrs["operands"]) == {"input", *["weight"] * (row.weight != "none"), *tables}
    return True


def of_rows(rows: Sequence[Row], decisions: Sequence[Decision]) -> list[Decision]:
    """One for each row: of what is quantised otherwise the refusal, behind the norm, which is a region all the same."""
    left, found = list(decisions), []
    for row in rows:
        found.append(left.pop(0))
        if FLAWS.get(row.flaw or "") == SCALES:
            norm, found[-1] = found[-1], left.pop(0)
            assert norm.region is not None and "quantised" not in norm.region.attrs["outputs"]
    assert not left
    return found


def check_all(rows: Sequence[Row], *, symbolic: bool = False) -> list[bool]:
    gm = prepared(*rows, symbolic=symbolic)
    decisions = of_rows(rows, check_pass(outline_norm_quantise, gm, (0, 1, 5) if symbolic else (5,)))
    fired = [check(decision, row) for decision, row in zip(decisions, rows, strict=True)]
    for call in regions(gm, KIND):
        assert len(call.args) - 2 == len(region_of(call).attrs["operands"])
    return fired


def test_every_rope_and_format_is_found() -> None:
    rows = (*ALL, *REST)
    assert {row.rope for row in rows} == {None, *ROPES} and {row.format for row in rows} == set(FORMATS)
    assert all(check_all(ALL[:1], symbolic=True)) and all(check_all([*ALL[1:], *REST]))


def test_what_is_no_format_stays_outside_and_nothing_is_said_of_it() -> None:
    assert all(check_all([Row(format=name) for name in NEARLY]))


def test_legal_norms_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.tuples(legal, flawed, legal))
    def draw(rows: tuple[Row, ...]) -> None:
        fired.extend(check_all(rows))

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Row(flaw=name, format="fp8") for name in FLAWS)
    at = list(FLAWS).index(flaw)
    decisions = of_rows(rows, apply(outline_norm_quantise, prepared(*rows)))
    assert [decision.rule for decision in decisions] == list(FLAWS.values())
    without = {kind: tuple(pair for pair in rules if pair[0] != FLAWS[flaw]) for kind, rules in RULES.items()}
    monkeypatch.setattr(module, "RULES", without)
    try:
        decisions = of_rows(rows, apply(outline_norm_quantise, prepared(*rows)))
    except (AssertionError, KeyError):  # damage is as good
        return
    assert decisions[at].rule != FLAWS[flaw]


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == {rule for rules in RULES.values() for rule, _ in rules}


def others(x: Tensor, w: Tensor) -> list[Tensor]:
    """What other models do to rows: no RMSNorm among it."""
    f = x.float()
    return [
        torch.nn.functional.layer_norm(f, (64,)),
        torch.nn.functional.normalize(f),
        f / (f.abs().mean(-1, keepdim=True) + 1e-6),
        f * torch.rsqrt((f * f).mean(0, keepdim=True) + 1e-6),  # over the rows
        f * (f.square().mean(-1, keepdim=True) + 1e-6).sqrt(),  # multiplied by the root mean square
        (f.square().mean(-1, keepdim=True) + 1e-6).sqrt() / f,
        f.softmax(-1) * torch.rsqrt(w.square().mean() + 1e-6),
        (h := f.view(5, 4, 16)) * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6),  # of each head
    ]


def test_other_norms_are_no_sites() -> None:
    gm = trace_as_is(others, [torch.randn(5, 64), torch.randn(64)])
    apply(canonicalize, gm)
    assert [decision.rule for decision in check_pass(outline_norm_quantise, gm, (5,))] == []


ONE = Row(rope="the model's", format="fp8")
APART = Row(format="fp32 scales")
UNROUNDED = Row(flaw="scales before they are rounded")


def first(nodes: list[Node], source: Node, result: Node, forms: Collection[str]) -> Format | None:
    return number_formats.formats_of(source, result, forms)[0]


def any_scales(nodes: list[Node], source: Node, result: Node, forms: Collection[str]) -> Format | None:
    if "scales" in forms:
        return Format("fp8", 64, "scales")
    return number_formats.read_format(nodes, source, result, forms)


WRONG: dict[str, tuple[Row, Any, str, Any]] = {  # bugs that keep every value: what a region says of itself is wrong
    "any format is the first": (ONE, row_tails, "read_format", first),
    "any scales are those of the values": (UNROUNDED, row_tails, "read_format", any_scales),
    "scales are no result": (APART, row_tails.Tail, "scales", ()),
    "no turn is looked for": (ONE, row_tails, "rotation_from", lambda order, source, width: None),
    "the walk ends early": (ONE, row_tails, "REACH", 12),
    "a norm ends with its product": (ONE, norms, "end_of_norm", lambda node, is_weight: (node, None)),
    "all that is read is the row": (ONE, module, "role_of", lambda arg, roles: "input"),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, *planted = WRONG[bug]
    monkeypatch.setattr(*planted)
    (decision,) = apply(outline_norm_quantise, prepared(row))
    with pytest.raises(AssertionError):
        check(decision, row)


def test_what_the_bugs_are_planted_in_is_found() -> None:
    assert check_all([ONE, APART, UNROUNDED]) == [True, True, False]


def gated(x: Tensor, gate: Tensor, w: Tensor) -> list[Tensor]:
    """Multiplied with numbers of each row, and with one number: neither is a weight of the norm."""
    f = x.float()
    normed = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)
    return [normed * gate, (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-5)) * w[:1]]


def test_what_a_row_is_multiplied_with_is_a_weight_if_all_rows_share_it_and_each_channel_has_its_own() -> None:
    gm = trace_as_is(gated, [*torch.randn(2, 5, 64), torch.randn(64)])
    apply(canonicalize, gm)
    decisions = check_pass(outline_norm_quantise, gm, (5,))
    assert [decision.region and decision.region.attrs["weighted"] for decision in decisions] == [False, False]


def test_what_makes_the_row_stays_outside() -> None:
    def tripled(x: Tensor) -> Tensor:
        f = (x * 3).float()
        return f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)

    gm = trace_as_is(tripled, [torch.randn(5, 64).bfloat16()])
    apply(canonicalize, gm)
    (decision,) = check_pass(outline_norm_quantise, gm, (5,))
    (call,) = regions(gm, KIND)
    assert decision.applied and [arg.args[1] for arg in call.args[2:]] == [3]


# ---- the plain model


class Norms(torch.nn.Module):
    """All of the plain model that norms a row outside of boundaries: queries and keys, entries, index keys."""

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.layer = Attention(config, config.roles[config.kv_source_layer_ids[-1]])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        by, indexer, compressor = Turn(cos, sin), self.layer.indexer, self.layer.compressor
        latent = compressor.norm(compressor.wkv(x))  # type: ignore[union-attr]
        keys = MXFP4_RECORD.encode(rotate(indexer.k_norm(indexer.wk(latent)), by))  # type: ignore[union-attr]
        return [*self.layer.enter(x, by), *self.layer.enter(-x, by), keys, FP4_RECORD.encode(rotate(latent, by))]


def test_the_norms_of_the_plain_model() -> None:
    """Queries and keys of several calls share one subgraph, and are decided once."""
    config = V41Config.preset("tiny").replace(weight_dtype="fp8")
    angles = torch.rand(5, config.qk_rope_head_dim // 2)
    gm = trace(Norms(config), static=[torch.randn(5, config.hidden_size).bfloat16(), angles.cos(), angles.sin()])
    apply(canonicalize, gm)
    decisions = check_pass(outline_norm_quantise, gm, (5,))
    found = [decision.region.attrs for decision in decisions if decision.region is not None]
    assert [each["then"] for each in found] == [
        ("fp8",),
        ("rope", "fp8_record"),
        ("rope", "fp4_record"),
        ("rope", "mxfp4_record"),
    ]
    assert len(decisions) == 4 and all(each["eps"] == config.rms_norm_eps for each in found)
    assert [each["outputs"] for each in found] == [("normed", "quantised"), ("quantised",), ("normed", "quantised"),
                                                   ("quantised",)]  # fmt: skip
    assert {each["rope"] for each in found} == {None, (config.qk_rope_head_dim, "adjacent", "last")}
