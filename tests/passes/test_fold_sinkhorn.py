"""fold_sinkhorn folds every legal chain, names the rule a flawed one breaks, and never changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.invariants import apply, check_fired_share, check_pass
from tests.strategies.tracing import trace
from v41.passes import fold_sinkhorn as module
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import RULES, fold_sinkhorn
from v41.regions import body_of, region_of, regions
from v41.report import Decision


class Turn(NamedTuple):
    """One step. leak: the matrix that enters it is returned too. spelling: how the division is written."""

    axis: int
    eps: float
    leak: bool = False
    spelling: str = "div"


SPELLINGS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "div": lambda m, axis, eps: m / (m.sum(axis, keepdim=True) + eps),
    "axis from the front": lambda m, axis, eps: m / (m.sum(axis + m.ndim, keepdim=True) + eps),
    "no keepdim": lambda m, axis, eps: m / (m.sum(axis) + eps).unsqueeze(axis),
    "view before eps": lambda m, axis, eps: m / (m.sum(axis).unsqueeze(axis) + eps),
    "eps first": lambda m, axis, eps: m / (eps + m.sum(axis, keepdim=True)),
    "transposed": lambda m, axis, eps: (m.mT / (m.mT.sum(-3 - axis, keepdim=True) + eps)).mT,
    "reciprocal": lambda m, axis, eps: m * (m.sum(axis, keepdim=True) + eps).reciprocal(),
    "reciprocal first": lambda m, axis, eps: (m.sum(axis, keepdim=True) + eps).reciprocal() * m,
    "no eps": lambda m, axis, eps: m / m.sum(axis, keepdim=True),
    "copied": lambda m, axis, eps: (m.clone() / (m.sum(axis, keepdim=True) + eps).clone()).clone(),
    "mean": lambda m, axis, eps: m / (m.mean(axis, keepdim=True) + eps),
    "fp64 sum": lambda m, axis, eps: m / (m.sum(axis, keepdim=True, dtype=torch.float64) + eps).float(),
    "sum of another": lambda m, axis, eps: m / (m.exp().sum(axis, keepdim=True) + eps),
    "row sums along columns": lambda m, axis, eps: m / (m.sum(axis).unsqueeze(-3 - axis) + eps),
    "two eps": lambda m, axis, eps: m / (m.sum(axis, keepdim=True) + eps + eps),
}
SAME = ("div", "axis from the front", "no keepdim", "view before eps", "eps first", "transposed", "copied")
NO_STEP = ("mean", "fp64 sum", "sum of another", "row sums along columns", "two eps")


def program(turns: list[Turn]) -> Callable[[Tensor], Any]:
    def normalise(m: Tensor) -> Any:
        leaked = []
        for turn in turns:
            leaked += [m] * turn.leak
            m = SPELLINGS[turn.spelling](m, turn.axis, turn.eps)
        return m, *leaked

    return normalise


def fold(turns: list[Turn], *shape: int, backed: bool = False) -> list[Decision]:
    gm = trace(program(turns), torch.rand(shape), backed=backed)
    apply(canonicalize, gm)
    return check_pass(fold_sinkhorn, gm)


def alternating(first: int, count: int, eps: float) -> list[Turn]:
    return [Turn(first if i % 2 == 0 else -3 - first, eps) for i in range(count)]


axes, epsilons = st.sampled_from([-1, -2]), st.sampled_from([1e-6, 1e-20, 1.0])
legal = st.builds(alternating, axes, st.integers(2, 12), epsilons)
FLAWS: dict[str, tuple[int, Callable[[Turn], Turn]]] = {  # rule -> (columns, a change of one step that breaks it alone)
    "alternates between the last two axes": (4, lambda turn: turn._replace(axis=-3)),
    "works on square matrices": (3, lambda turn: turn),
    "keeps one eps": (4, lambda turn: turn._replace(eps=2 * turn.eps)),
    "divides the same way in every step": (4, lambda turn: turn._replace(spelling="reciprocal")),
    "is read outside at its end only": (4, lambda turn: turn._replace(leak=True)),
}


@given(legal, st.integers(2, 5), st.booleans())
def test_folds_a_legal_chain(turns: list[Turn], rows: int, backed: bool) -> None:
    (decision,) = fold(turns, rows, 4, 4, backed=backed)
    assert decision.region is not None
    assert decision.region.attrs == dict(first_axis=turns[0].axis, steps=len(turns), eps=turns[0].eps)


@given(legal, st.lists(st.sampled_from(SAME), min_size=12, max_size=12), st.sampled_from([(4, 4), (2, 2), (2, 3, 3)]))
def test_spellings_of_the_same_step_fold_alike(turns: list[Turn], spellings: list[str], shape: tuple[int, ...]) -> None:
    respelled = [turn._replace(spelling=spelling) for turn, spelling in zip(turns, spellings, strict=False)]
    (decision,) = fold(respelled, 3, *shape)
    assert decision.region is not None
    first = turns[0].axis if spellings[0] != "transposed" else -3 - turns[0].axis
    assert decision.region.attrs == dict(first_axis=first, steps=len(turns), eps=turns[0].eps)


@pytest.mark.parametrize("spelling", ["reciprocal", "reciprocal first", "no eps"])
def test_folds_other_bits_when_every_step_has_them(spelling: str) -> None:
    (decision,) = fold([turn._replace(spelling=spelling) for turn in alternating(-2, 5, 1e-6)], 3, 4, 4)
    assert decision.region is not None
    assert decision.region.attrs["eps"] == (0.0 if spelling == "no eps" else 1e-6)


@given(legal, st.sampled_from(sorted(FLAWS)), st.data())
def test_names_the_rule_a_flawed_chain_breaks(turns: list[Turn], rule: str, data: st.DataObject) -> None:
    (columns, flaw), at = FLAWS[rule], data.draw(st.integers(1, len(turns) - 1))
    (decision,) = fold([*turns[:at], flaw(turns[at]), *turns[at + 1 :]], 3, 4, columns)
    assert (decision.applied, decision.rule) == (False, rule)
    assert decision.culprit is not None


@pytest.mark.parametrize("rule", FLAWS)
def test_a_deleted_rule_lets_its_flaw_through(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, flaw = FLAWS[rule]
    turns = alternating(-2, 6, 1e-6)
    turns[3] = flaw(turns[3])
    gm = trace(program(turns), torch.rand(3, 4, columns))
    apply(canonicalize, gm)
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != rule))
    (decision,) = apply(fold_sinkhorn, gm)
    assert decision.rule != rule
    assert decision.applied


def test_every_rule_has_a_flaw_and_a_lone_step_is_no_site() -> None:
    assert FLAWS.keys() == dict(RULES).keys()
    assert fold([Turn(-1, 1e-20)], 3, 6) == []


def test_what_is_no_step_ends_a_chain() -> None:
    fired = []

    @given(axes, st.lists(st.sampled_from(SAME + NO_STEP), min_size=2, max_size=5))
    def fold_some(first: int, drawn: list[str]) -> None:
        turns = alternating(first, len(drawn), 1e-6)
        decisions = fold([turn._replace(spelling=name) for turn, name in zip(turns, drawn, strict=True)], 3, 4, 4)
        runs = "".join(" " if spelling in NO_STEP else "x" for spelling in drawn).split()
        assert len(decisions) == sum(len(run) > 1 for run in runs)
        fired.append(any(decision.applied for decision in decisions))

    fold_some()
    check_fired_share(fired)


def test_what_no_region_came_from_stays_in_its_subgraph() -> None:
    @torch.compiler.nested_compile_region
    def weights(scores: Tensor) -> Tensor:
        return program([Turn(-1, 1e-6), Turn(-2, 1e-6)])(scores)[0]

    gm = trace(lambda m: weights(m) + weights(m * 2), torch.rand(3, 4, 6))
    check_pass(canonicalize, gm)
    (decision,) = check_pass(fold_sinkhorn, gm)
    assert decision.rule == "works on square matrices"
    assert len([node for node in gm.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]) == 2


def test_loops_of_two_subgraphs_keep_names_of_their_own() -> None:
    @torch.compiler.nested_compile_region
    def short(m: Tensor) -> Tensor:
        return program(alternating(-2, 3, 1e-6))(m)[0]

    @torch.compiler.nested_compile_region
    def long(m: Tensor) -> Tensor:
        return program(alternating(-2, 5, 1e-6))(m)[0]

    gm = trace(lambda m: short(m) + long(m) + short(m * 2), torch.rand(3, 4, 4))
    check_pass(canonicalize, gm)
    check_pass(fold_sinkhorn, gm)
    calls = list(regions(gm, "sinkhorn"))
    assert [region_of(call).attrs["steps"] for call in calls] == [3, 5, 3]
    assert len({call.args[1] for call in calls}) == len({body_of(call) for call in calls}) == 2


def test_takes_the_39_steps_behind_a_softmax() -> None:
    def sinkhorn(logits: Tensor) -> Tensor:
        return program(alternating(-2, 39, 1e-6))(logits.softmax(-1) + 1e-6)[0]

    gm = trace(sinkhorn, torch.randn(3, 4, 4))
    apply(canonicalize, gm)
    (decision,) = check_pass(fold_sinkhorn, gm)
    assert decision.region is not None
    assert decision.region.attrs == dict(first_axis=-2, steps=39, eps=1e-6)
    assert "test_fold_sinkhorn.py" in decision.source


def test_two_chains_of_one_matrix_are_two_sites() -> None:
    def both(m: Tensor) -> Any:
        return program(alternating(-1, 3, 1e-6))(m)[0], program(alternating(-2, 4, 1e-6))(m)[0]

    gm = trace(both, torch.rand(3, 4, 4))
    apply(canonicalize, gm)
    assert [d.region and d.region.attrs["steps"] for d in check_pass(fold_sinkhorn, gm)] == [3, 4]


@pytest.mark.parametrize("flawed", [False, True])
def test_a_loop_in_the_model_s_own_subgraph_counts_once_a_call(flawed: bool) -> None:
    turns = alternating(-2, 5, 1e-6)
    turns[2] = turns[2]._replace(eps=1e-3 if flawed else 1e-6)

    @torch.compiler.nested_compile_region
    def sinkhorn(logits: Tensor) -> Tensor:
        return program(turns)(logits.softmax(-1) + 1e-6)[0]

    gm = trace(lambda m: (sinkhorn(m), sinkhorn(m * 2) + sinkhorn(m + 1)), torch.randn(3, 4, 4))
    check_pass(canonicalize, gm)
    decisions = check_pass(fold_sinkhorn, gm)
    assert [decision.applied for decision in decisions] == [not flawed] * 3
    bodies = [child for child in gm.children() if isinstance(child, torch.fx.GraphModule)]
    assert len(set(bodies)) == (0 if flawed else 1)
