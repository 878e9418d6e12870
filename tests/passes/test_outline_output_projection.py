"""outline_output_projection finds it in any spelling, says what it is, and names the rule that a flaw breaks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.output_projections import FLAWS, Projection, flawed, legal
from tests.strategies.tracing import trace
from v41.model_def.attention import Attention
from v41.model_def.config import V41Config
from v41.passes import outline_output_projection as module
from v41.passes.canonicalize import canonicalize
from v41.passes.matching import aten, fake
from v41.passes.outline_output_projection import KIND, RULES, find_sites, outline_output_projection
from v41.passes.sites import broken_rule
from v41.regions import regions

FEWER = settings(max_examples=settings.default.max_examples // 4, phases=[Phase.generate])  # shrinking takes minutes
PLAIN = Projection()
PACKED = Projection("matmul", "matmul", "in first", "fp8", "fp8", packed=True, groups=4)
WRITTEN = "nothing is written in between, and no effect reads it there"


@cache
def traced(projection: Projection) -> GraphModule:
    torch.manual_seed(0)
    fn, rows, weights = projection.to_trace()
    gm = trace(fn, rows, static=weights)
    apply(canonicalize, gm)
    return gm


def prepared(projection: Projection) -> GraphModule:
    return copy_program(traced(projection))


def check(projection: Projection) -> bool:
    """Whether it became a region; it must say what `projection` is, or name the rule of its flaw."""
    gm = prepared(projection)
    (decision,) = check_pass(outline_output_projection, gm)
    if projection.flaw:
        assert decision.rule == FLAWS[projection.flaw], decision
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert {name: attrs[name] for name in projection.wanted()} == projection.wanted()
    (call,) = regions(gm, KIND)
    assert len(attrs["operands"]) == len(call.args) - 2
    roles = [role for role in attrs["operands"] if role not in ("size", "constant")]
    assert sorted(roles) == sorted(["heads", "down", "up", *["up_scales"] * projection.packed])
    assert {node.target for node in gm.graph.nodes}.isdisjoint((aten.bmm.default, aten.mm.default))
    return True


@pytest.mark.parametrize("projection", [PLAIN, PACKED])
def test_two_spellings_are_projections(projection: Projection) -> None:
    assert check(projection)


@pytest.mark.slow
def test_legal_spellings_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.one_of(legal, legal, flawed))
    def draw(projection: Projection) -> None:
        fired.append(check(projection))

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str) -> None:
    (site,) = find_sites(traced(Projection(flaw=flaw)))
    broken = broken_rule(site, RULES)
    assert broken is not None and broken[0] == FLAWS[flaw]
    try:
        without = broken_rule(site, [pair for pair in RULES if pair[0] != FLAWS[flaw]])
    except (AssertionError, AttributeError, TypeError, ValueError):  # damage is as good
        return
    assert without is None or without[0] != FLAWS[flaw]


def test_a_write_in_between_is_refused() -> None:
    gm = prepared(PLAIN)
    (site,) = find_sites(gm)
    rows, weight, *_ = (node for node in gm.graph.nodes if node.op == "placeholder" and fake(node) is not None)
    with gm.graph.inserting_after(site.down.product):
        write = gm.graph.call_function(aten.copy_.default, (weight, rows))
        write.meta["val"] = weight.meta["val"]
    assert broken_rule(site, RULES) == (WRITTEN, write)
    assert broken_rule(site, [pair for pair in RULES if pair[0] != WRITTEN]) is None


def test_every_rule_has_a_flaw() -> None:
    assert {*FLAWS.values(), WRITTEN} == dict(RULES).keys()


WRONG: dict[str, tuple[Any, str, Any]] = {  # bugs that keep every value: what a region says of itself is wrong
    "any rounding is none": (module.Factor, "rounding", property(lambda factor: (factor.rows, None))),
    "weights are as they are": (module, "read_weight", lambda order, node: module.Weight("bfloat16", node)),
    "axes are not asked": (module.Site, "axes", ("grd", "or")),
    "widths are those of heads": (module.Site, "sizes", (4, 32, 64, 64)),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises(AssertionError):
        check(PACKED)


# ---- other programs, and the plain model


def test_two_layers_without_groups_are_no_site() -> None:
    a, b = torch.randn(8, 6), torch.randn(4, 8)
    gm = trace(lambda x, a, b: (x @ a.T) @ b.T, torch.randn(5, 6), static=[a, b])
    assert apply(outline_output_projection, gm) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_plain_model_projects_once_a_layer(dtype: str) -> None:
    config = V41Config.preset("tiny").replace(weight_dtype=dtype)
    layers = [Attention(config, role) for role in config.roles[:2]]
    heads, width = config.num_attention_heads, config.head_dim

    def forward(o: Tensor) -> list[Tensor]:
        return [layer.project(o) for layer in layers]

    gm = trace(forward, torch.randn(5, heads, width).bfloat16())
    apply(canonicalize, gm)
    decisions = check_pass(outline_output_projection, gm, rows=(2,))
    assert [decision.applied for decision in decisions] == [True] * len(layers)
    for call, decision in zip(regions(gm, KIND), decisions, strict=True):
        attrs = decision.region.attrs  # type: ignore[union-attr]
        wanted = config.o_groups, config.o_lora_rank, heads * width // config.o_groups, config.hidden_size
        assert tuple(attrs[name] for name in ("groups", "rank", "width", "hidden")) == wanted
        assert attrs["quantised"] == (None, ("fp8", 32) if dtype == "fp8" else None)
        assert attrs["formats"] == ("bfloat16", "fp8/32x32" if dtype == "fp8" else "bfloat16")
        assert len(call.args) - 2 == len(attrs["operands"])
