"""Counts are those of a model taken apart by hand. test_model.py has the released ones."""

from __future__ import annotations

import pytest
import torch

from v41.model_def.config import V41Config
from v41.model_def.counts import count
from v41.model_def.model import V41ForCausalLM

TINY = V41Config.preset("tiny")


def on_meta(config: V41Config) -> V41ForCausalLM:
    with torch.device("meta"):
        return V41ForCausalLM(config)


@pytest.mark.parametrize("held", [{}, dict(weight_dtype="fp8", expert_dtype="fp4")])
def test_counts_do_not_depend_on_how_weights_are_held(held: dict[str, str]) -> None:
    model, found = on_meta(TINY), count(on_meta(TINY.replace(**held)))
    sizes = {name: p.numel() for name, p in model.named_parameters() if "embed.scale" not in name}
    tables = {name for name in sizes if ".engram.embed." in name}
    expert = 3 * TINY.hidden_size * TINY.moe_intermediate_size
    idle = TINY.num_hidden_layers * (TINY.n_routed_experts - TINY.num_experts_per_tok) * expert
    backbone = sum(n for name, n in sizes.items() if name not in tables)
    assert found.engram_tables == sum(TINY.engram_num_embeddings) * TINY.engram_head_dim
    assert found.backbone == backbone
    assert found.decode == backbone - idle - sizes["embed.weight"]
    encoder = [
        name for name in sizes if name.startswith(("layers.0.", "layers.1.", "layers.2.")) and name not in tables
    ]
    assert found.prefill == sum(sizes[name] for name in encoder) - idle // 2


def test_more_experts_cost_memory_and_no_time() -> None:
    one, more = (count(on_meta(TINY.replace(n_routed_experts=n))) for n in (8, 16))
    gates = TINY.num_hidden_layers * 8 * (TINY.hidden_size + 1)
    assert more.decode == one.decode + gates and more.backbone > one.backbone + gates
