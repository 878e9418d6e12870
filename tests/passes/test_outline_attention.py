"""outline_attention finds attention in any spelling, says what it is, and names the rule that a flaw breaks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import ROWS, apply, check_fired_share, check_pass, copy_program
from tests.strategies.attention import (
    FLAWS,
    HIDES,
    PRODUCTS,
    RECORDS,
    SMALL,
    SOFTMAXES,
    Spelling,
    flawed,
    legal,
    together,
    with_flaw,
)
from tests.strategies.norms import trace_as_is
from tests.strategies.tracing import trace
from v41.model_def.attention import Attention
from v41.model_def.config import V41Config
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD
from v41.model_def.rope import Turn
from v41.passes import attention_core, records, turns
from v41.passes import outline_attention as module
from v41.passes.canonicalize import canonicalize
from v41.passes.matching import aten, fake
from v41.passes.outline_attention import KIND, RULES, Site, find_sites, outline_attention
from v41.passes.pipeline import Pass, run_pipeline
from v41.passes.sites import broken_rule
from v41.regions import body_of, invoke_subgraph, is_region, region_of, regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 6, phases=[Phase.generate])  # shrinking takes minutes
ALL = (  # every way to write a part, at least once
    Spelling(records="mxfp4"),
    Spelling("matmul", "where", "softmax", "queries", "each branch", "hidden", "slices", "halves", "first"),
    Spelling("bmm of the transposed", "added", "exp below the sink", "scores", "not", rope="none", records="none",
             picked=None, rounded=False),
    Spelling(softmax="exp of max", records="all fp8", picked=5, turned_back=False, heads=1, window=2, sink=False),
    Spelling("matmul", softmax="softmax, sink first", records="window", picked=2, width=64, rotary=32),
    Spelling(softmax="divided first", rope="none", records="none", heads=3),
    Spelling("matmul", "a large number", zeroed="not", rope="none", records="none", picked=None, sink=False),
)  # fmt: skip
FIRST = ALL[1]
OF_SYMBOLS = with_flaw("as many keys as rows")
GROUP = [SMALL, *(each for each in map(with_flaw, FLAWS) if each != OF_SYMBOLS)]  # one program: tracing takes time
WRITTEN = "nothing is written in between, and no effect reads it there"


@cache
def traced(spellings: tuple[Spelling, ...], symbolic: bool) -> GraphModule:
    """With as many rows as come, or with five: Dynamo and sizes that are symbols make a trace ten times as slow."""
    torch.manual_seed(0)
    fn, rows, weights = together(spellings)
    gm = trace(fn, *rows, static=weights) if symbolic else trace_as_is(fn, [*rows, *weights])
    apply(canonicalize, gm)
    return gm


def prepared(*spellings: Spelling, symbolic: bool = False) -> GraphModule:
    return copy_program(traced(spellings, symbolic))


def wanted(spelling: Spelling) -> dict[str, Any]:
    """What the region says of itself, as `spelling` was asked for."""
    s, rope = spelling, {"width": spelling.rotary, "pairs": spelling.pairs, "channels": spelling.channels}
    turned = s.rope != "none"
    return {
        "heads": s.heads,
        "width": s.width,
        "window": s.window,
        "picked": s.picked,
        "scale": s.width**-0.5,
        "rope": rope if turned else None,
        "turns": (1, -1 * s.turned_back) if turned else (0, 0),
        "keys": s.keys,
        "masks": (s.mask, "picks")[: 1 if s.picked is None else 2],
        "p": "bfloat16" if s.rounded else "float32",
        "p_over": s.over,
        "sink": s.sink,
        "empty": s.empty,
        "reads_hidden": s.zeroed == "not",
    }


def check(spelling: Spelling, decision: Decision) -> bool:
    """Whether it became a region; it must say what `spelling` is, or name the rule of its flaw."""
    if spelling.flaw:
        assert decision.rule == FLAWS[spelling.flaw], decision
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    assert {name: attrs[name] for name in wanted(spelling)} == wanted(spelling)
    roles = ["queries", "window", spelling.mask, *["picked", "picks"] * (spelling.picked is not None)]
    roles += ["cos", "sin"] * (spelling.rope != "none") + ["sink"] * spelling.sink
    assert sorted(role for role in attrs["operands"] if role != "size") == sorted(roles)
    return True


def check_all(*spellings: Spelling, symbolic: bool = False) -> list[bool]:
    """`check` of each, in one program. Of those that are attention nothing is left outside."""
    gm = prepared(*spellings, symbolic=symbolic)
    decisions = check_pass(outline_attention, gm, ROWS if symbolic else (5,))
    fired = [check(*pair) for pair in zip(spellings, decisions, strict=True)]
    for call in regions(gm, KIND):
        assert len(region_of(call).attrs["operands"]) == len(call.args) - 2
    if all(fired):
        left = {node.target for node in gm.graph.nodes}
        assert left.isdisjoint((aten.bmm.default, aten.exp.default, aten.mul.Tensor))
    return fired


def test_every_spelling_is_attention() -> None:
    for name, ways in {"product": PRODUCTS, "hide": HIDES, "softmax": SOFTMAXES, "records": RECORDS}.items():
        assert {getattr(spelling, name) for spelling in ALL} == set(ways)
    assert check_all(*ALL) == [True] * len(ALL)


def test_any_number_of_rows_may_attend() -> None:
    assert check_all(FIRST, symbolic=True) == [True]


def test_legal_spellings_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.lists(st.one_of(legal, legal, flawed), min_size=2, max_size=2))
    def draw(spellings: list[Spelling]) -> None:
        fired.extend(check_all(*spellings))

    draw()
    check_fired_share(fired)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str) -> None:
    group = [OF_SYMBOLS] if flaw == OF_SYMBOLS.flaw else GROUP
    sites = find_sites(traced(tuple(group), symbolic=group is not GROUP))
    check_refused_by_its_rule(sites[group.index(with_flaw(flaw))], FLAWS[flaw])


def check_refused_by_its_rule(site: Site, rule: str) -> None:
    broken = broken_rule(site, RULES)
    assert broken is not None and broken[0] == rule
    try:
        without = broken_rule(site, [pair for pair in RULES if pair[0] != rule])
    except (AssertionError, AttributeError, TypeError, ValueError):  # damage is as good
        return
    assert without is None or without[0] != rule


def test_a_write_in_between_is_refused() -> None:
    gm = prepared(*GROUP)
    site = find_sites(gm)[0]
    given = [node for node in gm.graph.nodes if node.op == "placeholder" and fake(node) is not None]
    with gm.graph.inserting_after(site.core.soft):
        write = gm.graph.call_function(aten.copy_.default, (given[1], given[2]))
        write.meta["val"] = given[1].meta["val"]
    assert broken_rule(site, RULES) == (WRITTEN, write)
    assert broken_rule(site, [pair for pair in RULES if pair[0] != WRITTEN]) is None


def test_every_rule_has_a_flaw() -> None:
    assert {*FLAWS.values(), WRITTEN} == dict(RULES).keys()


WRONG: dict[
    str, tuple[Any, str, Any, Spelling]
] = {  # bugs that keep every value: what a region says of itself is wrong
    "no scale is asked": (attention_core.Trial, "scale", 1.0, FIRST),
    "hidden is visible": (
        attention_core.Trial,
        "visible",
        lambda trial, given: given[next(iter(trial.masks))],
        FIRST,
    ),
    "scores are small": (attention_core, "LARGE", 1.0, with_flaw("scores have bounds")),
    "some score is large": (attention_core, "SELDOM", 0.6, with_flaw("hidden by a number in reach")),
    "a sink is forgotten": (attention_core.Core, "others", (), FIRST),
    "bytes are not decoded": (records, "_decodes", lambda *args: True, FIRST),
    "any cast is one of p": (module, "_leads_to", lambda node, reader: True, with_flaw("a total of rounded p")),
    "any table is the same": (turns.Rotation, "tables", (), with_flaw("turned back by another table")),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, spelling = WRONG[bug]
    monkeypatch.setattr(owner, name, wrong)
    group = GROUP if spelling in GROUP else [spelling]
    with pytest.raises((AssertionError, RuntimeError)):
        for pair in zip(group, apply(outline_attention, prepared(*group)), strict=True):
            check(*pair)


# ---- other models, and the plain model


def test_attention_of_another_model_is_refused() -> None:
    """Causal, values of their own, no sink: named, and left as it is."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * 0.25
        hidden = torch.ones(6, 6).triu(1).bool()
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    gm = trace(forward, *torch.randn(3, 2, 6, 16).unbind(), sizes=["heads"] * 3)
    apply(canonicalize, gm)
    (decision,) = apply(outline_attention, gm)
    assert decision.rule == "the keys are the values, one latent for all heads"


def count_of(gm: GraphModule, kind: str) -> int:
    """Regions of `kind` that a step runs, through the subgraphs that layers share."""
    calls = [node for node in gm.graph.nodes if node.target is invoke_subgraph]
    return sum(is_region(call, kind) + count_of(body_of(call), kind) for call in calls)


def test_the_plain_model_attends_once_a_layer() -> None:
    """Layers of one kind share a subgraph, so the pass decides once for each kind."""
    config = V41Config.preset("tiny")
    layers = [Attention(config, role) for role in config.roles[:3]]
    heads, width, window, k = config.num_attention_heads, config.head_dim, config.sliding_window, config.index_topk
    turned = [torch.randn(5, config.qk_rope_head_dim // 2) for _ in range(2)]
    keys = FP8_RECORD.encode(torch.randn(5, window, width).bfloat16())
    entries = FP4_RECORD.encode(torch.randn(5, k, width).bfloat16())
    rows = torch.randn(5, heads, width).bfloat16(), *turned, keys, torch.rand(5, window) < 0.5

    def forward(q: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, seen: Tensor, entries: Tensor, picks: Tensor) -> Any:
        given = {True: (entries, picks), False: (None, None)}
        return [layer.leave(q, Turn(cos, sin), keys, seen, *given[layer.role.ratio > 0]) for layer in layers]

    gm = trace(forward, *rows, entries, torch.randint(-1, 9, (5, k)))
    passes = Pass(canonicalize), Pass(outline_attention, needs=(canonicalize,))
    gm, (_, run) = run_pipeline(gm, passes, strict=True)
    assert run.refused == 0
    assert count_of(gm, KIND) == len(layers)
    for decision in run.decisions:
        attrs = decision.region.attrs  # type: ignore[union-attr]
        assert attrs["picked"] in (None, k)
        assert attrs["rope"] == {"width": config.qk_rope_head_dim, "pairs": "adjacent", "channels": "last"}
        names = "heads", "width", "window", "scale", "turns", "p", "p_over", "sink"
        wanted = heads, width, window, width**-0.5, (1, -1), "bfloat16", "max", True
        assert tuple(attrs[name] for name in names) == wanted
        assert attrs["keys"][0] == ("e4m3", "ue8m0", 32, FP8_RECORD.size(width))
