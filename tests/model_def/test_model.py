"""The model's parameters bear the released names, and random weights are reproducible and keep numbers in range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.counts import count
from v41.model_def.errors import BatchOfAnotherCache
from v41.model_def.model import V41ForCausalLM
from v41.tools.inspect import first_layers

TINY = V41Config.preset("tiny")


def test_flash_has_the_released_parameters() -> None:
    """Names, shapes, and how many weights there are and a token meets."""
    with torch.device("meta"):
        model = V41ForCausalLM(V41Config.preset("flash"))
    parameters = dict(model.named_parameters())
    assert {name: tuple(parameters[name].shape) for name in RELEASED} == RELEASED
    for name, layers in OWNERS.items():
        owners = {int(key.split(".")[1]) for key in parameters if key.endswith(name)}
        assert owners == set(layers), name
    counts = [n / 1e9 for n in vars(count(model)).values()]
    assert [f"{n:.{digits}f}" for n, digits in zip(counts, (1, 1, 2, 2), strict=True)] == COUNTS


COUNTS = ["551.9", "196.6", "16.13", "7.89"]  # billions: backbone, Engram's tables; a token of decode, of prefill
RELEASED = {
    "embed.weight": (129280, 5120),
    "head.weight": (129280, 5120),
    "norm.weight": (5120,),
    "layers.0.attn.wq_a.weight": (1280, 5120),
    "layers.0.attn.wq_b.weight": (32768, 1280),
    "layers.0.attn.wkv.weight": (512, 5120),
    "layers.0.attn.wo_a.weight": (8192, 4096),
    "layers.0.attn.wo_b.weight": (5120, 8192),
    "layers.0.attn.attn_sink": (64,),
    "layers.2.attn.compressor.wgate.weight": (512, 5120),
    "layers.20.attn.compressor.wkv.weight": (512, 5120),
    "layers.24.attn.indexer.wq_b.weight": (4096, 1280),
    "layers.24.attn.indexer.weights_proj.weight": (32, 5120),
    "layers.20.attn.indexer.wk.weight": (128, 512),
    "layers.20.attn.indexer.k_norm.weight": (128,),
    "layers.39.ffn.gate.weight": (384, 5120),
    "layers.39.ffn.gate.bias": (384,),
    "layers.39.hc_attn_fn": (24, 20480),
    "layers.39.hc_ffn_base": (24,),
    "layers.39.hc_ffn_scale": (3,),
    "layers.14.engram.wkv.weight": (25600, 6144),
    "layers.14.engram.q_weight": (4, 5120),
}
OWNERS = {  # end of a name -> the layers that have it
    "attn.compressor.wkv.weight": (2, 8, 14, 20),
    "attn.compressor.wgate.weight": (2, 8, 14),
    "attn.indexer.wq_b.weight": (2, 8, 14, 20, 24, 28, 32, 36),
    "attn.indexer.wk.weight": (2, 8, 14, 20),
    "engram.embed.weight": (1, 14),
    "attn.attn_sink": range(40),
}


def test_a_seed_decides_all_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (V41ForCausalLM.random(TINY, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@torch.no_grad()
def test_random_models_give_logits_of_order_one_that_hang_on_the_prompt(weights: str) -> None:
    config = TINY.replace(weight_dtype=weights, expert_dtype="fp4" if weights == "fp8" else "bf16")
    model, cache = V41ForCausalLM.random(config), Cache.zeros(config, 2, 64)
    logits = model(build_batch(config, cache, [Chunk([5] * 40, 0, 0), Chunk([6] + [5] * 39, 0, 1)]), cache)
    assert 0.3 < float(logits.std()) < 3 and not torch.equal(logits[0], logits[1])


WRITERS = ("attn.wo_b", "ffn.experts.w2", "ffn.shared_experts.w2", "engram.wkv")  # into the streams


@torch.no_grad()
def test_random_rows_choose_differently_and_every_sublayer_is_heard() -> None:
    """Damped, yet not deaf: no expert takes all, rows pick their own entries, and no writer can go unnoticed."""
    ids = torch.randint(TINY.vocab_size, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    model, chosen, picked = V41ForCausalLM.random(TINY), list[Tensor](), list[Tensor]()

    def logits() -> Tensor:
        cache = Cache.zeros(TINY, 1, 64)
        return model(build_batch(TINY, cache, [Chunk(ids, 0, 0)]), cache)

    for layer in model.layers:
        layer.ffn.gate.register_forward_hook(lambda _, args, result: chosen.append(result[1]))
        if layer.attn.indexer is not None:
            layer.attn.indexer.register_forward_hook(lambda _, args, result: picked.append(result.picks))
    whole = logits()
    assert len(chosen) == TINY.num_hidden_layers and len(picked) == 3
    assert all(experts.unique().numel() == TINY.n_routed_experts for experts in chosen)
    assert all(len(entries.unique(dim=0)) > 20 for entries in picked)
    for end in WRITERS:
        weights = [p for name, p in model.named_parameters() if name.endswith(f"{end}.weight")]
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        assert weights and (logits() - whole).abs().max() > 0.15, end  # last bits move it by 0.05
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


@pytest.mark.parametrize("slots, capacity", [(8, 64), (2, 128)])
def test_a_batch_of_another_cache_is_refused(slots: int, capacity: int) -> None:
    """Its pads would write slot 2 of a larger cache, and its requests the pad slot of a smaller one."""
    config = first_layers(TINY, 1)
    model, own = V41ForCausalLM.random(config), Cache.zeros(config, 2, 64)
    batch, other = build_batch(config, own, [Chunk([5, 6], 0, 1)]), Cache.zeros(config, slots, capacity)
    before = [ring.clone() for ring in other.rings]
    with torch.no_grad():
        with pytest.raises(BatchOfAnotherCache, match=rf"\(2, 64\), and this one has \({slots}, {capacity}\)"):
            model(batch, other)
        assert all(torch.equal(ring, kept) for ring, kept in zip(other.rings, before, strict=True))
        assert model(batch, Cache.zeros(config, 2, 64)).shape[0] == 1
