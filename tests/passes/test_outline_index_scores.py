"""outline_index_scores finds indexers in any spelling, reads their numbers, and names the rule that a flaw breaks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies import index_scores
from tests.strategies.index_scores import CAPACITY, FLAWS, WIDTH, Indexer, flawed, legal, with_flaw
from tests.strategies.norms import trace_as_is
from tests.strategies.tracing import trace
from v41._compat_trace import functional_aten
from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.indexer import Indexer as PlainIndexer
from v41.model_def.indexer import Selection
from v41.model_def.quantization import MXFP4_RECORD
from v41.model_def.rope import both_frequencies
from v41.model_def.step import plan_step
from v41.passes import outline_index_scores as module
from v41.passes.canonicalize import canonicalize
from v41.passes.index_choice import Parts
from v41.passes.outline_index_scores import KIND, RULES, outline_index_scores
from v41.passes.restrict_index_scores import restrict_index_scores
from v41.regions import regions
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 4, phases=[Phase.generate])  # shrinking takes minutes
SLOW = pytest.mark.slow
QUICK = ("weights squared", "the best first", "the newest block is forgotten", "a draw in between")
PLAIN = Indexer(choice="topk", records=False)
THREE = (
    Indexer("einsum", "weighed", "filled", "unique keys", "candidate_source", chunk=2),
    Indexer("matmul", "einsum", "where", "stable sort", "re_indexer", heads=3, k=2, block=3, keep=1, scale=2.0**-45),
    Indexer("sum of products", "weights first", "inverted", "topk", "source", records=False, ratio=4),
)


@cache
def traced(indexer: Indexer, numbers: bool = False) -> GraphModule:
    """Flawed ones with sizes that are numbers: that is quick."""
    fn, rows, weights = indexer.to_trace()
    numbers = numbers or bool(indexer.flaw)
    static = [*rows, *weights] if numbers else weights
    gm = trace(fn, *() if numbers else rows, static=static, sizes=indexer.all_sizes)
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
        "spread": indexer.block if indexer.records else 1,
        "reach": CAPACITY - 1 if indexer.records else None,
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


def test_a_mask_that_views_entry_numbers_in_its_own_way_hides_no_reach() -> None:
    gm = copy_program(traced(replace(THREE[1], chunk=3), numbers=True))
    (decision,) = apply(outline_index_scores, gm)
    assert decision.region is not None, decision
    assert (decision.region.attrs["spread"], decision.region.attrs["reach"]) == (3, CAPACITY - 1)


@pytest.mark.parametrize("product", ["einsum", "sum of products"])
def test_records_that_stay_fp32_where_they_are_decoded_are_keys(product: str) -> None:
    """By groups of channels, which a view joins, with no cast behind it. Plain Inductor drops that cast on 2.11."""
    gm = copy_program(traced(Indexer(product, choice="topk", rounded=False), numbers=True))
    (decision,) = apply(outline_index_scores, gm)
    assert decision.region is not None, decision
    assert (decision.region.attrs["record"], decision.region.attrs["width"]) == ("mxfp4", WIDTH)


def test_what_a_row_sees_is_counted_at_far_positions_too() -> None:
    for flaw, ratio in (("", 1), ("sees 100 at most", None), ("pads see one", None)):
        (decision,) = apply(outline_index_scores, copy_program(traced(replace(PLAIN, flaw=flaw), numbers=True)))
        assert decision.region is not None and decision.region.attrs["ratio"] == ratio


@SLOW
def test_legal_indexers_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.booleans().flatmap(lambda fires: legal if fires else flawed))
    def draw(indexer: Indexer) -> None:
        fired.append(check(indexer))

    draw()
    check_fired_share(fired)


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


class OtherBytes:
    """Nearly MXFP4: the lowest bit of every byte means the opposite."""

    encode = staticmethod(MXFP4_RECORD.encode)

    @staticmethod
    def decode(record: Tensor) -> Tensor:
        return MXFP4_RECORD.decode(record ^ 1)


@pytest.mark.parametrize(("form", "told"), [(MXFP4_RECORD, "mxfp4"), (OtherBytes, None)])
def test_keys_of_other_bytes_are_no_records(form: Any, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_scores, "MXFP4_RECORD", form)
    (decision,) = apply(outline_index_scores, copy_program(traced(Indexer(flaw=f"none, bytes of {told}"))))
    assert decision.region is not None and decision.region.attrs["record"] == told


def test_a_choice_without_scores_is_no_site() -> None:
    gm = trace(lambda x: x.relu().topk(2, dim=-1).indices, torch.randn(5, 4))
    assert check_pass(outline_index_scores, gm) == []


# ---- other models, and the plain model


def with_batches(q: Tensor, keys: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """As V4 has it: queries [B, S, H, D] of several texts at once, each with entries of its own [B, E, D]."""
    matches = torch.relu(q @ keys.mT[:, None]) * 0.5
    scores = (matches * w.unsqueeze(-1)).sum(2)
    hidden = torch.arange(keys.shape[1]) >= seen[..., None]
    best = scores.masked_fill(hidden, -torch.inf).topk(2, -1).indices
    return torch.where(best >= seen[..., None], -1, best)


def test_the_indexer_of_another_model_is_refused() -> None:
    rows = torch.randn(2, 5, 3, 8), torch.randn(2, 6, 8), torch.rand(2, 5, 3), torch.randint(0, 6, (2, 5))
    gm = trace_as_is(with_batches, rows)
    apply(canonicalize, gm)
    (decision,) = check_pass(outline_index_scores, gm, (2,))
    assert decision.rule == "the picks are the best entries that a row may see, ascending, then -1"


class Indexers(torch.nn.Module):
    """The index sources of the plain model, each with queries of its own and the stored keys that it shares."""

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.config = config
        self.roles = [role for role in config.roles if role.owns_indexer]
        self.layers = torch.nn.ModuleList(PlainIndexer(config, role) for role in self.roles)
        freqs = both_frequencies(config)
        self.register_buffer("plain", freqs[0])
        self.register_buffer("compressed", freqs[1])

    def forward(self, x: Tensor, latent: Tensor, batch: Batch, cache: Cache) -> list[Tensor]:
        step = plan_step(batch, cache, self.config.sliding_window, self.plain, self.compressed)
        selection: Selection | None = None
        picks = []
        for role, layer in zip(self.roles, self.layers, strict=True):
            assert role.kv_source is not None
            selection = layer(x, latent, cache.index_keys[role.kv_source], step, selection)
            picks.append(selection.picks)  # type: ignore[union-attr]
        return picks


@SLOW
def test_the_plain_model_has_a_region_an_index_source_and_re_indexers_can_be_restricted() -> None:
    config = V41Config.preset("tiny")
    model, cache = Indexers(config), Cache.zeros(config, 2, 64)
    batch = build_batch(config, cache, [Chunk(list(range(40)), 20, 0), Chunk(list(range(30)), 29, 1)])
    for stored in cache.index_keys.values():
        stored.copy_(MXFP4_RECORD.encode(torch.randn(*stored.shape[:2], config.index_head_dim).bfloat16()))
    x, latent = torch.randn(21, config.hidden_size).bfloat16(), torch.randn(21, config.q_lora_rank).bfloat16()
    decisions: list[Decision] = []

    def lower(gm: GraphModule, inputs: Any) -> Any:
        for each in (canonicalize, outline_index_scores, restrict_index_scores):
            decisions.extend(apply(each, gm))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with torch.no_grad():
        wanted = model(x, latent, batch, cache)
        torch.compiler.reset()
        run = torch.compile(model, backend=lambda gm, inputs: functional_aten(gm, inputs, lower, lower))
        for tensor in (x, latent):
            torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="rows")
        for found, expected in zip(run(x, latent, batch, cache), wanted, strict=True):
            assert torch.equal(found, expected)
    attrs = [decision.region.attrs for decision in decisions if decision.region and decision.region.kind == KIND]
    again = sum(role.candidate_source is not None for role in model.roles)
    assert [each["role"] for each in attrs] == ["source", "candidate_source", *["re_indexer"] * 2 * again]
    assert ["restricted" in each for each in attrs] == [False] * len(model.roles) + [True] * again
    for each, role in zip(attrs, model.roles, strict=False):
        assert (each["spread"], each["reach"]) == (config.candidate_block_size, 64 // role.ratio)
        told = each["heads"], each["width"], each["k"], each["ratio"], each["record_bytes"]
        assert told == (config.index_n_heads, config.index_head_dim, config.index_topk, role.ratio, 34)
        assert each["scale"] == (config.index_head_dim * config.index_n_heads) ** -0.5
    assert (attrs[1]["block"], attrs[1]["keep"]) == (config.candidate_block_size, config.candidate_topk_blocks)


WRONG: dict[str, tuple[str, Any, Indexer]] = {  # bugs of what is read: each must show in what a region says, or not
    "any sum is the sum": ("scale", 0.5, with_flaw(PLAIN, "weights squared")),
    "any choice is the choice": ("_picks", lambda self, node, tied: True, with_flaw(PLAIN, "the best first")),
    "any blocks are the blocks": ("_keeps", lambda self, node: True, with_flaw(PLAIN, "sees one more")),
    "ties are not asked": ("ties", "lower_index", with_flaw(PLAIN, "")),
}


@SLOW
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, indexer = WRONG[bug]
    monkeypatch.setattr(Parts, name, wrong)
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        check(indexer)
