"""Models of the `transformers` library, small and random, give eager's bits through v41, at lengths that vary.

What is asked of each: no pass was undone, no rule of verify.py broken, nothing fell back or broke the graph, no site of
mHC was seen, no other became a region save those that a case names, and the same few programs serve all lengths.
transformers is the extra `models`: `make nightly` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import v41
from v41.report import CompileReport

transformers = pytest.importorskip("transformers", reason="an extra of its own: make nightly installs it")
pytestmark = pytest.mark.slow

OF_V4 = ("fold_sinkhorn", "outline_mhc")  # what they look for, no other model has
OPTIONS = {"codegen": "eager", "verify": True}
LENGTHS = (5, 9, 12)
ROWS, VOCABULARY = 2, 96
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
WINDOWED = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tokens(length: int) -> Tensor:
    return 3 + torch.arange(ROWS * length).reshape(ROWS, length) * 7 % (VOCABULARY - 3)


def text(length: int) -> dict[str, Any]:
    return {"input_ids": tokens(length), "use_cache": False}


def both_texts(length: int) -> dict[str, Any]:
    return {**text(length), "decoder_input_ids": tokens(length)}


def words(length: int) -> dict[str, Any]:
    return {"input_ids": tokens(length)}


def images(count: int) -> dict[str, Any]:
    return {"pixel_values": torch.linspace(-1, 1, count * 3 * 16 * 16).reshape(count, 3, 16, 16)}


def speech(length: int) -> dict[str, Any]:
    features = torch.linspace(-1, 1, ROWS * 8 * 32).reshape(ROWS, 8, 32)
    return {"input_features": features, "decoder_input_ids": tokens(length), "use_cache": False}


@dataclass(frozen=True)
class Case:
    """A model class of transformers without its `Config`, what makes it small, what it is called with at a length."""

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[int], dict[str, Any]] = text
    programs: int = 2  # one for the first length, one for all others
    fires: Mapping[str, int] = field(default_factory=dict)  # pass -> regions: what it has in common with V4.1


CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**TEXT, **EXPERTS, "head_dim": 8}),
    "qwen3_next": Case(
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**TEXT, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
        fires={"outline_norm_quantise": 1},  # of rows that are heads of tokens, laid out so
    ),
    "mixtral": Case("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Case(
        "GptOssForCausalLM", "GptOssConfig", {**TEXT, **WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1},
    ),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, **WINDOWED}),
    "gpt2": Case(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    # Compiled, it would take another algorithm than in eager, torch's associative scan, with other last bits. Its loop
    # over positions is unrolled, so each length is a program.
    "mamba": Case(
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
         "use_associative_scan": False},
        programs=3,
    ),
    "t5": Case(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        both_texts,
    ),
    "bert": Case("BertForMaskedLM", "BertConfig", {**TEXT, "num_key_value_heads": 4}, words),
    "whisper": Case(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
         "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        speech,
    ),
    "vit": Case("ViTModel", "ViTConfig", IMAGE, images),
    "clip": Case("CLIPVisionModel", "CLIPVisionConfig", IMAGE, images),
}  # fmt: skip
# The model before V4.1: each mHC boundary predicts its own pre, so its Sinkhorn loops are found and no boundary is. Its
# gates, experts, attention and index scores are others and stay as they are.
V4 = {
    **TEXT, "num_key_value_heads": 1, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16,
    "q_lora_rank": 8, "num_experts_per_tok": 2, "n_routed_experts": 4, "partial_rotary_factor": 0.5, "hc_mult": 3,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"], "sliding_window": 4, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 2, "hc_sinkhorn_iters": 4,
}  # fmt: skip


def made(case: Case) -> torch.nn.Module:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(getattr(transformers, case.config)(**case.settings))
    return model.eval()  # type: ignore[no-any-return]


def tensors(output: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, Tensor)}


def check(case: Case) -> list[CompileReport]:
    """Compares bits at each length, and returns the reports of what was compiled."""
    model = made(case)
    compiled = torch.compile(model, backend="v41", options=OPTIONS)
    with torch.no_grad(), v41.collect() as reports:
        for length in LENGTHS:
            inputs = case.inputs(length)
            expected, found = tensors(model(**inputs)), tensors(compiled(**inputs))
            assert expected.keys() == found.keys() and expected
            for name, value in expected.items():
                assert torch.equal(value, found[name]), (length, name, (value - found[name]).abs().max().item())
    assert [run.failure for report in reports for run in report.passes if run.failure] == []
    assert [report.given_up or report.graph_break for report in reports] == [None] * len(reports)
    assert [report.fallbacks for report in reports] == [[]] * len(reports)
    assert [report.recompiles for report in reports] == list(range(case.programs))
    assert regions_by_pass(reports[-1]) == case.fires
    for report in reports:
        assert regions_by_pass(report).keys() <= case.fires.keys()
    return reports


def regions_by_pass(report: CompileReport) -> dict[str, int]:
    """How many sites became regions, of each pass that found some."""
    made = {run.name: sum(decision.region is not None for decision in run.decisions) for run in report.passes}
    return {name: count for name, count in made.items() if count}


@pytest.mark.parametrize("name", CASES)
def test_small_models_have_eagers_bits_and_no_boundary_is_seen(name: str) -> None:
    for report in check(CASES[name]):
        assert [(run.name, run.decisions) for run in report.passes if run.name in OF_V4] == [(of, []) for of in OF_V4]


def test_deepseek_v4_has_eagers_bits_and_its_sinkhorn_loops_are_folded() -> None:
    """And its compressors are V4.1's but for how many tokens they pool; both layers have one, one has an indexer."""
    fires = {"fold_sinkhorn": 4, "outline_compressor": 2}  # two loops a layer
    for report in check(Case("DeepseekV4ForCausalLM", "DeepseekV4Config", V4, programs=3, fires=fires)):
        assert next(run for run in report.passes if run.name == "fold_sinkhorn").refused == 0


def test_a_static_cache_is_written_in_place_and_every_step_has_the_bits_of_dynamos_graph() -> None:
    """Not eager's bits: what Dynamo's graph computes, run by torch itself, is a last bit off at some steps."""
    models = [made(CASES["llama"]) for _ in range(2)]
    steps = [
        torch.compile(models[0], backend="eager"),
        torch.compile(models[1], backend="v41", options=OPTIONS),
    ]
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for model in models]
    with torch.no_grad(), v41.collect() as reports:
        for start, length in ((0, 5), (5, 1), (6, 1), (7, 1), (8, 1)):
            positions = torch.arange(start, start + length)
            inputs = {"input_ids": tokens(length), "position_ids": positions[None], "use_cache": True}
            expected, found = (
                step(**inputs, past_key_values=cache).logits for step, cache in zip(steps, caches, strict=True)
            )
            assert torch.equal(expected, found), start
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    assert [run.failure for report in reports for run in report.passes if run.failure] == []
    writes = [run for report in reports for run in report.passes if run.name == "reinplace_cache_writes"]
    assert writes[-1].applied == 4  # keys and values of two layers; each layer's counter is added to as a whole
    assert {decision.rule for decision in writes[-1].decisions} == {
        None,
        "ends a chain of known views and writes of the input",
    }
