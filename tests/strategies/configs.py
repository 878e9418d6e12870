"""Hypothesis strategies for small, valid V41Configs: all combinations of layer kinds, quick to run."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from v41.model_def.config import RopeScaling, V41Config
from v41.model_def.engram_constants import table_primes


@st.composite
def layer_plans(draw: st.DrawFn, max_layers: int = 8) -> dict[str, Any]:
    """Which layer does what: window-only layers, then segments of one KV source each, with readers and re-indexers."""
    ratios: list[int] = [0] * draw(st.integers(0, 2))
    kv_sources: list[int] = []
    index_sources: list[int] = []
    for _ in range(draw(st.integers(0 if ratios else 1, 3))):
        if len(ratios) >= max_layers:
            break
        kv_sources.append(len(ratios))
        ratio = draw(st.sampled_from((1, 2)))
        for kind in ["source", *draw(st.lists(st.sampled_from(("reader", "reindexer", "window")), max_size=3))]:
            if kind in ("source", "reindexer"):
                index_sources.append(len(ratios))
            ratios.append(0 if kind == "window" else ratio)
    engrams = draw(st.lists(st.integers(0, len(ratios) - 1), unique=True, max_size=2).map(sorted))
    return dict(num_hidden_layers=len(ratios), compress_ratios=(*ratios, *draw(st.sampled_from(((), (0,), (0, 0))))),
                kv_source_layer_ids=tuple(kv_sources), index_source_layer_ids=tuple(index_sources),
                candidate_source_layer_id=draw(st.sampled_from((None, *kv_sources))), engram_layer_ids=tuple(engrams),
                dspark_target_layer_ids=(len(ratios) - 1,))


@st.composite
def attention_sizes(draw: st.DrawFn) -> dict[str, Any]:
    groups, rope = draw(st.integers(1, 2)), draw(st.sampled_from((2, 8, 32)))
    return dict(num_attention_heads=groups * draw(st.integers(1, 2)), head_dim=draw(st.sampled_from((32, 64))),
                qk_rope_head_dim=rope, q_lora_rank=32, o_groups=groups, o_lora_rank=32,
                index_n_heads=draw(st.integers(1, 3)), index_head_dim=32,
                sliding_window=draw(st.sampled_from((1, 2, 4, 16))), index_topk=draw(st.sampled_from((1, 4, 8))),
                candidate_topk_blocks=draw(st.integers(1, 3)),
                candidate_block_size=draw(st.sampled_from((1, 2, 4))), max_position_embeddings=256,
                rope_scaling=RopeScaling(factor=draw(st.sampled_from((1, 4))), original_max_position_embeddings=32))


@st.composite
def table_sizes(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Engram tables of a handful of rows for so many layers."""
    order, heads, at_least = draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.sampled_from((2, 10, 50)))
    sizes = tuple(sum(primes) for primes in table_primes(layers, (order - 1) * heads, at_least))
    return dict(engram_num_embeddings=sizes, engram_vocab_size=at_least, engram_max_ngram_size=order,
                engram_n_heads=heads, engram_head_dim=32, engram_compressed_vocab_size=draw(st.sampled_from((16, 64))))


@st.composite
def configs(draw: st.DrawFn, max_layers: int = 8, **fixed: Any) -> V41Config:
    """A valid config of at most `max_layers` layers or so; `fixed` fields are as given."""
    plan = draw(layer_plans(max_layers))
    experts = draw(st.integers(1, 4))
    sizes = dict(vocab_size=64, hidden_size=draw(st.sampled_from((32, 64))), moe_intermediate_size=32,
                 n_routed_experts=experts, num_experts_per_tok=draw(st.integers(1, experts)),
                 hc_mult=draw(st.sampled_from((1, 2, 4))), hc_sinkhorn_iters=draw(st.sampled_from((1, 3, 20))),
                 num_nextn_predict_layers=0, image_token_id=draw(st.sampled_from((None, 63))),
                 weight_dtype=draw(st.sampled_from(("bf16", "fp8"))),
                 expert_dtype=draw(st.sampled_from(("bf16", "fp4"))))
    tables = draw(table_sizes(len(plan["engram_layer_ids"])))
    return V41Config(**{**plan, **draw(attention_sizes()), **sizes, **tables, **fixed})
