"""V41Config: every field of the released `text_config`, the role each layer has, and the presets tiny, bench and flash.

Defaults are the released DeepSeek-V4.1-Flash. A config that contradicts itself is refused when it is built, with all
contradictions at once (config_rules.py). What a layer does is read from the fields here and nowhere else: see `roles`.
"""

from __future__ import annotations

import os.path
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from v41.model_def.config_rules import broken_rules
from v41.model_def.errors import CheckpointFileError, ConfigError, ConfigFileError, FileUnreadable, UnknownPreset
from v41.model_def.json_object import parse_object


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, for the layers with a compressed branch. Layers without one rotate plainly."""

    factor: float = 16
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 65536
    type: str = "yarn"


@dataclass(frozen=True)
class LayerRole:
    """What layer `layer` does. `ratio` 0 is the sliding window alone; the sources are layer numbers."""

    layer: int
    ratio: int
    kv_source: int | None  # whose compressed entries it reads
    index_source: int | None  # whose picks it reads
    candidate_source: int | None  # whose candidate blocks restrict its own index scores
    makes_candidates: bool  # is the candidate source itself
    engram: bool

    @property
    def owns_compressor(self) -> bool:
        """Projects compressed entries and index keys."""
        return self.kv_source == self.layer

    @property
    def owns_indexer(self) -> bool:
        """Scores entries and picks its own top-k."""
        return self.index_source == self.layer


@dataclass(frozen=True)
class BoundarySites:
    """How many mHC sites a forward has. Every sublayer predicts coefficients once; the exit only collapses."""

    entry: int  # nothing to expand before it
    seams: int  # expand, collapse and predict in one
    after_engram: int  # the expand before it stands alone, for an Engram lies between
    exit: int

    @property
    def coefficient_sites(self) -> int:
        return self.entry + self.seams + self.after_engram


@dataclass(frozen=True)
class V41Config:
    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = 129264  # stands where an image's rows are: Engram takes it for no token
    tie_word_embeddings: bool = False
    # attention
    num_attention_heads: int = 64
    num_key_value_heads: int = 1  # one latent is key and value of all heads
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    attention_bias: bool = False
    sliding_window: int = 128
    rope_theta: float = 10000.0  # layers of ratio 0
    compress_rope_theta: float = 160000.0  # all others, with YaRN
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    # compressed branch; `compress_ratios` may go on past the last layer, for the draft
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    # experts
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2304
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    # residual streams
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # Engram
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_vocab_size: int = 16000000
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    # draft: only what the backbone is asked for
    num_nextn_predict_layers: int = 3
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    # how weights are held: as released (fp8 linears, fp4 experts) or bf16
    weight_dtype: str = "fp8"
    expert_dtype: str = "fp4"
    # SWA bounded replay, an approximation of long prefills: "off", "after_source" or "from_source"; see chunk.py
    swa_bounded_replay: str = "off"

    def __post_init__(self) -> None:
        for f in fields(self):
            if isinstance(getattr(self, f.name), list):
                object.__setattr__(self, f.name, tuple(getattr(self, f.name)))
        if broken := broken_rules(self):
            raise ConfigError("V41Config", broken)

    @classmethod
    def preset(cls, name: str) -> V41Config:
        """"tiny", "bench" or "flash"; see PRESETS."""
        if not isinstance(name, str) or name not in PRESETS:
            raise UnknownPreset("V41Config.preset", name=name, known=", ".join(sorted(PRESETS)))
        return cls(**PRESETS[name])

    @classmethod
    def from_json(cls, path: str | Path) -> V41Config:
        """From a released config.json (`text_config` nested) or the flat inference/config.json. A folder means its
        config.json."""
        path = Path(path)
        path = path / "config.json" if os.path.isdir(path) else path  # Path.is_dir raises of a name that is too long
        data = read_json(path)
        for name in ("text_config", "quantization_config"):
            if not isinstance(data.get(name, {}), dict | None):
                raise FileUnreadable(path, problem=f"{name} is {data[name]!r}, no object")
        values, unknown = _released_values(data) if "text_config" in data else _flat_values(data)
        missing = [name for name in REQUIRED if name not in values]
        if unknown or missing:
            raise ConfigFileError(path, unknown, missing)
        try:
            return cls(**{"image_token_id": None, **values})
        except ConfigError as error:
            raise ConfigError(path, error.facts["broken"]) from None  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """The released layout; `from_json` reads it back to an equal config."""
        text = asdict(self)
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
        top = {name: token for name in names if (token := text.pop(name)) is not None}
        quantization: dict[str, Any] = {"expert_dtype": text.pop("expert_dtype"), "scale_fmt": "ue8m0",
                                        "weight_block_size": [32, 32], "activation_scheme": "dynamic",
                                        "quant_method": text.pop("weight_dtype")}
        return {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", **top,
                "quantization_config": quantization, "text_config": {"model_type": "deepseek_v41_text", **text}}

    def replace(self, **changes: Any) -> V41Config:
        return replace(self, **changes)

    @cached_property
    def roles(self) -> tuple[LayerRole, ...]:
        """What each layer does, from the lists of sources."""
        return tuple(self._role(layer) for layer in range(self.num_hidden_layers))

    def _role(self, layer: int) -> LayerRole:
        ratio, engram = self.compress_ratios[layer], layer in self.engram_layer_ids
        if ratio == 0:
            return LayerRole(layer, 0, None, None, None, False, engram)
        kv_source = max(s for s in self.kv_source_layer_ids if s <= layer)
        index_source = max(s for s in self.index_source_layer_ids if s <= layer)
        source = self.candidate_source_layer_id
        restricted = source is not None and kv_source == source and index_source == layer and layer != source
        return LayerRole(layer, ratio, kv_source, index_source, source if restricted else None, layer == source, engram)

    @property
    def last_kv_source(self) -> int:
        """The first layer of the decoder: the encoder's output enters its compressor."""
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def n_coefficients(self) -> int:
        """pre, post and comb of one mHC site, as rows of `hc_*_fn`."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def engram_width(self) -> int:
        """Channels one token looks up: orders 2..max, all heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim

    def boundary_sites(self) -> BoundarySites:
        """The mHC sites a forward has: an Engram in layer 0 comes before any expand, so it leaves an entry an entry."""
        after_engram = sum(1 for layer in self.engram_layer_ids if layer > 0)
        return BoundarySites(1, 2 * self.num_hidden_layers - 1 - after_engram, after_engram, 1)


REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "compress_ratios",
            "kv_source_layer_ids", "index_source_layer_ids", "n_routed_experts", "moe_intermediate_size")

# what a released file also says and a text forward does not read
NOT_READ = frozenset({
    "model_type", "dtype", "torch_dtype", "architectures", "auto_map", "transformers_version", "attention_dropout",
    "initializer_range", "use_cache", "dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok", "vision_config", "quantization_config"})

FLAT_NAMES = {  # inference/config.json -> released text_config
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "norm_eps": "rms_norm_eps",
    "rope_head_dim": "qk_rope_head_dim", "window_size": "sliding_window", "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids", "candidate_source_layer": "candidate_source_layer_id",
    "n_activated_experts": "num_experts_per_tok", "moe_inter_dim": "moe_intermediate_size", "dtype": "weight_dtype",
    "score_func": "scoring_func", "route_scale": "routed_scaling_factor", "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers", "dspark_n_activated_experts": "dspark_num_experts_per_tok"}
FLAT_ROPE = {"rope_factor": "factor", "original_seq_len": "original_max_position_embeddings",
             "beta_fast": "beta_fast", "beta_slow": "beta_slow"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. CheckpointFileError where there is none, FileUnreadable where it holds no object."""
    try:
        return parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointFileError(path, problem="no such file") from None
    except (OSError, ValueError) as error:  # not ours to read; no object
        raise FileUnreadable(path, problem=str(error)) from None


def _known(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    names = {f.name for f in fields(V41Config)}
    unknown = [name for name in values if name not in names | NOT_READ and not name.startswith(("_", "vision_"))]
    return {name: value for name, value in values.items() if name in names}, unknown


def _released_values(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    top = {name: value for name, value in data.items() if name != "text_config"}
    quantization = data.get("quantization_config") or {}
    values, unknown = _known({**top, **(data["text_config"] or {})})
    stray: list[str] = []
    if isinstance(scaling := values.get("rope_scaling"), dict):  # null or another type is for the rules to refuse
        scaling = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
        stray = [name for name in scaling if name not in RopeScaling.__annotations__]
        values["rope_scaling"] = RopeScaling(**{name: value for name, value in scaling.items() if name not in stray})
    values["weight_dtype"] = quantization.get("quant_method", "bf16")
    values["expert_dtype"] = quantization.get("expert_dtype", values["weight_dtype"])
    return values, unknown + [f"rope_scaling.{name}" for name in stray]


def _flat_values(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    scaling = RopeScaling(**{FLAT_ROPE[name]: value for name, value in data.items() if name in FLAT_ROPE})
    values, unknown = _known({FLAT_NAMES.get(n, n): v for n, v in data.items() if n not in FLAT_ROPE})
    return {**values, "rope_scaling": scaling}, unknown


PRESETS: dict[str, dict[str, Any]] = {
    # every kind of layer, once: window only with Engram, ratio-2 source with Engram, its reader; ratio-1 source that
    # makes candidates, its reader, a re-indexer inside the candidates. Random bf16 weights.
    "tiny": dict(
        vocab_size=512, hidden_size=256, num_hidden_layers=6, max_position_embeddings=1024, num_attention_heads=4,
        head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=64, sliding_window=16,
        rope_scaling=RopeScaling(factor=4, original_max_position_embeddings=256),
        compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 5),
        index_n_heads=4, index_head_dim=64, index_topk=8, candidate_source_layer_id=3, candidate_topk_blocks=3,
        candidate_block_size=4, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
        engram_layer_ids=(0, 1), engram_num_embeddings=(660, 864), engram_vocab_size=100, engram_n_heads=2,
        engram_head_dim=32, engram_compressed_vocab_size=256, num_nextn_predict_layers=0, dspark_target_layer_ids=(),
        weight_dtype="bf16", expert_dtype="bf16", image_token_id=None),
    # released widths in 12 layers, six of encoder and six of decoder, 96 experts, bf16 weights
    "bench": dict(
        num_hidden_layers=12, compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1), kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8, 10), candidate_source_layer_id=6, n_routed_experts=96,
        engram_layer_ids=(1, 4), engram_num_embeddings=(963078, 970134), engram_vocab_size=40000,
        num_nextn_predict_layers=0, dspark_target_layer_ids=(), weight_dtype="bf16", expert_dtype="bf16"),
    "flash": {},
}
