"""Two ranks of the golden weights: each sublayer keeps the rounding contract, and whole runs move as far as last bits.

Every weight of this model has unit gain, so one last bit that flips an FP4 value or a pick moves a row far: last bits
alone take rows to a KL of 0.19, and the fixed limit of compare.py says nothing of single rows here. So a whole run is
judged by how far it moves all rows, and what that cannot see, by each sublayer on the reference's own inputs: these
sum in fp64, so an RMS error of one ulp of the result's RMS is what the contract allows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.fp64 import rms, ulp
from tests.golden_data import Golden
from tests.model_def.ranks import agreement, logits_of, run_ranks
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.errors import ShareNotWhole
from v41.model_def.linear import Fp8Linear
from v41.model_def.model import V41ForCausalLM
from v41.model_def.moe import Fp4ExpertLinear
from v41.model_def.parallel import Share
from v41.model_def.step import plan_step
from v41.tools.compare import JUDGED, MOVE_LIMIT


def both_shares(golden: Golden) -> list[V41ForCausalLM]:
    return [V41ForCausalLM.from_checkpoint(golden.folder, share=Share(rank, 2)) for rank in range(2)]


@torch.no_grad()
def errors(golden: Golden, shares: list[V41ForCausalLM]) -> dict[str, float]:
    """How far the sum of all ranks' attention, and of their experts, is from the reference's, layer by layer: the RMS
    error in ulps at the RMS of the reference's."""
    config, ids, steps = golden.config, golden("ids").tolist(), []
    for share in shares:
        cache = Cache.zeros(config, 1, len(ids))
        batch = build_batch(config, cache, [Chunk(ids, 0, 0, int(golden.meta["prefill_tokens"]))])
        steps.append(plan_step(batch, cache, config.sliding_window, share.window_freqs, share.compressed_freqs))
    selections, found = [None] * len(shares), {}
    for i in range(config.num_hidden_layers):
        parts: dict[str, list[Tensor]] = {"attn": [], "ffn": []}
        for rank, share in enumerate(shares):
            layer = share.layers[i]
            y, selections[rank] = layer.attn(golden(f"prefill.L{i}.attn.in"), steps[rank], selections[rank])
            parts["attn"].append(y)
            parts["ffn"].append(layer.ffn(golden(f"prefill.L{i}.ffn.in")))
        for name, (first, second) in parts.items():
            theirs = golden(f"prefill.L{i}.{name}.out").double().view_as(first)
            error = rms((first + second).double() - theirs)
            found[f"{name} {i}"] = error / ulp(rms(theirs), first.dtype)
    return found


def silent(*linears: nn.Module) -> None:
    """A rank that is left out of the sum: its last linears give 0."""
    for linear in linears:
        assert isinstance(linear, Fp8Linear | Fp4ExpertLinear)
        linear.weight.data.view(torch.uint8).zero_()


def copied(to: Tensor, source: Tensor) -> None:
    """The other rank's part of a tensor."""
    assert not torch.equal(to, source)
    to.data.copy_(source)


FAULTS: dict[str, tuple[str, Callable[[nn.Module, nn.Module], None]]] = {  # of one layer, on the second rank
    "left out of the sum of attention": ("attn", lambda ours, other: silent(ours.attn.wo_b)),
    "sinks of the other rank": ("attn", lambda ours, other: copied(ours.attn.attn_sink, other.attn.attn_sink)),
    "A of the other rank": ("attn", lambda ours, other: copied(ours.attn.wo_a.weight, other.attn.wo_a.weight)),
    "left out of the sum of experts": ("ffn", lambda ours, other: silent(ours.ffn.experts.w2)),
    "the shared expert left out": ("ffn", lambda ours, other: silent(ours.ffn.shared_experts.w2)),
    "scales of the other rank": (
        "ffn", lambda ours, other: copied(ours.ffn.experts.w1.scale, other.ffn.experts.w1.scale)),
}  # fmt: skip


def test_sublayers_of_two_ranks_keep_the_rounding_contract(golden: Golden) -> None:
    found = errors(golden, both_shares(golden))
    assert len(found) == 12 and max(found.values()) <= 1, found
    assert errors(golden, [*both_shares(golden)[:1]] * 2)["attn 0"] > 100  # one rank twice


@pytest.mark.parametrize("layer", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_seen_where_it_is(golden: Golden, fault: str, layer: int) -> None:
    name, damage = FAULTS[fault]
    other, ours = both_shares(golden)
    damage(ours.layers[layer], other.layers[layer])
    found = errors(golden, [other, ours])
    assert [place for place, error in found.items() if error > 1] == [f"{name} {layer}"], found


def test_two_ranks_move_no_further_than_last_bits(golden: Golden, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden.folder / name, tmp_path / name)
    first, second = run_ranks(tmp_path, 2)
    assert torch.equal(first, second)
    model, faulty = (V41ForCausalLM.from_checkpoint(golden.folder) for _ in range(2))
    found = agreement(first, model)
    assert len(found.rows) >= JUDGED and found.moved <= MOVE_LIMIT / 2, found.moved
    width = model.layers[0].attn.wo_b.weight.shape[1]
    faulty.layers[0].attn.wo_b.weight.data.view(torch.uint8)[:, width // 2 :] = 0  # the second rank, in one sum
    assert agreement(logits_of(faulty), model).moved > MOVE_LIMIT


@pytest.mark.parametrize(("world", "sizes"), [
    (3, {"num_attention_heads", "o_groups", "moe_intermediate_size", "hidden_size", "vocab_size"}),
    (4, {"o_groups"}), (8, {"num_attention_heads", "o_groups", "moe_intermediate_size in groups of 32"}),
])  # fmt: skip
def test_what_cannot_share_the_golden_weights_is_refused(
    golden: Golden,
    world: int,
    sizes: set[str],
) -> None:
    with pytest.raises(ShareNotWhole) as caught:
        V41ForCausalLM.from_checkpoint(golden.folder, share=Share(world - 1, world))
    assert caught.value.facts["world"] == world and caught.value.facts["sizes"].keys() == sizes
