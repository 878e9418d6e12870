"""outline_compressor finds a pooling in any spelling, with what follows, and names the rule that a flaw breaks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.compressors import CUTS, FLAWS, SOFTMAXES, SUMS, Pooling, flawed, legal
from tests.strategies.norms import together, trace_as_is
from tests.strategies.tracing import trace
from v41.model_def.compressor import Compressor
from v41.model_def.config import V41Config
from v41.model_def.quantization import FP4_RECORD
from v41.model_def.rope import Turn, rotate
from v41.passes import norms
from v41.passes import outline_compressor as module
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_compressor import KIND, RULES, outline_compressor
from v41.passes.outline_norm_quantise import outline_norm_quantise
from v41.regions import regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 6, phases=[Phase.generate])  # each is three poolings
FIRST = Pooling(rope="the model's", format="fp4 record")
ALL = (
    Pooling("by hand", "einsum", "select", 4, rope="the model's", format="fp4 record"),
    Pooling("without a maximum", "loop", "apart", eps=1e-6),
    Pooling("softmax", "sum of the swapped", normed=False),
)


@cache
def traced(poolings: tuple[Pooling, ...], symbolic: bool) -> GraphModule:
    """With as many rows as come, or with five: Dynamo and sizes that are symbols make a trace ten times as slow."""
    fn, moving, still = together(poolings)
    gm = trace(fn, *moving, static=still) if symbolic else trace_as_is(fn, [*moving, *still])
    apply(canonicalize, gm)
    return gm


def prepared(*poolings: Pooling, symbolic: bool = False) -> GraphModule:
    return copy_program(traced(poolings, symbolic))


def check(decision: Decision, pooling: Pooling) -> bool:
    """Whether `pooling` became a region; it must say what it is, or name the rule of its flaw."""
    if pooling.flaw:
        assert decision.rule == FLAWS[pooling.flaw]
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    wanted: dict[str, Any] = {"ratio": pooling.ratio, "normed": pooling.normed, "width": pooling.width}
    if pooling.normed:
        wanted |= {"eps": pooling.eps, "weighted": True, "then": pooling.then}
    assert {name: attrs.get(name) for name in wanted} == wanted
    tables = {"cos", "sin"} if pooling.rope else set()
    assert set(attrs["operands"]) - {"values", "gates"} == {"tokens", *["weight"] * pooling.normed, *tables}
    end = "quantised" if pooling.format else "turned" if pooling.rope else "normed"
    assert set(attrs["outputs"]) == ({"normed", end} if pooling.normed else {"pooled"})
    return True


def check_all(poolings: Sequence[Pooling], *, symbolic: bool = False) -> list[bool]:
    gm = prepared(*poolings, symbolic=symbolic)
    decisions = check_pass(outline_compressor, gm, (0, 1, 5) if symbolic else (5,))
    assert len(decisions) == len(poolings)
    fired = [check(decision, pooling) for decision, pooling in zip(decisions, poolings, strict=True)]
    assert len(list(regions(gm, KIND))) == sum(fired)
    return fired


def test_every_spelling_is_found() -> None:
    rows = (FIRST, *ALL)
    assert {row.softmax for row in rows} == set(SOFTMAXES) and {row.sum for row in rows} == set(SUMS)
    assert {row.cut for row in rows} == set(CUTS)
    assert all(check_all([FIRST], symbolic=True)) and all(check_all(ALL))


def test_legal_poolings_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.tuples(legal, flawed, legal))
    def draw(poolings: tuple[Pooling, ...]) -> None:
        fired.extend(check_all(poolings))

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Pooling(flaw=name, format="fp4 record") for name in FLAWS)
    at = list(FLAWS).index(flaw)
    assert [decision.rule for decision in apply(outline_compressor, prepared(*rows))] == list(FLAWS.values())
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw]))
    try:
        decisions = apply(outline_compressor, prepared(*rows))
    except (AssertionError, KeyError):  # damage is as good
        return
    assert decisions[at].rule != FLAWS[flaw]


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == dict(RULES).keys()


def others(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Softmaxes of other models: over channels, rows or a context, one weight for all channels."""
    p = y.mean(-1).softmax(1)  # [T, 4]
    pooled = [(y.softmax(axis) * (y + 1)).sum(axis) for axis in (0, 2)] + [(z.softmax(1) * (z + 1)).sum(1)]
    return [x.softmax(-1), (p[..., None] * y).sum(1), y.softmax(1), *pooled]


def test_other_softmaxes_are_no_sites() -> None:
    gm = trace_as_is(others, [torch.randn(5, 8), torch.randn(5, 4, 8), torch.randn(5, 70, 8)])
    apply(canonicalize, gm)
    assert check_pass(outline_compressor, gm, (5,)) == []


WRONG: dict[str, tuple[Any, str, Any]] = {  # bugs that keep every value: what a region says of itself is wrong
    "no norm is looked for": (module, "norm_of", lambda order, scaling: None),
    "tokens are not told": (module, "_pooled", lambda site: ()),
    "the group is the row": (module, "shape", lambda node: (5, 32, 32)),
    "a norm ends with its product": (norms, "end_of_norm", lambda node, is_weight: (node, None)),
    "the step behind is forgotten": (norms.Tail, "then", ()),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises((AssertionError, ValueError)):
        (decision,) = apply(outline_compressor, prepared(FIRST))
        check(decision, FIRST)


def test_the_compressor_of_the_plain_model() -> None:
    """Its norm is the pooling's; what stores a latent follows in the same region, and no norm is left."""
    config = V41Config.preset("tiny")
    layer = next(i for i in config.kv_source_layer_ids if config.compress_ratios[i] == 2)
    compressor = Compressor(config, layer)
    before = torch.randn(5, 2, config.head_dim)
    compressor.before = lambda own, step: step + own * 0.5  # type: ignore[method-assign, assignment, return-value, operator]

    def store(x: Tensor, before: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        latent = compressor(x, before)  # type: ignore[arg-type]
        return [latent @ latent.mT, FP4_RECORD.encode(rotate(latent, Turn(cos, sin)))]

    angles = torch.rand(5, config.qk_rope_head_dim // 2)
    x = torch.randn(5, config.hidden_size).bfloat16()
    gm = trace(store, static=[x, before, angles.cos(), angles.sin()])
    apply(canonicalize, gm)
    (decision,) = check_pass(outline_compressor, gm, (5,))
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert (attrs["ratio"], attrs["width"], attrs["eps"]) == (2, config.head_dim, config.rms_norm_eps)
    assert attrs["then"] == ("rope", "fp4_record") and attrs["outputs"] == ("normed", "quantised")
    assert attrs["operands"] == ("tokens", "tokens", "weight", "cos", "sin")
    assert apply(outline_norm_quantise, gm) == []
