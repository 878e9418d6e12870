"""outline_experts finds experts in any spelling, says what they are, and names the rule that a flaw breaks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.passes.test_outline_gate import count_of
from tests.strategies.experts import FLAWS, WEIGHS, Mixture, legal, places
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.moe import Fp4ExpertLinear, MoE, expert_ends, swiglu
from v41.model_def.quantization import dequantize_mxfp4, fake_quant_fp8
from v41.passes import experts_parts as parts
from v41.passes import outline_experts as module
from v41.passes.canonicalize import canonicalize
from v41.passes.experts_parts import Expert, expert_of, only_reader
from v41.passes.matching import aten, shape, unviewed
from v41.passes.outline_experts import KIND, RULES, Shared, Site, _weights_of, outline_experts
from v41.passes.outline_gate import KIND as GATE
from v41.passes.outline_gate import outline_gate
from v41.passes.pipeline import run_pipeline
from v41.passes.stored_weights import Weight
from v41.regions import region_of, regions
from v41.report import Decision

NIGHTLY = settings.default.max_examples > 100
FEWER = settings(max_examples=settings.default.max_examples // 4, phases=[Phase.generate])  # a trace takes a second
ALL = (  # every way to write a part, at least once
    Mixture(),
    Mixture("counts", "repeated", "scattered", "by hand", "where", together=True, shared="none", limit=None, k=3),
    Mixture("histogram", "gather", "index_add", clamp="where", shared="einsum", experts=7, k=3, limit=1.5),
    Mixture("comparison", "expanded", "scattered", shared="another limit", k=1, width=24, inner=32),
    Mixture(take="index_select", shared="behind the cast", together=True, experts=3),
)


@cache
def traced(mixture: Mixture) -> GraphModule:
    gm = trace(mixture.forward, *mixture.rows(), static=mixture.weights())
    apply(canonicalize, gm)
    return gm


def prepared(mixture: Mixture) -> GraphModule:
    return copy_program(traced(mixture))


def check(mixture: Mixture, decision: Decision) -> None:
    """That it became a region, which says what `mixture` is."""
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert {name: attrs[name] for name in mixture.wanted()} == mixture.wanted()
    assert sorted(role for role in attrs["operands"] if role != "constant") == mixture.roles()
    read = [role for role in attrs["operands"] if role in ("w1", "w3", "shared_w1", "shared_w3")]
    assert read == sorted(read, key=["w1", "w3", "shared_w1", "shared_w3"].index)  # as the mixture uses them


@pytest.mark.parametrize("mixture", ALL)
def test_every_spelling_is_found_and_says_what_it_is(mixture: Mixture) -> None:
    gm = prepared(mixture)
    check(mixture, *check_pass(outline_experts, gm, rows=(0, 5)))
    (call,) = regions(gm, KIND)
    assert len(region_of(call).attrs["operands"]) == len(call.args) - 2
    assert region_of(call).attrs["outputs"] == ("output",) and len(call.meta["val"]) == 1


def test_whoever_reads_the_result_may_look_at_it_otherwise() -> None:
    mixture = Mixture()

    def read(*given: Tensor) -> list[Tensor]:
        y = mixture.forward(*given)
        return [y, y.unsqueeze(1).mT.flatten(1).tanh(), y.float().mean(-1)]

    gm = trace(read, *mixture.rows(), static=mixture.weights())
    apply(canonicalize, gm)
    check(mixture, *check_pass(outline_experts, gm, rows=(2,)))


def test_legal_experts_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(legal if NIGHTLY else st.sampled_from(ALL), st.none() | st.sampled_from(sorted(SIMPLE)))
    def draw(mixture: Mixture, flaw: str | None) -> None:
        gm = prepared(mixture)
        if flaw is not None:
            FLAWS[flaw][1](places(gm))
        (decision,) = check_pass(outline_experts, gm, rows=(0, 2))
        if flaw is None:
            check(mixture, decision)
        assert decision.rule == (flaw and FLAWS[flaw][0])
        fired.append(decision.applied)

    draw()
    check_fired_share(fired)


# ---- rules

QUANTISED = "W2 reads unrounded rows"  # only a program that rounds rows has this flaw
SIMPLE = FLAWS.keys() - {QUANTISED, "another limit for W3"}  # the others do not mind how a mixture is written


def flawed(flaw: str) -> GraphModule:
    gm = copy_program(quantised()) if flaw == QUANTISED else prepared(Mixture())
    FLAWS[flaw][1](places(gm))
    return gm


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (decision,) = check_pass(outline_experts, flawed(flaw), rows=(2,))
    assert decision.rule == FLAWS[flaw][0]
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw][0]))
    try:
        (decision,) = apply(outline_experts, flawed(flaw))
    except (AssertionError, AttributeError, TypeError, KeyError):  # damage is as good
        return
    assert decision.rule != FLAWS[flaw][0]


def test_every_rule_has_a_flaw() -> None:
    assert {rule for rule, _ in FLAWS.values()} == dict(RULES).keys()


def test_a_view_of_an_operand_that_others_read_stays_outside() -> None:
    gm = prepared(Mixture())
    view = next(node for node in gm.graph.nodes if node.target is aten.view.default)
    output = gm.graph.output_node()
    output.args = ((*output.args[0], view),)
    (decision,) = check_pass(outline_experts, gm, rows=(2,))
    assert view in gm.graph.nodes
    assert decision.region is not None and decision.region.attrs["operands"].count("experts") == 2  # as it is, and flat


class Doubled(Mixture):
    """Its sum is added to itself, where others add a shared expert."""

    def with_shared(self, total: Tensor, x: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        return (total + total).to(x.dtype)


def test_a_sum_that_is_added_to_itself_has_no_shared_expert() -> None:
    mixture = Doubled(shared="none")
    check(mixture, *apply(outline_experts, prepared(mixture)))


def test_a_product_of_rows_that_come_in_order_is_no_site() -> None:
    held = [torch.randn(2, 8, 8).bfloat16(), torch.tensor([1, 2], dtype=torch.int32)]
    gm = trace(lambda x, W, ends: F.grouped_mm(x, W, offs=ends), torch.randn(4, 8).bfloat16(), static=held)
    assert apply(outline_experts, gm) == []


# ---- bugs that keep every value: what a region says of itself is wrong


def _swapped(expert: Expert, gate: Node, prefix: str) -> dict[Node, str]:
    swap = {"w1": "w3", "w3": "w1"}
    return {node: prefix + swap.get(role, role) for node, role in _weights_of(expert, gate, "").items()}


def _any_shared(site: Site) -> Shared:
    total = only_reader(site.routed)
    down = list(unviewed(next(arg for arg in total.all_input_nodes if arg is not site.routed)))[-1]
    expert = expert_of(site.order, down)
    return Shared(expert, expert.ups[0], total)


def _first_sum(order: Any, down: Node, drawn: Any, given: Any, wanted: Any) -> Node:
    return next(iter(down.users))


WRONG: dict[str, tuple[Any, str, Any, Mixture]] = {
    "W1 and W3 are mixed up": (module, "_weights_of", _swapped, Mixture()),
    "any expert is a shared one": (module.Site, "shared", property(_any_shared), Mixture(shared="another limit")),
    "all weights are packed": (parts, "read_weight", lambda order, node: Weight("mxfp4/32", node), Mixture()),
    "no limit is looked for": (Expert, "_numbers", lambda expert, given: iter(()), Mixture()),
    "a column is a table of picks": (parts, "_is_table", lambda node, n: len(shape(node)) == 2, Mixture("counts")),
    "outputs are not added": (module, "sum_of", _first_sum, Mixture()),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, mixture = WRONG[bug]
    check(mixture, *apply(outline_experts, prepared(mixture)))
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, AttributeError, TypeError, KeyError)):
        check(mixture, *apply(outline_experts, prepared(mixture)))


# ---- stored formats


@cache
def quantised(early: bool = False) -> GraphModule:
    """Packed experts and rows rounded to fp8, before they are gathered or after, without a shared expert."""
    linears = [Fp4ExpertLinear(4, 64, 64) for _ in range(3)]

    def fn(x: Tensor, weights: Tensor, experts: Tensor, *held: Tensor) -> Tensor:
        by = experts.flatten().argsort(stable=True)
        ends = expert_ends(experts.flatten()[by], 4)
        rows = fake_quant_fp8(x)[by // 2] if early else fake_quant_fp8(x[by // 2])
        W1, W3, W2 = (dequantize_mxfp4(W, scale).mT for W, scale in zip(held[::2], held[1::2], strict=True))
        a = swiglu(F.grouped_mm(rows, W1, offs=ends), F.grouped_mm(rows, W3, offs=ends), 10.0)
        a = fake_quant_fp8((a * weights.flatten()[by].unsqueeze(-1)).to(x.dtype))
        y = F.grouped_mm(a, W2, offs=ends)
        return y[by.argsort()].view(-1, 2, 64).float().sum(1).to(x.dtype)

    held = [tensor.data for linear in linears for tensor in (linear.weight, linear.scale)]
    gm = trace(fn, torch.randn(5, 64).bfloat16(), torch.rand(5, 2), torch.randint(0, 4, (5, 2)), static=held)
    apply(canonicalize, gm)
    return gm


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_packed_weights_and_rounded_rows_belong_to_the_region(early: bool) -> None:
    (decision,) = check_pass(outline_experts, copy_program(quantised(early)), rows=(0, 2))
    attrs = decision.region.attrs  # type: ignore[union-attr]
    assert (attrs["weights"], attrs["activations"]) == ("mxfp4/32", "fp8/32")
    packed = [f"{name}{part}" for name in ("w1", "w3", "w2") for part in ("", "_scale")]
    assert sorted(attrs["operands"]) == sorted(["input", "experts", "weights", *packed])


def test_a_decoding_of_another_meaning_stays_outside() -> None:
    gm = copy_program(quantised())
    half = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 0.5)
    half.update_arg(1, 0.25)
    (decision,) = apply(outline_experts, gm)
    assert decision.rule == FLAWS[QUANTISED][0]  # two are packed, of the third the decoding counts as the weight


# ---- the plain model, and others


def step(config: V41Config, layers: int) -> GraphModule:
    blocks = nn.ModuleList(MoE(config) for _ in range(layers))

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = x + block(x)
        return x

    return trace(forward, torch.randn(5, config.hidden_size).bfloat16())


def found_in(config: V41Config, layers: int) -> dict[str, Any]:
    """The attributes of the one region that all layers of a step share."""
    gm, runs = run_pipeline(step(config, layers), check=True, strict=True)
    gate, run = (run for run in runs if run.name in ("outline_gate", "outline_experts"))
    assert (gate.applied, run.applied, run.refused) == (1, 1, 0)
    assert count_of(gm, KIND) == count_of(gm, GATE) == layers
    attrs = run.decisions[0].region.attrs  # type: ignore[union-attr]
    sizes = config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
    assert tuple(attrs[name] for name in ("experts", "k", "hidden", "inner")) == sizes
    assert (attrs["limit"], attrs["shared_inner"]) == (config.swiglu_limit, config.moe_intermediate_size)
    return attrs


@pytest.mark.slow
def test_the_plain_model_has_experts_in_every_layer() -> None:
    """Layers share one traced subgraph, so the pass decides once."""
    attrs = found_in(V41Config.preset("tiny").replace(num_experts_per_tok=3), 2)
    assert {attrs[name] for name in ("weights", "activations", "shared_weights")} == {"bfloat16"}


@pytest.mark.slow
def test_the_formats_of_a_release_are_read() -> None:
    config = V41Config.preset("tiny").replace(expert_dtype="fp4", weight_dtype="fp8")
    attrs = found_in(config, 1)
    assert (attrs["weights"], attrs["activations"]) == ("mxfp4/32", "fp8/32")
    assert (attrs["shared_weights"], attrs["shared_activations"]) == ("fp8/32x32", "fp8/32")


class OtherMoE(nn.Module):
    """As Mixtral and Qwen3-MoE have it: a softmax, the weights behind W2, all in bf16."""

    def __init__(self) -> None:
        super().__init__()
        held = [(4, 16), (4, 16, 16), (4, 16, 8)]
        self.gate, self.gate_up, self.down = (nn.Parameter(torch.randn(shape).bfloat16()) for shape in held)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = F.linear(x, self.gate).float().softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        by = experts.flatten().argsort()
        ends = torch.histc(experts.flatten().float(), 4, 0, 3).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[by // 2], self.gate_up.mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        return self.combine(y * weights.flatten()[by].unsqueeze(-1).to(y.dtype), by)

    def combine(self, y: Tensor, by: Tensor) -> Tensor:
        return y[by.argsort()].view(-1, 2, y.shape[1]).sum(1)


class GroupedMoE(OtherMoE):
    """As DeepSeek-V3 has it: sigmoid scores, of the best groups of experts alone, and an index_add."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.gate.float()).sigmoid()
        groups = scores.view(-1, 2, 2).sum(-1)
        best = torch.zeros_like(groups).scatter(1, groups.topk(1, -1).indices, 1).bool()
        kept = scores.masked_fill(~best.repeat_interleave(2, -1), 0)
        experts = kept.topk(2, -1, sorted=False).indices
        weights = scores.gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, experts

    def combine(self, y: Tensor, by: Tensor) -> Tensor:
        return torch.zeros(len(by) // 2, y.shape[1], dtype=y.dtype).index_add(0, by // 2, y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OtherMoE, GroupedMoE])
def test_other_models_are_refused_by_name(kind: type[OtherMoE]) -> None:
    model = kind().requires_grad_(False)
    gm = trace(lambda x: x + model(x), torch.randn(5, 16).bfloat16())
    apply(canonicalize, gm)
    (gate,) = check_pass(outline_gate, gm, rows=(2,))
    (experts,) = check_pass(outline_experts, gm, rows=(2,))
    assert (gate.applied, experts.rule) == (False, WEIGHS)
