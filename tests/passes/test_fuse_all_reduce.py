"""fuse_all_reduce fuses every legal sum with what reads it, names the rule a flawed one breaks, and changes no bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import apply, check_fired_share, check_moves_only, check_pass, check_plan_holds, copy_program
from tests.strategies.ranks import ranks
from tests.strategies.reduced import FLAWS, RANKS, SPELLED, Norms, Reduced, Sum, added, norms, prepared, stacks
from tests.strategies.tracing import trace
from v41.passes import fuse_all_reduce as module
from v41.passes import reduced_parts, spans
from v41.passes.analysis.effects import effect_of
from v41.passes.canonicalize import canonicalize
from v41.passes.fuse_all_reduce import RULES, fuse_all_reduce
from v41.passes.open_reduced import open_reduced
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT, run_pipeline
from v41.passes.same_values import random_inputs, same_bits
from v41.passes.structure import structure_key
from v41.regions import REDUCED, behind_sum, body_of, flatten, invoke_subgraph, neighbour_of, region_of, regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 6, phases=[Phase.generate])
FEW = settings(max_examples=settings.default.max_examples // 12, phases=[Phase.generate])  # a stack takes a second
MIXED = Norms((Sum("in fp32", "the sum"), Sum("in place"), Sum("through a view")))
STACK = Reduced(sites=3, engrams=(2,), sums=(Sum(), Sum("in fp32", "the sum"), Sum("in place")))


@pytest.fixture(autouse=True)
def of_several() -> Iterator[None]:
    with ranks(RANKS):
        yield


@cache
def traced(program: Norms | Reduced) -> GraphModule:
    return prepared(program)


def fused(program: Norms | Reduced) -> tuple[GraphModule, list[Decision]]:
    gm = copy_program(traced(program))
    decisions = check_pass(fuse_all_reduce, gm, (5,))
    for call in regions(gm, REDUCED):
        check_border(call)
    return gm, decisions


def check_border(call: Node) -> None:
    """What the region says of itself is true of its body, and `behind_sum` gives what the body gives."""
    body, attrs = body_of(call), region_of(call).attrs
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    (results,) = body.graph.output_node().args
    inner = region_of(neighbour_of(body))
    (begin,) = (node for node in body.graph.nodes if effect_of(node) == "collective" and len(node.args) > 1)
    assert begin.args == (inputs[attrs["part"]], attrs["reduce_op"], attrs["group"])
    assert list(inputs[attrs["part"]].users) == [begin] and attrs["operands"][attrs["part"]] == "part"
    assert (attrs["neighbour"], attrs["ranks"], attrs["reduce_op"]) == (inner.kind, RANKS, "sum")
    assert str(begin.meta["val"].dtype) == f"torch.{attrs['dtype']}"
    assert len(attrs["operands"]) == len(inputs) and len(attrs["outputs"]) == len(results)
    assert attrs["reduced"] == tuple(i for i, role in enumerate(attrs["outputs"]) if role == "reduced")
    assert sorted((*attrs["critical"], *attrs["coefficients"])) == list(range(len(results)))
    made = [node.args[1] if node.target.__name__ == "getitem" else None for node in results]
    for at, (role, index) in enumerate(zip(attrs["outputs"], made, strict=True)):
        assert role == ("reduced" if index is None and comes_straight(results[at]) else "sum") or index is not None
        assert index is None or role == inner.attrs["outputs"][index]
        late = index is not None and index in inner.attrs.get("coefficients", ())
        assert (at in attrs["coefficients"]) is late
    assert set(attrs["operands"]) - {"part", "residual"} <= {*inner.attrs["operands"]}
    given = random_inputs(flatten(body), 5)
    with torch.no_grad():
        expected = body(*given)
        given[attrs["part"]] = given[attrs["part"]] * RANKS
        rest = behind_sum(body)
        found = rest(*given)
    assert all(map(same_bits, found, expected))
    assert not [node for node in rest.graph.nodes if effect_of(node) or node.target is invoke_subgraph]


def comes_straight(node: Node) -> bool:
    """Whether `node` is the sum, up to views and casts."""
    while "wait_tensor" not in str(node.target):
        if "add" in str(node.target):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def check(decision: Decision, each: Sum, form: str) -> bool:
    """Whether a legal sum became a region of that form; a flawed one must name its rule."""
    if each.flaw:
        assert decision.rule == FLAWS[each.flaw], decision
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert attrs["form"] == form and attrs["dtype"] == ("float32" if each.spelled == "in fp32" else "bfloat16")
    assert bool(attrs["reduced"]) == (each.also != "nothing")
    return True


def decided(decisions: Sequence[Decision], sums: Sequence[Sum], forms: Sequence[str]) -> list[bool]:
    """Whether each sum fired, in order. Of a flaw with two collectives, one breaks its rule."""
    left, fired = list(decisions), []
    for each, form in zip(sums, forms, strict=True):
        mine, left = left[: each.collectives], left[each.collectives :]
        told = [decision for decision in mine if decision.rule == FLAWS.get(each.flaw)] if each.flaw else mine
        fired.append(check(told[0], each, form))
    assert not left
    return fired


def test_a_sum_in_front_of_a_norm_is_fused_in_any_spelling() -> None:
    fired: list[bool] = []

    @FEWER
    @given(norms)
    def draw(program: Norms) -> None:
        gm, decisions = fused(program)
        fired.extend(decided(decisions, program.sums, ["norm"] * 3))
        for decision in decisions:
            assert decision.region is None or decision.region.attrs["producer"] == program.producer
            assert decision.region is None or ("residual" in decision.region.attrs["operands"]) == (
                program.residual != "none"
            )
        check_moves_only(prepared_again(program), gm)

    draw()
    check_fired_share(fired)


def prepared_again(program: Norms | Reduced) -> GraphModule:
    return copy_program(traced(program))


def test_a_sum_in_front_of_a_boundary_is_fused() -> None:
    fired: list[bool] = []

    @FEW
    @given(stacks)
    def draw(program: Reduced) -> None:
        _, decisions = fused(program)
        forms = ["post" if 1 in program.engrams else "seam", "exit"]
        fired.extend(decided(decisions, program.sums, forms))

    draw()
    check_fired_share(fired)


def test_every_form_once() -> None:
    gm, decisions = fused(STACK)
    assert [d.region and d.region.name for d in decisions] == [f"{REDUCED} {form}" for form in ("seam", "post", "exit")]
    seam = next(d.region.attrs for d in decisions if d.region)
    assert seam["outputs"] == ("streams", "input", "pre", "post", "comb") and seam["coefficients"] == (2, 3, 4)
    assert set(seam["operands"]) == {"part", "comb", "streams", "post", "carried", "weight"}
    assert [region_of(call).name for call in regions(gm) if region_of(call).kind != REDUCED] == [
        "mhc_boundary entry",
        "mhc_boundary after_engram",
    ]


@pytest.mark.parametrize("spelled", SPELLED)
def test_each_spelling_is_one_region(spelled: str) -> None:
    _, (decision,) = fused(Norms((Sum(spelled),)))
    assert check(decision, Sum(spelled), "norm")


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Norms((Sum(), Sum(flaw=flaw), Sum()))
    _, decisions = fused(program)
    assert decided(decisions, program.sums, ["norm"] * 3) == [True, False, True]
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw]))
    try:
        again = apply(fuse_all_reduce, copy_program(traced(program)))
    except (AssertionError, KeyError, AttributeError, TypeError, RuntimeError):  # damage is as good
        return
    assert FLAWS[flaw] not in [decision.rule for decision in again]


@pytest.mark.parametrize("flaw", ["read under way", "no wait"])
def test_who_reads_a_sum_under_way_is_at_fault_and_not_its_wait(flaw: str) -> None:
    gm, decisions = fused(Norms((Sum(flaw=flaw),)))
    (culprit,) = [node for node in gm.graph.nodes if node.name == decisions[0].culprit]
    assert "wait_tensor" not in str(culprit.target)
    assert any("all_reduce" in str(arg.target) for arg in culprit.all_input_nodes)


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == dict(RULES).keys()


@pytest.mark.parametrize("program", [MIXED, STACK], ids=["norms", "stack"])
def test_the_plan_holds_with_regions_of_their_own_and_with_the_collectives_as_they_were(program: Any) -> None:
    gm, decisions = fused(program)
    plan = check_plan_holds(gm, (5,), cut_at=(*CUT_AT, REDUCED))
    assert sum(piece.border == f"region {REDUCED}" for piece in plan.pieces) == len(decisions)
    before = copy_program(traced(program))
    assert open_reduced(gm) == len(decisions) and not list(regions(gm, REDUCED))
    assert [str(node.target) for node in flatten(gm).graph.nodes if effect_of(node)] == [
        str(node.target) for node in flatten(before).graph.nodes if effect_of(node)
    ]
    check_plan_holds(gm, (5,))
    check_moves_only(before, gm)


def test_a_region_with_a_collective_has_its_effect() -> None:
    gm, _ = fused(MIXED)
    assert [effect_of(call) for call in regions(gm, REDUCED)] == ["collective"] * 3


def test_pad_rows_reach_no_other_row() -> None:
    """Rows of NaN and of huge numbers, which one rank may have where another has none."""
    gm, _ = fused(STACK)
    inputs = random_inputs(flatten(gm), 5)
    with torch.no_grad():
        clean = gm(*(each.clone() for each in inputs))
        inputs[0][3:] = torch.tensor([float("nan"), 3e38]).unsqueeze(-1).bfloat16()
        padded = gm(*inputs)
    assert all(same_bits(a[:3], b[:3]) for a, b in zip(clean, padded, strict=True) if a.shape[0] == 5)
    assert any(b[3:].isnan().any() for b in padded)


# ---- as torch.compile hands it over


class Llama(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(2))
        self.norm = torch.nn.Parameter(torch.rand(64).bfloat16())

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            f = h.float()
            x = self.norm * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
            y = torch.relu(x @ self.up) @ self.down
            dist.all_reduce(y)
            h = h + y
        f = h.float()
        return h, self.norm * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def test_a_model_that_reduces_in_place() -> None:
    gm = trace(Llama(), torch.randn(5, 64).bfloat16())
    gm, runs = run_pipeline(gm, check="numeric", strict=True)
    (run,) = (each for each in runs if each.name == "fuse_all_reduce")
    assert [d.region and d.region.name for d in run.decisions] == [f"{REDUCED} norm"] * 2
    assert run.made == {f"{REDUCED} norm": 2}
    attrs = [region_of(call).attrs for call in regions(gm, REDUCED)]
    assert [each["outputs"] for each in attrs] == [("sum", "normed")] * 2
    assert {each["producer"] for each in attrs} == {"product"}
    plan = partition(gm, cut_at=(*CUT_AT, REDUCED), along=ALONG)
    own = [piece for piece in plan.pieces if piece.border == f"region {REDUCED}"]
    assert len(own) == 2 and len({piece.key for piece in own}) == 1  # one kernel for all layers
    for piece in own:  # what peers read is as large as the inputs say: allocated before anything is captured
        assert {*piece.sizes} <= {*plan.sizes} and piece.uncapturable is None
    speaks = {str(node.target) for piece in own for node in flatten(piece.body).graph.nodes if effect_of(node)}
    assert speaks == {f"_c10d_functional.{name}.default" for name in ("all_reduce", "wait_tensor")}


def test_what_was_reduced_in_place_and_written_later_is_read_as_it_was() -> None:
    def written(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = h @ w
        dist.all_reduce(y)
        f = y.float()
        x = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)
        y.add_(1)
        return y, x

    gm = trace(written, torch.randn(5, 64).bfloat16(), static=[torch.randn(64, 64).bfloat16()])
    _, runs = run_pipeline(gm, check="numeric", strict=True)
    (run,) = (each for each in runs if each.name == "fuse_all_reduce")
    assert [d.region and d.region.attrs["outputs"] for d in run.decisions] == [("reduced", "normed")]


def test_an_input_reduced_in_place_keeps_its_write() -> None:
    def reduced(y: Tensor) -> Tensor:
        dist.all_reduce(y)
        f = y.float()
        return f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)

    gm = trace(reduced, torch.randn(5, 64).bfloat16())
    gm, runs = run_pipeline(gm, check="numeric", strict=True)
    (run,) = (each for each in runs if each.name == "fuse_all_reduce")
    assert run.applied == 1
    given = torch.ones(4, 64).bfloat16()
    with torch.no_grad():
        gm(*[given if node.meta["val"].__class__.__name__ == "FakeTensor" else 4
             for node in gm.graph.nodes if node.op == "placeholder"])  # fmt: skip
    assert torch.equal(given, torch.full_like(given, RANKS))


def test_all_ranks_decide_alike() -> None:
    """A rank's number may be a constant of its program: that changes no decision."""

    def of_rank(rank: int) -> Any:
        def run(h: Tensor, w: Tensor) -> Tensor:
            y = added((h + rank) @ w)
            f = y.float()
            return f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) + rank

        gm = trace(run, torch.randn(5, 64).bfloat16(), static=[torch.randn(64, 64).bfloat16()])
        gm, _ = run_pipeline(gm, strict=True)
        (call,) = regions(gm, REDUCED)
        return region_of(call), structure_key(body_of(call))

    assert of_rank(0) == of_rank(1)


# ---- seeded bugs


def moves_effects_alone(site: module.Site) -> Node | None:
    return spans.moves_an_effect(site.members)


def adds_the_users_of_any(part: Node) -> str | None:
    return "product"


WRONG: dict[str, tuple[Any, str, Any]] = {
    "a collective moves over another": (module, "RULES", (*RULES[:-1], (RULES[-1][0], moves_effects_alone))),
    "an average is a sum": (module, "RULES", RULES[:1] + RULES[2:]),
    "what a GEMM wrote for two readers is written elsewhere": (module, "producer_of", adds_the_users_of_any),
    "everything read outside is the sum": (module, "_made", lambda site, node: "reduced"),
    "a product with the sum is on the way": (
        reduced_parts,
        "ON_THE_WAY",
        (*reduced_parts.ON_THE_WAY, torch.ops.aten.mul.Tensor),
    ),
    "what is on the way stays outside": (reduced_parts, "between", lambda *_: []),
    "the group has two ranks": (module, "ranks_of", lambda group: 2),
}


def check_what_shows() -> None:
    """What the right pass does with a program that has something of everything."""
    for flaw in ("an average", "another collective", "scaled"):
        program = Norms((Sum(also="the sum"), Sum(flaw=flaw), Sum("through a view")))
        _, decisions = fused(program)
        assert decided(decisions, program.sums, ["norm"] * 3) == [True, False, True]
    _, (decision,) = fused(Norms((Sum(),), "in fp32", "product and its copy"))
    assert decision.region is not None and decision.region.attrs["producer"] is None


def test_what_shows_the_bugs_holds_of_the_right_pass() -> None:
    check_what_shows()


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises(Exception):  # noqa: B017  (a pass that raises is undone: any error is a notice)
        check_what_shows()


def test_canonical_programs_hold_no_copy_of_a_sum() -> None:
    gm = trace(Llama(), torch.randn(5, 64).bfloat16())
    apply(canonicalize, gm)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)
