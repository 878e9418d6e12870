"""Released checkpoints load as stored, tensor by tensor, and what does not fit is listed together."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.model_def.stored import QUANTISED, same_bits, same_model, written
from tests.strategies.configs import configs
from v41.model_def import checkpoint as checkpoint_file
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import INDEX, TOKEN_MAP, WEIGHTS, load_checkpoint, save_checkpoint, slots
from v41.model_def.config import V41Config
from v41.model_def.engram import Engram
from v41.model_def.errors import (
    CheckpointError,
    CheckpointFileError,
    CheckpointNotWritten,
    FileUnreadable,
    LogitsAreNoNumbers,
    TokenizerOfAnother,
    TokenizersMissing,
    TokenMapError,
)
from v41.model_def.generation import greedy
from v41.model_def.linear import Fp8Linear
from v41.model_def.model import V41ForCausalLM
from v41.model_def.moe import MoE
from v41.tools.inspect import first_layers


@pytest.fixture
def released(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A quantised model's folder, and its tensors to be changed and written again."""
    return tmp_path, written(tmp_path)


def test_golden_weights_load_as_stored(golden: Golden) -> None:  # noqa: F811
    model = V41ForCausalLM(golden.config)
    summary = load_checkpoint(model, golden.folder)
    assert (summary.loaded, summary.not_used) == (len(golden.weights), ())
    assert "modulo" in summary.token_map
    targets = slots(model)
    assert targets.keys() == golden.weights.keys()
    for name, stored in golden.weights.items():
        assert same_bits(targets[name].parameter, stored), name  # no type grew, no byte changed
    assert model.head.weight.dtype == torch.float32
    assert model.layers[3].attn.compressor.wkv.weight.dtype == torch.bfloat16


def test_golden_weights_survive_writing_in_shards(golden: Golden, tmp_path: Path) -> None:  # noqa: F811
    model, again = V41ForCausalLM(golden.config), V41ForCausalLM(golden.config)
    load_checkpoint(model, golden.folder)
    for engram in (layer.engram for layer in model.layers if layer.engram is not None):
        engram.set_token_map(golden.reference["engram.token_map"])
    save_checkpoint(model, tmp_path, shard_bytes=500_000)
    assert len(list(tmp_path.glob("model-*"))) > 5 and not (tmp_path / WEIGHTS).exists()
    assert V41Config.from_json(tmp_path) == golden.config
    assert load_checkpoint(again, tmp_path).token_map == TOKEN_MAP
    assert same_model(model, again)
    assert torch.equal(again.layers[1].engram.token_map, golden.reference["engram.token_map"])
    files = {f: load_file(tmp_path / f) for f in set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())}
    written = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    packed = {torch.int8: torch.uint8}
    for name, stored in golden.weights.items():  # the released types, pairs as int8
        assert packed.get(written[name].dtype, written[name].dtype) == stored.dtype, name


@given(config=configs(max_layers=4))
@settings(max_examples=8)
def test_any_model_survives_its_file(tmp_path_factory: pytest.TempPathFactory, config: V41Config) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    model, again = V41ForCausalLM(config), V41ForCausalLM(config)
    save_checkpoint(model, folder)
    load_checkpoint(again, folder)
    assert same_model(model, again)


def test_all_misfits_are_listed_together(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = released
    del tensors["layers.0.attn.wq_a.scale"], tensors["layers.2.ffn.experts.3.w2.weight"]
    tensors["layers.1.attn.wo_a.bias"] = torch.zeros(4)
    tensors["layers.6.attn_norm.weight"] = torch.zeros(256, dtype=torch.bfloat16)
    tensors["layers.1.ffn.experts.0.w1.weight"] = torch.zeros(128, 64, dtype=torch.int8)
    tensors["norm.weight"] = torch.zeros(256)
    tensors["embed.weight"] = torch.zeros(500, 256)
    save_file(tensors, folder / WEIGHTS)
    model = V41ForCausalLM(QUANTISED)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, folder)
    facts = caught.value.facts
    assert facts["missing"] == ("layers.0.attn.wq_a.scale", "layers.2.ffn.experts.3.w2.weight")
    assert facts["unexpected"] == ("layers.1.attn.wo_a.bias", "layers.6.attn_norm.weight")
    assert facts["shape"] == (
        "embed.weight is (500, 256), the model has (512, 256)",
        "layers.1.ffn.experts.0.w1.weight is (128, 64), the model has (128, 128)",
    )
    assert facts["dtype"] == (
        "embed.weight is torch.float32, the model takes torch.bfloat16",
        "norm.weight is torch.float32, the model takes torch.bfloat16",
    )
    assert facts["count"] == 8 and str(folder) in str(caught.value)
    assert all(same_bits(before[name], p) for name, p in model.named_parameters())  # nothing half loaded


def test_draft_and_vision_are_named_as_not_used(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = released
    extra = (
        "mtp.0.main_norm.weight",
        "vision.blocks.0.norm.weight",
        "aligner.weight",
        "image_start",
        "image_end",
        "image_newline",
        "layers.2.ffn.gate.bias_vl",
    )
    save_file(tensors | {name: torch.zeros(2) for name in extra}, folder / WEIGHTS)
    assert load_checkpoint(V41ForCausalLM(QUANTISED), folder).not_used == tuple(sorted(extra))


def drop_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def point_at_a_lost_shard(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": "model-00001-of-00002.safetensors"}}))


def test_the_index_says_which_file_holds_a_tensor(released: tuple[Path, dict[str, Tensor]]) -> None:
    """Another file may hold one of that name, as shards of an earlier checkpoint do."""
    folder, tensors = released
    other = {"norm.weight": tensors["norm.weight"] + 1}
    for file, held in (("a.safetensors", tensors), ("b.safetensors", other)):
        save_file(held, folder / file)

    def index(places: dict[str, str]) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    places = dict.fromkeys(tensors, "a.safetensors")
    index(places | {"norm.weight": "b.safetensors"})
    model = V41ForCausalLM(QUANTISED)
    load_checkpoint(model, folder)
    assert torch.equal(model.norm.weight, other["norm.weight"])
    moved, twice = sorted(tensors)[:9], sorted(tensors)[9:12]
    save_file({name: tensors[name] for name in twice} | {"x": torch.ones(1)}, folder / "b.safetensors")
    for name in twice:
        del places[name]
    index(places | dict.fromkeys([*moved, "mtp.0.norm.weight"], "b.safetensors"))
    with pytest.raises(CheckpointError) as caught:  # all of them, and what else does not fit
        load_checkpoint(model, folder)
    facts = caught.value.facts
    assert facts["misplaced"] == (
        *(f"{name} is not in b.safetensors, where {INDEX} puts it" for name in moved),
        *(f"{name} is in a.safetensors and in b.safetensors, and {INDEX} names neither" for name in twice),
        f"mtp.0.norm.weight is not in b.safetensors, where {INDEX} puts it",
    )
    assert (facts["missing"], facts["unexpected"], facts["shape"], facts["count"]) == ((), ("x",), (), 14)
    save_checkpoint(model, folder)  # whole: the shards that lie there are no longer the checkpoint
    again = V41ForCausalLM(QUANTISED)
    load_checkpoint(again, folder)
    assert same_model(model, again)


@pytest.mark.parametrize(("damage", "named"), [(drop_weights, WEIGHTS), (point_at_a_lost_shard, "model-00001-of")])
def test_a_folder_without_its_files_is_refused(
    released: tuple[Path, dict[str, Tensor]], damage: Callable[[Path], None], named: str
) -> None:
    folder, _ = released
    damage(folder)
    with pytest.raises(CheckpointFileError, match=named):
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)


@pytest.mark.parametrize("name, content", [
    ("model.safetensors", None),  # cut short
    ("model.safetensors", b"no tensors at all"),
    ("model.safetensors.index.json", b"{"),
    ("model.safetensors.index.json", b"{}"),
    (TOKEN_MAP, None),
])  # fmt: skip
def test_a_damaged_file_is_named(released: tuple[Path, dict[str, Tensor]], name: str, content: bytes | None) -> None:
    folder, _ = released
    file = folder / name
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(FileUnreadable) as caught:
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
    assert caught.value.where == file


@pytest.mark.parametrize("ids", [
    torch.arange(3.0), torch.arange(0), torch.tensor([0, 1]), torch.ones(9, dtype=torch.bool),
    torch.zeros(9, dtype=torch.uint8).view(torch.float8_e8m0fnu)])  # fmt: skip
def test_a_token_map_needs_integers_and_the_pad_token(released: tuple[Path, dict[str, Tensor]], ids: Tensor) -> None:
    with pytest.raises(TokenMapError):
        Engram(QUANTISED, 0).set_token_map(ids)
    if ids.dtype == torch.bool:  # which has no likeness in DTYPES
        return
    folder, _ = released
    save_file({"token_map": ids}, folder / TOKEN_MAP)
    with pytest.raises(TokenMapError):
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)


def test_a_wrong_token_map_names_the_layer(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = released
    save_file({"token_map": torch.arange(300)}, folder / TOKEN_MAP)
    with pytest.raises(TokenMapError, match=r"layers\.0\.engram"):
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)


def test_a_tokenizer_that_is_none_is_named(released: tuple[Path, dict[str, Tensor]]) -> None:
    pytest.importorskip("tokenizers")
    folder, _ = released
    (folder / TOKEN_MAP).unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FileUnreadable, match="no tokenizer") as caught:
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
    assert caught.value.where == folder / "tokenizer.json"


def test_without_the_package_a_tokenizer_is_no_damaged_file(
    released: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = released
    (folder / TOKEN_MAP).unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizersMissing, match="pip install tokenizers"):
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)


def test_the_token_map_comes_from_a_tokenizer(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = released
    write_tokenizer(folder, {"[PAD]": 0, "Hello": 1, "hello": 2, "HÉLLO": 3, "world": 4})
    model = V41ForCausalLM(QUANTISED.replace(engram_compressed_vocab_size=3))
    assert load_checkpoint(model, folder).token_map == "tokenizer.json"
    assert model.layers[1].engram.token_map[:6].tolist() == [0, 1, 1, 1, 2, 1]  # beyond the end: as padding, id 2


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (folder / TOKEN_MAP).unlink(missing_ok=True)
    words = tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def test_ids_that_no_token_has_count_as_one_empty_text(tmp_path: Path) -> None:
    """Of 6 ids a tokenizer has 4: those behind a gap have their own texts all the same."""
    config = QUANTISED.replace(engram_compressed_vocab_size=4)
    save_checkpoint(V41ForCausalLM.random(config), tmp_path)
    write_tokenizer(tmp_path, {"[PAD]": 0, "Hello": 1, "hello": 4, "world": 5})
    model = V41ForCausalLM.from_checkpoint(tmp_path)
    assert model.layers[1].engram.token_map[:7].tolist() == [0, 1, 2, 2, 1, 3, 2]


@pytest.mark.parametrize(("vocabulary", "problem"), [
    ({"[PAD]": 0, "Hello": 512}, "a token has id 512, and the model has 512 ids"),
    ({"[PAD]": 0, "Hello": 2**20}, f"a token has id {2**20}, and the model has 512 ids"),
    ({"[PAD]": 0, "Hello": 1, "hello": 2}, "its tokens have 2 different texts, and the model's tables count on 256"),
    ({}, "its tokens have 0 different texts, and the model's tables count on 256"),
])  # fmt: skip
def test_a_tokenizer_of_another_model_is_refused(
    released: tuple[Path, dict[str, Tensor]], vocabulary: dict[str, int], problem: str
) -> None:
    folder, _ = released
    write_tokenizer(folder, vocabulary)
    with pytest.raises(TokenizerOfAnother) as caught:
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
    assert caught.value.facts["problem"] == problem and caught.value.where == folder / "tokenizer.json"


def test_a_gate_may_be_fp32(released: tuple[Path, dict[str, Tensor]]) -> None:
    """As all that is multiplied in fp32: it keeps the file's type, and the same numbers give the same logits."""
    folder, tensors = released
    name, ids = "layers.2.ffn.gate.weight", list(range(20))

    @torch.no_grad()
    def logits() -> Tensor:
        model = V41ForCausalLM.from_checkpoint(folder)
        assert model.layers[2].ffn.gate.weight.dtype == tensors[name].dtype
        cache = Cache.zeros(QUANTISED, 1, len(ids))
        return model(build_batch(QUANTISED, cache, [Chunk(ids, 0, 0)]), cache)

    narrow = logits()
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / WEIGHTS)
    assert torch.equal(logits(), narrow)
    tensors["layers.2.ffn.gate.bias"] = tensors["layers.2.ffn.gate.bias"].bfloat16()
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"gate\.bias is torch\.bfloat16"):
        logits()


def test_tables_of_a_loaded_model_may_be_written_and_the_file_keeps_its_own(
    released: tuple[Path, dict[str, Tensor]],
) -> None:
    folder, tensors = released
    model, other = V41ForCausalLM.from_checkpoint(folder), V41ForCausalLM.random(QUANTISED, seed=9)
    model.load_state_dict(other.state_dict())
    model.layers[0].engram.embed.scale[3:].fill_(127)
    assert same_bits(model.layers[1].engram.embed.weight, other.layers[1].engram.embed.weight)
    assert all(same_bits(tensor, tensors[name]) for name, tensor in load_file(folder / WEIGHTS).items())


def test_a_model_may_be_written_over_the_file_it_maps(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = released
    model = V41ForCausalLM.from_checkpoint(folder)
    save_checkpoint(V41ForCausalLM.random(QUANTISED, seed=9), folder)
    assert all(same_bits(slot.parameter, tensors[name]) for name, slot in slots(model).items())
    save_checkpoint(model, folder)
    assert same_model(model, V41ForCausalLM.from_checkpoint(folder)) and not list(folder.glob("*.partial"))


@pytest.mark.parametrize("folder", ["a file", "a file/below", "x" * 300, "a\0b", "/proc/nothing", "full"])
def test_a_folder_that_cannot_be_written_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = V41ForCausalLM(first_layers(QUANTISED, 1))
    (tmp_path / "a file").write_text("")
    if folder == "full":
        refused = SafetensorError("Error while serializing: No space left on device")
        monkeypatch.setattr(checkpoint_file, "save_file", Mock(side_effect=refused))
    with pytest.raises(CheckpointNotWritten) as caught:
        save_checkpoint(model, tmp_path / folder)
    assert caught.value.where == tmp_path / folder
    assert not list(tmp_path.glob("**/*.partial"))


def test_a_model_without_values_is_not_written(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = V41ForCausalLM(first_layers(QUANTISED, 1))
    with pytest.raises(CheckpointNotWritten, match="meta device"):
        save_checkpoint(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "x" * 5000])
def test_a_folder_of_no_possible_name_is_refused(name: str, tmp_path: Path) -> None:
    for read in (V41ForCausalLM.from_checkpoint, V41Config.from_json):
        with pytest.raises((CheckpointFileError, FileUnreadable)):
            read(tmp_path / name)
    with pytest.raises(CheckpointFileError):
        load_checkpoint(V41ForCausalLM(QUANTISED), tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": name}}))
    with pytest.raises(CheckpointFileError, match="no "):
        load_checkpoint(V41ForCausalLM(QUANTISED), tmp_path)


def test_quantised_weights_stay_small(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = released
    model = V41ForCausalLM(QUANTISED)
    load_checkpoint(model, folder)
    held, stored = (sum(t.nbytes for t in ts) for ts in (model.parameters(), tensors.values()))
    assert held == stored
    assert all(m.weight.dtype == torch.float8_e4m3fn for m in model.modules() if isinstance(m, Fp8Linear))


@pytest.mark.parametrize("name", ["layers.2.ffn.experts.3.w1.scale", "layers.0.attn.wq_b.scale"])
def test_a_scale_that_is_no_number_is_named(released: tuple[Path, dict[str, Tensor]], name: str) -> None:
    """The clamp behind w1 would make 10 of the infinity that it decodes to."""
    folder, tensors = released
    tensors[name].view(torch.uint8)[5:7, 1] = 254
    save_file(tensors, folder / WEIGHTS)
    load_checkpoint(V41ForCausalLM(QUANTISED), folder)  # the largest scale that is one
    tensors[name].view(torch.uint8)[5:7, 1] = 255
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(FileUnreadable, match=rf"2 scale\(s\) of {name} are no numbers") as caught:
        load_checkpoint(V41ForCausalLM(QUANTISED), folder)
    assert caught.value.where == folder / WEIGHTS


@torch.no_grad()
def test_a_row_of_a_table_whose_scale_is_no_number_is_seen(released: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = released
    tensors["layers.0.engram.embed.scale"].view(torch.uint8)[:] = 255
    save_file(tensors, folder / WEIGHTS)
    model, cache = V41ForCausalLM.from_checkpoint(folder), Cache.zeros(QUANTISED, 1, 8)
    logits = model(build_batch(QUANTISED, cache, [Chunk([1, 2, 3], 0, 0)]), cache)
    with pytest.raises(LogitsAreNoNumbers):
        greedy(logits)


class Part(nn.Module):
    """A layer without its attention."""

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        self.config, self.engram, self.ffn = config, Engram(config, 1), MoE(config)


@pytest.mark.parametrize("config", [QUANTISED, V41Config.preset("tiny")], ids=["quantised", "bf16"])
def test_a_meta_model_is_made_as_it_loads(config: V41Config, tmp_path: Path) -> None:
    whole = Part(config)
    save_checkpoint(whole, tmp_path)
    with torch.device("meta"):
        made = Part(config)
    load_checkpoint(made, tmp_path)
    for (name, a), (_, b) in zip(whole.named_parameters(), made.named_parameters(), strict=True):
        assert same_bits(a, b) and a.requires_grad == b.requires_grad, name
    assert all(torch.equal(a, b) for a, b in zip(made.buffers(), whole.buffers(), strict=True))
