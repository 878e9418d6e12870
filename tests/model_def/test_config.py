"""A config that contradicts itself says every rule it breaks; roles and boundary counts follow from its fields."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.strategies.configs import configs
from v41.model_def.config import FLAT_NAMES, BoundarySites, RopeScaling, V41Config
from v41.model_def.config_rules import RULES, broken_rules
from v41.model_def.engram_constants import PCG64, is_prime, multipliers, table_offsets, table_primes
from v41.model_def.errors import (
    CheckpointFileError,
    ConfigError,
    ConfigFileError,
    FileUnreadable,
    ModelError,
    UnknownPreset,
)
from v41.model_def.model import V41ForCausalLM

FLAWS: dict[str, dict[str, Any]] = {  # rule -> a change of `tiny` that breaks this rule and no other
    "a field with one supported value has it": dict(scoring_func="softmax"),
    "storage and replay have a known name": dict(expert_dtype="int4"),
    "sizes, limits and eps are positive": dict(sliding_window=0),
    "sizes and counts are such as can be made": dict(n_routed_experts=2**31),
    "every layer has a ratio": dict(num_hidden_layers=7),
    "a ratio is 0, 1 or 2": dict(compress_ratios=(0, 2, 2, 1, 1, 1, 4)),
    "layer lists are ascending layers of the model": dict(index_source_layer_ids=(1, 5, 3)),
    "a layer with a ratio comes after a KV source": dict(
        compress_ratios=(2, 2, 2, 1, 1, 1), index_source_layer_ids=(0, 1, 3, 5)),
    "a layer with a ratio comes after an index source": dict(index_source_layer_ids=(3, 5), kv_source_layer_ids=(1, 3)),
    "a KV source has a ratio": dict(kv_source_layer_ids=(0, 1, 3), index_source_layer_ids=(0, 1, 3, 5)),
    "an index source reads a KV source": dict(index_source_layer_ids=(0, 1, 3, 5)),
    "a reader has its KV source's ratio": dict(compress_ratios=(0, 2, 2, 1, 2, 1)),
    "a KV source picks among its own entries": dict(kv_source_layer_ids=(1, 2, 3)),
    "the candidate source is a KV source and an index source": dict(candidate_source_layer_id=5),
    "the heads divide into the output groups": dict(o_groups=3),
    "the rotated part is even": dict(qk_rope_head_dim=15),
    "the rotated part fits the heads": dict(qk_rope_head_dim=66),
    "YaRN stretches: factor >= 1, beta_fast >= beta_slow > 0": dict(rope_scaling=RopeScaling(beta_slow=33)),
    "quantised sizes are multiples of 32": dict(index_head_dim=48),
    "top-k is at most the experts": dict(num_experts_per_tok=9),
    "every Engram layer has a table size": dict(engram_num_embeddings=(660,)),
    "n-grams have at least two tokens": dict(engram_max_ngram_size=1),
    "Engram table sizes are the sums of its primes": dict(engram_num_embeddings=(660, 865)),
    "special tokens are in the vocabulary": dict(engram_pad_token_id=512),
    "the compressed vocabulary is no larger than the vocabulary": dict(engram_compressed_vocab_size=513),
    "draft taps are layers of the model": dict(dspark_target_layer_ids=(6,)),
}
ALSO = {  # a flaw that cannot come alone: what else it breaks
    "a KV source has a ratio": {"an index source reads a KV source"},
    "a layer with a ratio comes after an index source": {"a KV source picks among its own entries"},
}


@pytest.mark.parametrize("rule", FLAWS)
def test_names_the_rule_a_flawed_config_breaks(rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        V41Config.preset("tiny").replace(**FLAWS[rule])
    assert {broken for broken, _ in caught.value.facts["broken"]} == {rule} | ALSO.get(rule, set())
    assert "\n  at   " in str(caught.value) and "\n  fix  " in str(caught.value)


def test_every_rule_has_a_flaw() -> None:
    assert FLAWS.keys() == dict(RULES).keys()


@pytest.mark.parametrize(("dtypes", "field", "size", "broken"), [
    (dict(weight_dtype="fp8"), "q_lora_rank", 48, True), (dict(weight_dtype="bf16"), "q_lora_rank", 48, False),
    (dict(expert_dtype="fp4"), "moe_intermediate_size", 80, True), (dict(weight_dtype="fp8"), "o_lora_rank", 40, True),
    (dict(), "moe_intermediate_size", 80, False), (dict(), "engram_head_dim", 48, True),
    (dict(), "head_dim", 48, True)])
def test_group_sizes_bind_what_is_quantised(dtypes: dict[str, str], field: str, size: int, broken: bool) -> None:
    build = lambda: V41Config.preset("tiny").replace(**dtypes, **{field: size})
    if broken:
        with pytest.raises(ConfigError, match=f"multiples of 32: .*{field}"):
            build()
    else:
        build()


def test_values_of_another_type_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        V41Config(hidden_size="5120", engram_layer_ids=(1, 14.0), tie_word_embeddings=0, rope_theta=1)
    assert [culprit for _, culprit in caught.value.facts["broken"]] == [
        "hidden_size is '5120', not int", "tie_word_embeddings is 0, not bool",
        "engram_layer_ids is (1, 14.0), not tuple[int, ...]"]


def test_lists_all_contradictions_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        V41Config(o_groups=3, num_experts_per_tok=400, kv_source_layer_ids=(8, 14, 20))
    assert [rule for rule, _ in caught.value.facts["broken"]] == [
        "a layer with a ratio comes after a KV source", "the heads divide into the output groups",
        "top-k is at most the experts"]
    assert isinstance(caught.value, ValueError)


@given(configs())
def test_drawn_configs_are_valid_and_their_roles_consistent(config: V41Config) -> None:
    assert broken_rules(config) == []
    for role in config.roles:
        assert (role.ratio == 0) == (role.kv_source is None) == (role.index_source is None)
        if role.kv_source is not None and role.index_source is not None:
            assert role.kv_source <= role.index_source <= role.layer  # picks number the entries of this source
            assert config.roles[role.kv_source].ratio == role.ratio
            assert config.roles[role.kv_source].owns_compressor and config.roles[role.index_source].owns_indexer
        if role.candidate_source is not None:
            assert role.owns_indexer and not role.owns_compressor and role.kv_source == role.candidate_source
        assert role.makes_candidates == (role.layer == config.candidate_source_layer_id)


@given(configs())
def test_boundary_sites_are_what_a_walk_over_the_sublayers_counts(config: V41Config) -> None:
    sites = {"entry": 0, "seam": 0, "after_engram": 0}
    pending = False  # a sublayer's output not yet in the streams
    for role in config.roles:
        for sublayer in ("attn", "ffn"):
            after_engram = sublayer == "attn" and role.engram and pending
            sites["after_engram" if after_engram else "seam" if pending else "entry"] += 1
            pending = True
    assert config.boundary_sites() == BoundarySites(sites["entry"], sites["seam"], sites["after_engram"], exit=1)
    assert config.boundary_sites().coefficient_sites == 2 * config.num_hidden_layers


def test_flash_is_the_released_model() -> None:
    flash = V41Config.preset("flash")
    assert flash.boundary_sites() == BoundarySites(entry=1, seams=77, after_engram=2, exit=1)
    assert [r.layer for r in flash.roles if r.owns_compressor] == [2, 8, 14, 20]
    assert [r.layer for r in flash.roles if r.candidate_source == 20] == [24, 28, 32, 36]
    assert sum(1 for r in flash.roles if r.ratio and not r.owns_indexer) == 30
    assert (flash.roles[19].kv_source, flash.roles[27].index_source, flash.roles[39].kv_source) == (14, 24, 20)
    assert flash.engram_width == 6144 and flash.n_coefficients == 24 and flash.last_kv_source == 20


def test_presets_have_every_kind_of_layer() -> None:
    def kinds(config: V41Config) -> set[tuple[int, str]]:
        return {(r.ratio, "source" if r.owns_compressor else "reindexer" if r.owns_indexer else "reader")
                for r in config.roles}
    for name in ("tiny", "bench"):
        assert kinds(V41Config.preset(name)) == kinds(V41Config.preset("flash")), name
    bench = V41Config.preset("bench")
    released = V41Config.preset("flash")
    assert bench.last_kv_source * 2 == bench.num_hidden_layers and max(bench.engram_num_embeddings) <= 1_000_000
    for width in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "engram_head_dim"):
        assert getattr(bench, width) == getattr(released, width)
    with pytest.raises(UnknownPreset, match="bench, flash, tiny"):
        V41Config.preset("large")


@given(config=configs())
@settings(max_examples=20)
def test_a_config_survives_its_file(tmp_path_factory: pytest.TempPathFactory, config: V41Config) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config.to_json()))
    assert V41Config.from_json(path) == V41Config.from_json(path.parent) == config


def test_reads_the_golden_config(golden: Golden) -> None:  # noqa: F811
    config = golden.config
    assert (config.weight_dtype, config.expert_dtype, config.compress_rope_theta) == ("fp8", "fp4", 160000.0)
    assert config.rope_scaling == RopeScaling(factor=4, original_max_position_embeddings=32)
    assert len(config.compress_ratios) == 7 and len(config.roles) == 6
    assert config.boundary_sites() == BoundarySites(entry=1, seams=10, after_engram=1, exit=1)


def flat_file(config: V41Config) -> dict[str, Any]:
    flat_of = {name: flat for flat, name in FLAT_NAMES.items()}
    not_there = {"rope_scaling", "swa_bounded_replay", "num_key_value_heads", "max_position_embeddings"}
    values = {flat_of.get(f.name, f.name): getattr(config, f.name) for f in fields(config) if f.name not in not_there}
    return {**values, "original_seq_len": 65536, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1,
            "vision_dim": 1024}


def test_reads_the_flat_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flat_file(V41Config())))
    assert V41Config.from_json(tmp_path) == V41Config()


def test_a_file_with_other_fields_is_refused_by_name(tmp_path: Path) -> None:
    data = V41Config.preset("tiny").to_json()
    data["text_config"]["mixture_depth"] = 3
    data["text_config"]["rope_scaling"]["mscale"] = 1.0
    del data["text_config"]["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigFileError) as caught:
        V41Config.from_json(tmp_path)
    assert caught.value.facts["unknown"] == ("mixture_depth", "rope_scaling.mscale")
    assert caught.value.facts["missing"] == ("head_dim",)


def test_a_contradiction_in_a_file_names_the_file(tmp_path: Path) -> None:
    data = V41Config.preset("tiny").to_json()
    data["text_config"]["o_groups"] = 3
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"at   .*config\.json"):
        V41Config.from_json(tmp_path)


def test_engram_constants_are_the_released_ones() -> None:
    first, second = table_primes(2, 24, 16_000_000)
    assert (*first[:3], first[-1], second[0], second[-1]) == (
        16000057, 16000079, 16000081, 16000463, 16000477, 16000889)
    assert multipliers(1, 4, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert multipliers(14, 4, 99092) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


@given(st.integers(0, 2**200), st.integers(1, 2**20), st.integers(1, 6))
def test_the_generator_is_numpys(seed: int, compressed: int, orders: int) -> None:
    np = pytest.importorskip("numpy")
    ours = PCG64(seed)
    assert [next(ours) for _ in range(4)] == [int(word) for word in np.random.PCG64(seed).random_raw(4)]
    layer = seed % 100
    drawn = np.random.default_rng(10007 * layer).integers(0, (2**63 - 1) // compressed // 2, orders)
    assert multipliers(layer, orders, compressed) == tuple(2 * int(v) + 1 for v in drawn)


@given(st.integers(0, 3), st.integers(1, 6), st.integers(0, 300))
def test_tables_take_successive_primes(layers: int, per_layer: int, at_least: int) -> None:
    primes = [p for layer in table_primes(layers, per_layer, at_least) for p in layer]
    top = max(primes, default=0)
    assert primes == [n for n in range(at_least, top + 1) if n > 1 and all(n % d for d in range(2, n))]
    for layer in table_primes(layers, per_layer, at_least):
        assert table_offsets(layer) == tuple(sum(layer[:i]) for i in range(per_layer))
    assert not is_prime(1) and is_prime(2) and not is_prime(16_000_057 * 3)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"text_config": 3}', b'{"quantization_config": "fp8"}'])
def test_a_file_that_holds_no_config_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="no such file"):
        V41Config.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FileUnreadable) as caught:
        V41Config.from_json(tmp_path)
    assert caught.value.where == tmp_path / "config.json"


@pytest.mark.parametrize("scaling", [None, "yarn", 4, [4, 32]])
def test_a_scaling_that_is_none_is_refused(scaling: Any, tmp_path: Path) -> None:
    """null does not mean the released YaRN, and this model has no other RoPE behind a compressor."""
    data = V41Config.preset("tiny").to_json()
    data["text_config"]["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"rope_scaling is .*, not RopeScaling") as caught:
        V41Config.from_json(tmp_path)
    assert caught.value.where == tmp_path / "config.json"


@pytest.mark.parametrize("name", ["huge", "", None, 3, ["tiny"]])
def test_a_preset_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(UnknownPreset, match="bench, flash, tiny"):
        V41Config.preset(name)


@pytest.mark.parametrize("changes", [
    dict(rms_norm_eps=math.inf), dict(rope_theta=math.inf), dict(compress_rope_theta=1.0),
    dict(rope_scaling=RopeScaling(factor=math.inf)), dict(rope_scaling=RopeScaling(factor=True)),
    dict(engram_vocab_size=10**30),
])  # fmt: skip
def test_numbers_nobody_can_compute_with_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes)) if "rope_scaling" not in changes else "factor="):
        V41Config.preset("tiny").replace(**changes)


ANYTHING = (None, True, 0, -1, 33, 2**31, 2**63, 10**30, -0.5, 1e300, math.inf, math.nan, "", "fp8", [], [0, 1], [-1],
            ["a"], [[1]], {}, {"a": 1}, [0] * 6)  # fmt: skip
FILE = V41Config.preset("tiny").to_json()
PLACES = [(name,) for name in FILE]
for above in (("text_config",), ("quantization_config",), ("text_config", "rope_scaling")):
    PLACES += [(*above, name) for name in reduce(getitem, above, FILE)]  # type: ignore[misc]


@given(st.sampled_from(PLACES), st.sampled_from(ANYTHING))
@settings(max_examples=300)
def test_any_value_of_any_field_makes_a_model_or_is_refused_by_type(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, ...], value: Any
) -> None:
    *above, name = place
    data = json.loads(json.dumps(FILE))
    reduce(getitem, above, data)[name] = value
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(data))
    try:
        config = V41Config.from_json(path)
    except ModelError as error:
        assert error.where == path
        return
    with torch.device("meta"):
        assert V41ForCausalLM(config).head.weight.shape == (config.vocab_size, config.hidden_size)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="swiglu_limit is nan"):
        V41Config.preset("tiny").replace(swiglu_limit=float("nan"))
    with pytest.raises(ConfigError, match="factor='4'"):
        V41Config.preset("tiny").replace(rope_scaling=RopeScaling(factor="4"))  # type: ignore[arg-type]
