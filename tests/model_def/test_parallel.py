"""Two and four processes give the logits of one, each with its parts of the checkpoint; one alone has no collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model_def.exact import exact
from tests.model_def.ranks import IDS, agreement, logits_of, run_ranks
from tests.model_def.rows import QUICK, TINY
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import WEIGHTS, load_checkpoint, save_checkpoint, slots
from v41.model_def.errors import CheckpointError, NoSuchRank, PartOfAModel, RankAlone, ShareNotWhole
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import Share, split_dimension
from v41.model_def.quantization import dequantize_fp8_weight, quantize_fp8_weight
from v41.tools.compare import JUDGED
from v41.tools.inspect import first_layers

FOUR = TINY.replace(o_groups=4)
QUANTISED = FOUR.replace(weight_dtype="fp8", expert_dtype="fp4")
THREE = QUANTISED.replace(
    num_attention_heads=6, o_groups=3, hidden_size=192, moe_intermediate_size=96, vocab_size=510)  # fmt: skip
KINDS = {"bf16": FOUR, "quantised": QUANTISED, "in threes": THREE}
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "wait_tensor")


def check_agrees(ours: Tensor, model: V41ForCausalLM) -> None:
    found = agreement(ours, model)
    assert len(found.rows) >= JUDGED and found.holds, (found.failed, found.max_kl, found.moved)


def test_a_rank_left_out_of_one_sum_is_seen() -> None:
    model, other = (V41ForCausalLM.random(FOUR, seed=1) for _ in range(2))
    other.layers[4].attn.wo_b.weight.data[:, ::4] = 0  # as many columns as one rank of four has
    assert not agreement(logits_of(other), model).holds


every_share = pytest.mark.parametrize(("kind", "world"), [
    ("bf16", 2), ("quantised", 4), ("in threes", 3), pytest.param("bf16", 4, marks=pytest.mark.slow),
    pytest.param("quantised", 2, marks=pytest.mark.slow)])  # fmt: skip


@every_share
def test_ranks_give_the_logits_of_one(kind: str, world: int, tmp_path: Path) -> None:
    model = V41ForCausalLM.random(KINDS[kind], seed=1)
    save_checkpoint(model, tmp_path)
    first, *others = run_ranks(tmp_path, world)
    assert all(torch.equal(first, other) for other in others)
    check_agrees(first, model)


@pytest.mark.slow
def test_ranks_compile(tmp_path: Path) -> None:
    model = V41ForCausalLM.random(FOUR, seed=1)
    save_checkpoint(model, tmp_path)
    check_agrees(run_ranks(tmp_path, 2, compiled="v41")[0], model)


def load_shares(folder: Path, world: int) -> list[V41ForCausalLM]:
    """Each rank's part of the model, in this process and without a group."""
    return [V41ForCausalLM.from_checkpoint(folder, share=Share(rank, world)) for rank in range(world)]


@every_share
@torch.no_grad()
def test_parts_of_sublayers_add_up(kind: str, world: int, tmp_path: Path) -> None:
    """Each attention and each MoE by itself, to the rounding of its parts: no head or channel is lost or doubled."""
    model = V41ForCausalLM.random(KINDS[kind], seed=2)
    save_checkpoint(model, tmp_path)
    seen = {"attn": [], "ffn": []}
    for layer in model.layers:
        layer.attn.register_forward_hook(lambda _, args, result: seen["attn"].append((args, result[0])))
        layer.ffn.register_forward_hook(lambda _, args, result: seen["ffn"].append((args, result)))
    cache = Cache.zeros(model.config, 1, 64)
    model(build_batch(model.config, cache, [Chunk(IDS[0], 0, 0)]), cache)
    shares = load_shares(tmp_path, world)
    for i in range(model.config.num_hidden_layers):
        for name, calls in seen.items():
            args, whole = calls[i]
            results = [getattr(share.layers[i], name)(*args) for share in shares]  # writes the same into the cache
            parts = torch.stack([y[0] if isinstance(y, tuple) else y for y in results])
            error = (parts.float().sum(0) - whole.float()).norm() / whole.float().norm()
            assert error < 2**-8, (name, i, error)
    h = torch.randn(3, model.config.hidden_size).bfloat16()
    with exact():  # a library tiles 170 columns otherwise than 510
        assert torch.equal(torch.cat([share.head(h) for share in shares], -1), model.head(h))
    ids = torch.tensor([0, 7, model.config.vocab_size - 1])
    assert torch.equal(torch.cat([share.embed(ids) for share in shares], -1), model.embed(ids))


def test_every_rank_reads_its_part_and_all_parts_are_the_whole(tmp_path: Path) -> None:
    config = first_layers(QUANTISED, 2)
    model = V41ForCausalLM.random(config)
    save_checkpoint(model, tmp_path)
    shares, whole = load_shares(tmp_path, 4), slots(model)
    split = [name for name in whole if split_dimension(name) is not None]
    # embedding and head; attention without fp8 scales of wo_a
    assert len(split) == 2 + 2 * (6 + 6 * (1 + config.n_routed_experts))
    for name, slot in whole.items():
        parts, dim = [slots(share)[name].parameter for share in shares], split_dimension(name)
        if dim is None:
            assert all(torch.equal(as_bytes(part), as_bytes(slot.parameter)) for part in parts), name
        else:
            assert torch.equal(torch.cat([as_bytes(part) for part in parts], dim), as_bytes(slot.parameter)), name
    held = [sum(p.nbytes for p in share.layers[1].ffn.experts.parameters()) for share in shares]
    assert held == [sum(p.nbytes for p in model.layers[1].ffn.experts.parameters()) // 4] * 4


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def test_wo_a_in_fp8_is_shared_too(tmp_path: Path) -> None:
    save_checkpoint(V41ForCausalLM.random(first_layers(QUANTISED, 2)), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "layers.1.attn.wo_a.weight"
    tensors[name], scale = quantize_fp8_weight(tensors[name])
    tensors["layers.1.attn.wo_a.scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / WEIGHTS)
    shares = load_shares(tmp_path, 2)
    for stored, part in ((tensors[name], "weight"), (scale, "scale")):
        held = [slots(share)[name.replace("weight", part)].parameter for share in shares]
        assert torch.equal(torch.cat([as_bytes(each) for each in held]), as_bytes(stored))
    decoded = torch.cat([share.layers[1].attn.wo_a.decoded() for share in shares])
    assert torch.equal(decoded, dequantize_fp8_weight(tensors[name], scale))


def test_a_part_that_begins_inside_a_block_of_wo_a_is_refused(tmp_path: Path) -> None:
    """Of a model in bf16 whose file has wo_a in fp8 all the same: 62 rows of it lie in 2 blocks, and 31 in one."""
    config = first_layers(TINY, 1).replace(o_lora_rank=31)
    save_checkpoint(V41ForCausalLM.random(config), tmp_path)
    tensors, name = load_file(tmp_path / WEIGHTS), "layers.0.attn.wo_a.weight"
    tensors[name], scale = quantize_fp8_weight(tensors[name])
    tensors["layers.0.attn.wo_a.scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / WEIGHTS)
    assert V41ForCausalLM.from_checkpoint(tmp_path).layers[0].attn.wo_a.scale.shape == (2, 4)
    with pytest.raises(ShareNotWhole) as caught:
        V41ForCausalLM.from_checkpoint(tmp_path, share=Share(1, 2))
    assert caught.value.facts["sizes"] == {"layers.0.attn.wo_a in groups of 32": 62}


NOT_DIVIDED = [(3, "num_attention_heads"), (4, "o_groups"), (5, "moe_intermediate_size"), (6, "hidden_size")]


@pytest.mark.parametrize(("world", "name"), NOT_DIVIDED)
def test_what_does_not_divide_is_refused(world: int, name: str) -> None:
    with torch.device("meta"), pytest.raises(ShareNotWhole) as caught:
        V41ForCausalLM(TINY, Share(0, world))
    assert name in caught.value.facts["sizes"] and caught.value.facts["world"] == world


EIGHT = TINY.replace(num_attention_heads=8, o_groups=8, o_lora_rank=16)
SPLIT_GROUPS = {  # how weights are held -> what 8 ranks would cut inside of a group of 32
    ("fp8", "fp4"): {"moe_intermediate_size in groups of 32": 128, "o_groups * o_lora_rank in groups of 32": 128},
    ("fp8", "bf16"): {"moe_intermediate_size in groups of 32": 128, "o_groups * o_lora_rank in groups of 32": 128},
    ("bf16", "fp4"): {"moe_intermediate_size in groups of 32": 128},
    ("bf16", "bf16"): {},
}


@pytest.mark.parametrize("kinds", SPLIT_GROUPS)
def test_a_share_that_cuts_a_group_is_refused(kinds: tuple[str, str]) -> None:
    config, expected = EIGHT.replace(weight_dtype=kinds[0], expert_dtype=kinds[1]), SPLIT_GROUPS[kinds]
    with torch.device("meta"):
        V41ForCausalLM(config, Share(3, 4))
        if not expected:
            V41ForCausalLM(config, Share(0, 8))
            return
        with pytest.raises(ShareNotWhole) as caught:
            V41ForCausalLM(config, Share(0, 8))
    assert caught.value.facts == {"world": 8, "sizes": expected}


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (-1, 2), (2, 2), (0, -1), (True, 2), (0, 2.0), (0, None)])
def test_a_rank_that_is_none_is_refused(rank: Any, world: Any) -> None:
    with pytest.raises(NoSuchRank) as caught:
        Share(rank, world)
    assert caught.value.facts == {"rank": rank, "world": world}


def test_a_rank_without_its_group_does_not_run() -> None:
    config = first_layers(QUICK, 1)
    cache = Cache.zeros(config, 1, 16)
    with torch.device("meta"):
        model = V41ForCausalLM(config, Share(1, 2))
    with pytest.raises(RankAlone, match="rank 1 of 2"):
        model(build_batch(config, cache, [Chunk(IDS[0], 0, 0, 9)]), cache)


def test_a_part_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(PartOfAModel, match="rank 1 of 2"):
        save_checkpoint(V41ForCausalLM(TINY, Share(1, 2)), tmp_path)


def test_a_file_of_another_size_is_listed_by_its_whole_shape(tmp_path: Path) -> None:
    save_checkpoint(V41ForCausalLM.random(FOUR), tmp_path)
    with torch.device("meta"):
        model = V41ForCausalLM(FOUR.replace(moe_intermediate_size=256), Share(0, 2))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, tmp_path)
    shapes = caught.value.facts["shape"]
    assert "layers.0.ffn.experts.0.w1.weight is (128, 256), the model has (256, 256)" in shapes
    assert len(shapes) == FOUR.num_hidden_layers * 3 * (1 + FOUR.n_routed_experts)


class Collectives(TorchDispatchMode):
    """How often each of COLLECTIVES is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = dict.fromkeys(COLLECTIVES, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.found[func._opname] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def collectives(model: V41ForCausalLM) -> tuple[dict[str, int], Tensor]:
    """Those of a step, and what it returns."""
    cache = Cache.zeros(model.config, 1, 16)
    with Collectives() as mode:
        logits = model(build_batch(model.config, cache, [Chunk(IDS[0], 0, 0, 9)]), cache)
    return mode.found, logits


def test_one_process_has_no_collective_and_several_have_two_a_layer() -> None:
    config = first_layers(QUICK, 1)
    found, _ = collectives(V41ForCausalLM.random(config))
    assert found == dict.fromkeys(COLLECTIVES, 0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        found, logits = collectives(V41ForCausalLM(config, Share.of_group(dist.group.WORLD)))
    finally:
        dist.destroy_process_group()
    assert found == {"all_reduce": 2, "all_gather_into_tensor": 2, "wait_tensor": 4}
    assert logits.shape == (1, config.vocab_size)
