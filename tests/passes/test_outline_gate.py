"""outline_gate finds a router in any spelling, reads its numbers off the graph, and names the rule a flaw breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.compiler import nested_compile_region
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.gates import FLAWS, Router, flawed, legal
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.moe import Gate
from v41.passes import outline_gate as module
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_gate import KIND, RULES, outline_gate
from v41.passes.pipeline import run_pipeline
from v41.regions import body_of, invoke_subgraph, is_region, regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 12, phases=[Phase.generate])  # shrinking takes minutes
THREE = (
    Router(),
    Router("einsum", "by hand", "stable argsort", "axis put back", experts=7, k=3, eps=1e-6, scaling=2.5),
    Router("matmul", "sigmoid", "topk", "reciprocal", biased=False, k=4, scaling=1.0),
)


SMALL = Router("matmul", "sigmoid", "topk")  # few nodes, quick to trace


@cache
def traced(router: Router) -> GraphModule:
    fn, rows, weights = router.to_trace()
    gm = trace(fn, rows, static=weights)
    apply(canonicalize, gm)
    return gm


def prepared(router: Router) -> GraphModule:
    return copy_program(traced(router))


def wanted(router: Router) -> dict[str, Any]:
    """What the region of `router` says of itself, as the router was asked for."""
    return {
        "activation": "sigmoid" if router.activation == "sigmoid" else "sqrt_softplus",
        "k": router.k,
        "experts": router.experts,
        "ties": "any" if router.choice == "topk" else "lower_index",
        "eps": None if router.norm == "none" else router.eps,
        "scaling": router.scaling,
    }


def check(router: Router, run: Callable[..., list[Decision]] = check_pass) -> bool:
    """Whether the gate became a region; it must say what `router` is, or name the rule of its flaw."""
    gm = prepared(router)
    (decision,) = run(outline_gate, gm)
    if router.flaw:
        assert decision.rule == FLAWS[router.flaw]
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert {name: attrs[name] for name in wanted(router)} == wanted(router)
    (call,) = regions(gm, KIND)
    roles = [role for role in attrs["operands"] if role != "constant"]
    assert sorted(roles) == sorted(["input", "weight", *["bias"] * router.biased])
    assert len(attrs["operands"]) == len(call.args) - 2
    types = dict(zip(attrs["outputs"], (value.dtype for value in call.meta["val"]), strict=True))
    assert types == {"weights": torch.float32, "experts": torch.int64}
    return True


@pytest.mark.parametrize("router", THREE)
def test_three_spellings_are_gates(router: Router) -> None:
    assert check(router)


def test_legal_gates_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(legal, flawed)
    def draw(one: Router, other: Router) -> None:
        fired.extend(map(check, (one, other)))

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "unique keys" if flaw == "ties to the higher index" else SMALL.choice
    router = replace(SMALL, choice=keys, flaw=flaw)
    assert not check(router, partial(check_pass, rows=(2,)))
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw]))
    try:
        (decision,) = apply(outline_gate, prepared(router))
    except (AssertionError, AttributeError, TypeError):  # damage is as good
        return
    assert decision.rule != FLAWS[flaw]


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == dict(RULES).keys()


def test_a_choice_without_scores_is_no_site() -> None:
    gm = trace(lambda x: x.topk(2, dim=-1).indices, torch.randn(5, 4))
    assert check_pass(outline_gate, gm) == []


WRONG: dict[str, tuple[str, Any, Router]] = {  # bugs that keep every value: what a region says of itself is wrong
    "the worst are as good": ("_picks_best", lambda site, given: True, replace(SMALL, flaw="the worst")),
    "a bias is forgotten": ("bias", None, SMALL),
    "the scaling is forgotten": ("weights", property(lambda site: (site.picked, None, 1.0)), SMALL),
    "any activation is one": ("activation", "sigmoid", replace(SMALL, flaw="a softmax")),
    "ties are not asked": ("ties", "lower_index", SMALL),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, router = WRONG[bug]
    check(router, apply)
    monkeypatch.setattr(module.Site, name, wrong)
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        check(router, apply)


# ---- the plain model


def count_of(gm: GraphModule, kind: str) -> int:
    """Regions of `kind` that a step runs, through the subgraphs that layers share."""
    calls = [node for node in gm.graph.nodes if node.target is invoke_subgraph]
    return sum(is_region(call, kind) + count_of(body_of(call), kind) for call in calls)


class Layer(torch.nn.Module):
    """What the gate of the model decides, in a subgraph that layers share; test_outline_experts.py has whole layers."""

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.gate = Gate(config)

    @nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.gate(x)
        return x * weights.sum(-1, keepdim=True) + experts.sum(-1, keepdim=True)


def test_the_plain_model_has_a_gate_a_layer() -> None:
    """Layers share one traced subgraph, so the pass decides once."""
    config = V41Config.preset("tiny").replace(num_experts_per_tok=3)
    layers = torch.nn.ModuleList(Layer(config) for _ in range(2))

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    gm = trace(forward, torch.randn(5, config.hidden_size))
    gm, runs = run_pipeline(gm, check=True, strict=True)
    (run,) = (run for run in runs if run.name == outline_gate.__name__)
    assert (run.applied, run.refused) == (1, 0)
    assert count_of(gm, KIND) == len(layers)
    attrs = run.decisions[0].region.attrs  # type: ignore[union-attr]
    numbers = config.num_experts_per_tok, config.n_routed_experts, config.routed_scaling_factor, 1e-20
    assert (attrs["k"], attrs["experts"], attrs["scaling"], attrs["eps"]) == numbers
