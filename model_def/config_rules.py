"""The rules a V41Config must keep, each a sentence and a predicate that names what breaks it.

All are judged, so that one error lists every contradiction. A predicate may meet fields that other rules refuse: it
says None where it cannot judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from v41.model_def.engram_constants import table_primes

if TYPE_CHECKING:
    from v41.model_def.config import V41Config

GROUP = 32  # channels under one scale of an fp8 or fp4 tensor
LARGEST_NUMBER = 2**63  # of those that a tensor is multiplied with
LARGEST_SIZE = 2**24  # of what has no line of its own below: tables of Python and of torch are made of that length
LARGEST = {  # far more than a model has, and still soon counted; of Engram's tables nobody looks for primes beyond
    "n_routed_experts": 2**14, "hc_mult": 2**10, "hc_sinkhorn_iters": 2**12, "engram_max_ngram_size": 64,
    "engram_n_heads": 256, "engram_vocab_size": 2**32, "max_position_embeddings": 2**40,
    **dict.fromkeys(("rope_theta", "compress_rope_theta", "swiglu_limit", "routed_scaling_factor"), LARGEST_NUMBER)}
SUPPORTED = {  # fields of a released file that have one value here
    "num_key_value_heads": 1, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1}
POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "rope_theta", "compress_rope_theta",
    "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "swiglu_limit", "routed_scaling_factor",
    "rms_norm_eps", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_compressed_vocab_size")


def first(culprits: Iterable[str]) -> str | None:
    return next(iter(culprits), None)


def has_another_type(c: V41Config) -> list[str]:
    """Every field of a type that the other rules cannot read."""
    also = {"float": {"float", "int"}, "int | None": {"int", "NoneType"}, "tuple[int, ...]": {"tuple"}}
    found = []
    for f in fields(c):
        value = getattr(c, f.name)
        mixed = isinstance(value, tuple) and any(type(item) is not int for item in value)
        if mixed or type(value).__name__ not in also.get(str(f.type), {f.type}):
            found.append(f"{f.name} is {value!r}, not {f.type}")
    return found


def reads_another_value(c: V41Config) -> str | None:
    values = {"rope_scaling.type": (c.rope_scaling.type, "yarn"),
              **{name: (getattr(c, name), only) for name, only in SUPPORTED.items()}}
    return first(f"{name} is {found!r}, not {only!r}" for name, (found, only) in values.items() if found != only)


def is_unknown_storage(c: V41Config) -> str | None:
    known = {"weight_dtype": ("fp8", "bf16"), "expert_dtype": ("fp4", "bf16"),
             "swa_bounded_replay": ("off", "after_source", "from_source")}
    return first(f"{name} is {getattr(c, name)!r}, not one of {', '.join(allowed)}"
                 for name, allowed in known.items() if getattr(c, name) not in allowed)


def is_not_positive(c: V41Config) -> str | None:
    return first(f"{name} is {getattr(c, name)}" for name in POSITIVE if not 0 < getattr(c, name) < math.inf)


def is_beyond_reach(c: V41Config) -> str | None:
    most = {name: LARGEST.get(name, LARGEST_SIZE) for name in (*POSITIVE, "engram_max_ngram_size")}
    return first(f"{name} is {getattr(c, name)}, beyond {limit}" for name, limit in most.items()
                 if limit < getattr(c, name) < math.inf)


def has_too_few_ratios(c: V41Config) -> str | None:
    few = len(c.compress_ratios) < c.num_hidden_layers
    return f"{len(c.compress_ratios)} ratios for {c.num_hidden_layers} layers" if few else None


def has_unknown_ratio(c: V41Config) -> str | None:
    return first(f"layer {i} has ratio {ratio}" for i, ratio in enumerate(c.compress_ratios) if ratio not in (0, 1, 2))


def lists_a_layer_out_of_order(c: V41Config) -> str | None:
    names = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")
    for name in names:
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < c.num_hidden_layers for i in ids):
            return f"{name} is {list(ids)} in a model of {c.num_hidden_layers} layers"
    return None


def ratio_of(c: V41Config, layer: int) -> int | None:
    return c.compress_ratios[layer] if 0 <= layer < len(c.compress_ratios) else None


def source_of(sources: tuple[int, ...], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def compressed_layers(c: V41Config) -> list[int]:
    return [i for i, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]) if ratio]


def reads_before_any_kv_source(c: V41Config) -> str | None:
    earliest = min(c.kv_source_layer_ids, default=None)
    return first(f"layer {i} has ratio {ratio_of(c, i)}, the first KV source is {earliest}"
                 for i in compressed_layers(c) if source_of(c.kv_source_layer_ids, i) is None)


def reads_before_any_index_source(c: V41Config) -> str | None:
    earliest = min(c.index_source_layer_ids, default=None)
    return first(f"layer {i} has ratio {ratio_of(c, i)}, the first index source is {earliest}"
                 for i in compressed_layers(c) if source_of(c.index_source_layer_ids, i) is None)


def is_a_source_of_ratio_0(c: V41Config) -> str | None:
    return first(f"layer {i} is a KV source of ratio 0" for i in c.kv_source_layer_ids if ratio_of(c, i) == 0)


def scores_nothing(c: V41Config) -> str | None:
    """An index source that is window only reads no KV source, so it has nothing to score."""
    return first(f"layer {i} is an index source of ratio 0" for i in c.index_source_layer_ids if ratio_of(c, i) == 0)


def reads_a_source_of_another_ratio(c: V41Config) -> str | None:
    pairs = ((i, source_of(c.kv_source_layer_ids, i)) for i in compressed_layers(c))
    return first(f"layer {i} has ratio {ratio_of(c, i)}, its KV source {s} has {ratio_of(c, s)}"
                 for i, s in pairs if s is not None and ratio_of(c, s) and ratio_of(c, s) != ratio_of(c, i))


def reads_picks_of_another_source(c: V41Config) -> str | None:
    """A KV source that is no index source would read picks that number the entries of the source before."""
    return first(f"layer {i} owns entries and is no index source" for i in c.kv_source_layer_ids
                 if i not in c.index_source_layer_ids)


def makes_candidates_of_nothing(c: V41Config) -> str | None:
    source = c.candidate_source_layer_id
    if source is None or (source in c.kv_source_layer_ids and source in c.index_source_layer_ids):
        return None
    return f"layer {source} is not both"


def heads_do_not_divide(c: V41Config) -> str | None:
    broken = c.o_groups > 0 and c.num_attention_heads % c.o_groups
    return f"{c.num_attention_heads} heads in {c.o_groups} groups" if broken else None


def rotates_an_odd_part(c: V41Config) -> str | None:
    return f"qk_rope_head_dim is {c.qk_rope_head_dim}" if c.qk_rope_head_dim % 2 else None


def rotates_more_than_a_head(c: V41Config) -> str | None:
    return first(f"qk_rope_head_dim is {c.qk_rope_head_dim}, {name} is {getattr(c, name)}"
                 for name in ("head_dim", "index_head_dim") if getattr(c, name) < c.qk_rope_head_dim)


def scales_less_than_nothing(c: V41Config) -> str | None:
    s = c.rope_scaling
    numbers = (s.factor, s.beta_fast, s.beta_slow, s.original_max_position_embeddings)
    if not all(type(number) in (int, float) and abs(number) <= LARGEST_NUMBER for number in numbers):
        return str(s)
    if not c.compress_rope_theta > 1:
        return f"compress_rope_theta is {c.compress_rope_theta}, all pairs turn alike or slower ones faster"
    broken = s.factor < 1 or s.original_max_position_embeddings <= 0 or not s.beta_fast >= s.beta_slow > 0
    return str(s) if broken else None


def splits_a_group(c: V41Config) -> str | None:
    sizes = {name: getattr(c, name) for name in ("head_dim", "index_head_dim", "engram_head_dim")}
    if c.weight_dtype == "fp8":  # every input of an fp8 linear
        sizes |= {name: getattr(c, name) for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size")}
        sizes["o_groups * o_lora_rank"] = c.o_groups * c.o_lora_rank
    if c.expert_dtype == "fp4":
        sizes |= {name: getattr(c, name) for name in ("hidden_size", "moe_intermediate_size")}
    return first(f"{name} is {size}" for name, size in sizes.items() if size % GROUP)


def picks_more_than_there_are(c: V41Config) -> str | None:
    broken = c.num_experts_per_tok > c.n_routed_experts
    return f"top {c.num_experts_per_tok} of {c.n_routed_experts} experts" if broken else None


def counts_other_tables(c: V41Config) -> str | None:
    broken = len(c.engram_num_embeddings) != len(c.engram_layer_ids)
    return f"{len(c.engram_num_embeddings)} sizes for {len(c.engram_layer_ids)} layers" if broken else None


def has_no_ngram(c: V41Config) -> str | None:
    return f"engram_max_ngram_size is {c.engram_max_ngram_size}" if c.engram_max_ngram_size < 2 else None


def sizes_are_not_the_primes(c: V41Config) -> str | None:
    nothing = min(c.engram_vocab_size, c.engram_n_heads) <= 0
    if counts_other_tables(c) or has_no_ngram(c) or nothing or is_beyond_reach(c):
        return None
    tables = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    sums = [sum(primes) for primes in table_primes(len(c.engram_layer_ids), tables, c.engram_vocab_size)]
    given = list(c.engram_num_embeddings)
    return None if sums == given else f"{given}, the primes sum to {sums}"


def pads_outside_the_vocabulary(c: V41Config) -> str | None:
    names = ("engram_pad_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "image_token_id")
    return first(f"{name} is {token} of {c.vocab_size}" for name in names
                 if (token := getattr(c, name)) is not None and not 0 <= token < c.vocab_size)


def compresses_to_more(c: V41Config) -> str | None:
    more = c.engram_compressed_vocab_size > c.vocab_size
    return f"{c.engram_compressed_vocab_size} of {c.vocab_size}" if more else None


def taps_a_missing_layer(c: V41Config) -> str | None:
    return first(f"layer {i} of {c.num_hidden_layers}" for i in c.dspark_target_layer_ids
                 if not 0 <= i < c.num_hidden_layers)


RULES: tuple[tuple[str, Callable[[V41Config], str | None]], ...] = (
    ("a field with one supported value has it", reads_another_value),
    ("storage and replay have a known name", is_unknown_storage),
    ("sizes, limits and eps are positive", is_not_positive),
    ("sizes and counts are such as can be made", is_beyond_reach),
    ("every layer has a ratio", has_too_few_ratios),
    ("a ratio is 0, 1 or 2", has_unknown_ratio),
    ("layer lists are ascending layers of the model", lists_a_layer_out_of_order),
    ("a layer with a ratio comes after a KV source", reads_before_any_kv_source),
    ("a layer with a ratio comes after an index source", reads_before_any_index_source),
    ("a KV source has a ratio", is_a_source_of_ratio_0),
    ("an index source reads a KV source", scores_nothing),
    ("a reader has its KV source's ratio", reads_a_source_of_another_ratio),
    ("a KV source picks among its own entries", reads_picks_of_another_source),
    ("the candidate source is a KV source and an index source", makes_candidates_of_nothing),
    ("the heads divide into the output groups", heads_do_not_divide),
    ("the rotated part is even", rotates_an_odd_part),
    ("the rotated part fits the heads", rotates_more_than_a_head),
    ("YaRN stretches: factor >= 1, beta_fast >= beta_slow > 0", scales_less_than_nothing),
    ("quantised sizes are multiples of 32", splits_a_group),
    ("top-k is at most the experts", picks_more_than_there_are),
    ("every Engram layer has a table size", counts_other_tables),
    ("n-grams have at least two tokens", has_no_ngram),
    ("Engram table sizes are the sums of its primes", sizes_are_not_the_primes),
    ("special tokens are in the vocabulary", pads_outside_the_vocabulary),
    ("the compressed vocabulary is no larger than the vocabulary", compresses_to_more),
    ("draft taps are layers of the model", taps_a_missing_layer),
)


def broken_rules(c: V41Config) -> list[tuple[str, str]]:
    """Each broken rule with what breaks it, in the order of RULES; those of type alone where there is one."""
    if mistyped := has_another_type(c):
        return [("a field has its type", culprit) for culprit in mistyped]
    return [(rule, culprit) for rule, predicate in RULES if (culprit := predicate(c)) is not None]
