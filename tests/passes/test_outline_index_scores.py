"""outline_index_scores finds indexers in any spelling, reads their numbers, and names the rule that a flaw breaks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from tests.invariants import apply, check_pass, copy_program
from tests.strategies.index_scores import FLAWS, WIDTH, Indexer, flawed, legal, with_flaw
from tests.strategies.tracing import trace
from v41.passes import outline_index_scores as module
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_index_scores import KIND, RULES, outline_index_scores
from v41.regions import regions

FEWER = settings(max_examples=settings.default.max_examples // 4, phases=[Phase.generate])  # shrinking takes minutes
SLOW = pytest.mark.slow
QUICK = ("weights squared", "the best first", "the newest block is forgotten", "a draw in between")
PLAIN = Indexer(choice="topk", records=False)
THREE = (
    Indexer("einsum", "weighed", "filled", "unique keys", "candidate_source", chunk=2),
    Indexer("matmul", "einsum", "where", "stable sort", "re_indexer", heads=3, k=2, block=3, keep=1, scale=0.0625),
    Indexer("sum of products", "weights first", "inverted", "topk", "source", records=False, ratio=4),
)


@cache
def traced(indexer: Indexer) -> GraphModule:
    """Flawed ones with sizes that are numbers: that is quick."""
    fn, rows, weights = indexer.to_trace()
    static = [*rows, *weights] if indexer.flaw else weights
    gm = trace(fn, *() if indexer.flaw else rows, static=static, sizes=indexer.all_sizes)
    apply(canonicalize, gm)
    return gm


def wanted(indexer: Indexer) -> dict[str, Any]:
    """What the region of `indexer` says of itself, as it was asked for."""
    source = indexer.role == "candidate_source"
    return {
        "role": indexer.role,
        "heads": indexer.heads,
        "width": WIDTH,
        "scale": indexer.scale,
        "record": "mxfp4" if indexer.records else None,
        "record_bytes": WIDTH // 2 + 1 if indexer.records else None,
        "ratio": indexer.ratio,
        "numbered": True,
        "k": indexer.k,
        "ties": "any" if indexer.choice == "topk" else "lower_index",
        "block": indexer.block if source else None,
        "keep": indexer.keep if source else None,
        "outputs": ("kept", "picks") if source else ("picks",),
    }


def check(indexer: Indexer) -> bool:
    """Whether the indexer became a region; it must say what `indexer` is, or name the rule of its flaw."""
    gm = copy_program(traced(indexer))
    with enable_python_dispatcher():  # as around a backend; without it a pad of unknown sizes has no meta
        (decision,) = check_pass(outline_index_scores, gm, rows=(2, 5))
    if indexer.flaw:
        assert decision.rule == FLAWS[indexer.flaw]
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert {name: attrs[name] for name in wanted(indexer)} == wanted(indexer)
    (call,) = regions(gm, KIND)
    roles = [role for role in attrs["operands"] if role not in ("constant", "size")]
    keys = ["cache", "slots", "blocks"] if indexer.records else ["keys", "entries"]
    asked = ["queries", "weights", "rows", "requests", "columns", "positions", *keys]
    assert sorted(roles) == sorted([*asked, *["candidates"] * (indexer.role == "re_indexer")])
    assert len(attrs["operands"]) == len(call.args) - 2
    types = dict(zip(attrs["outputs"], (value.dtype for value in call.meta["val"]), strict=True))
    assert types.get("picks") is torch.int64 and types.get("kept", torch.bool) is torch.bool
    return True


@pytest.mark.parametrize("indexer", [pytest.param(each, marks=SLOW) for each in THREE[:2]] + [THREE[2]])
def test_three_spellings_are_indexers(indexer: Indexer) -> None:
    assert check(indexer)


@SLOW
def test_legal_indexers_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.booleans().flatmap(lambda fires: legal if fires else flawed))
    def draw(indexer: Indexer) -> None:
        fired.append(check(indexer))

    draw()
    assert 0.3 <= sum(fired) / len(fired) <= 0.9


@pytest.mark.parametrize("flaw", [*QUICK, *(pytest.param(each, marks=SLOW) for each in FLAWS if each not in QUICK)])
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = with_flaw(PLAIN, flaw)
    assert not check(indexer)
    monkeypatch.setattr(module, "RULES", tuple(pair for pair in RULES if pair[0] != FLAWS[flaw]))
    try:
        (decision,) = apply(outline_index_scores, copy_program(traced(indexer)))
    except (AssertionError, AttributeError, IndexError, TypeError):  # damage is as good
        return
    assert decision.rule != FLAWS[flaw]


def test_a_choice_without_scores_is_no_site() -> None:
    gm = trace(lambda x: x.relu().topk(2, dim=-1).indices, torch.randn(5, 4))
    assert check_pass(outline_index_scores, gm) == []
