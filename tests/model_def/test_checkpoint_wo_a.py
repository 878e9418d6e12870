"""A release has `attn.wo_a` in fp8: it is held, compiled and written so, and means what its bf16 values mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_def.stored import QUANTISED, same_bits, same_model, written
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import WEIGHTS, load_checkpoint, save_checkpoint, slots
from v41.model_def.errors import CheckpointError
from v41.model_def.linear import Fp8Linear
from v41.model_def.model import V41ForCausalLM
from v41.model_def.quantization import dequantize_fp8_weight, quantize_fp8_weight
from v41.report import collect
from v41.tools.inspect import first_layers


def test_wo_a_may_be_fp8_and_nothing_else(tmp_path: Path) -> None:
    folder, tensors = tmp_path, written(tmp_path)
    for name in ("layers.1.attn.wo_a.weight", "layers.1.attn.indexer.weights_proj.weight"):
        tensors[name], scale = quantize_fp8_weight(tensors[name])
        tensors[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
    assert [line.split()[0] for line in caught.value.facts["dtype"]] == ["layers.1.attn.indexer.weights_proj.weight"]
    assert caught.value.facts["unexpected"] == ("layers.1.attn.indexer.weights_proj.scale",)
    tensors["layers.1.attn.indexer.weights_proj.weight"] = torch.ones(4, 256, dtype=torch.bfloat16)
    del tensors["layers.1.attn.indexer.weights_proj.scale"]
    save_file(tensors, folder / WEIGHTS)
    load_checkpoint(V41ForCausalLM(QUANTISED), folder)


def with_fp8_wo_a(tensors: dict[str, Tensor], layers: Iterable[int]) -> dict[str, Tensor]:
    """The tensors as a release has them: `attn.wo_a` of these layers in fp8, with scales."""
    tensors = dict(tensors)
    for i in layers:
        name = f"layers.{i}.attn.wo_a."
        tensors[name + "weight"], scale = quantize_fp8_weight(tensors[name + "weight"])
        tensors[name + "scale"] = scale.view(torch.float8_e8m0fnu)
    return tensors


@torch.no_grad()
def logits_of(model: V41ForCausalLM) -> Tensor:
    ids = list(range(20))
    cache = Cache.zeros(model.config, 1, len(ids))
    return model(build_batch(model.config, cache, [Chunk(ids, 0, 0, every_logit=True)]), cache)


def test_a_release_has_wo_a_in_fp8_and_it_stays_so(tmp_path: Path) -> None:
    """Held in the file's bytes; the same logits as of its bf16 values; written again as it was read."""
    folder, tensors = tmp_path, written(tmp_path)
    stored = with_fp8_wo_a(tensors, [0, 1, 5])
    save_file(stored, folder / WEIGHTS)
    model = V41ForCausalLM.from_checkpoint(folder)
    assert [type(layer.attn.wo_a) is Fp8Linear for layer in model.layers] == [i in (0, 1, 5) for i in range(6)]
    assert sum(t.nbytes for t in model.parameters()) == sum(t.nbytes for t in stored.values())
    assert all(same_bits(slot.parameter, stored[name]) for name, slot in slots(model).items())

    decoded = {name: tensor for name, tensor in stored.items() if not name.endswith("wo_a.scale")}
    for i in (0, 1, 5):
        name = f"layers.{i}.attn.wo_a."
        scale = stored[name + "scale"].view(torch.uint8)
        decoded[name + "weight"] = dequantize_fp8_weight(stored[name + "weight"], scale)
    (tmp_path / "decoded").mkdir()
    (tmp_path / "decoded" / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(decoded, tmp_path / "decoded" / WEIGHTS)
    other = V41ForCausalLM.from_checkpoint(tmp_path / "decoded")
    assert torch.equal(logits_of(model), logits_of(other))

    save_checkpoint(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    assert again.keys() == stored.keys() and all(same_bits(again[name], stored[name]) for name in stored)
    load_checkpoint(model, tmp_path / "decoded")  # what a model holds follows the file it reads
    assert same_model(model, other)


@pytest.mark.slow
@torch.no_grad()
def test_a_release_compiles_to_the_same_bits_and_its_wo_a_is_known_as_stored(tmp_path: Path) -> None:
    config, ids = first_layers(QUANTISED, 2), list(range(20))
    save_file(with_fp8_wo_a(written(tmp_path, config), range(2)), tmp_path / WEIGHTS)
    model = V41ForCausalLM.from_checkpoint(tmp_path)
    compiled = torch.compile(model, backend="v41", fullgraph=True)
    logits = []
    with collect() as reports:
        for forward in (model, compiled):
            cache = Cache.zeros(config, 1, 20)
            logits.append(forward(build_batch(config, cache, [Chunk(ids, 0, 0, every_logit=True)]), cache))
    regions = [d.region for report in reports for run in report.passes for d in run.decisions if d.region is not None]
    formats = [region.attrs["formats"] for region in regions if region.kind == "output_projection"]
    assert torch.equal(*logits) and set(formats) == {("fp8/32x32", "fp8/32x32")}


def test_a_refused_load_leaves_wo_a_as_it_was(tmp_path: Path) -> None:
    folder, tensors = tmp_path, written(tmp_path)
    stored = with_fp8_wo_a(tensors, [1])
    del stored["norm.weight"]
    save_file(stored, folder / WEIGHTS)
    model = V41ForCausalLM(QUANTISED)
    before = model.layers[1].attn.wo_a
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_checkpoint(model, folder)
    assert model.layers[1].attn.wo_a is before


@pytest.mark.parametrize("wrong", ["type", "blocks"])
def test_scales_of_an_fp8_wo_a_are_checked_too(tmp_path: Path, wrong: str) -> None:
    folder, tensors = tmp_path, written(tmp_path)
    name, scale_name = "layers.1.attn.wo_a.weight", "layers.1.attn.wo_a.scale"
    tensors[name], scale = quantize_fp8_weight(tensors[name])
    stored = scale.view(torch.float8_e8m0fnu)
    tensors[scale_name] = stored.float() if wrong == "type" else torch.cat([stored, stored])
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=scale_name):
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
