"""V41ForCausalLM: DeepSeek-V4.1-Flash as the paper tells it. Start here.

    X_0 = embedding, S times                    A_0 reads stream 0
    for each sublayer F (attention, experts):   X, x, A', B, C = boundary(X, y of the sublayer before);   y = F(x)
    logits = head(norm(collapse(X)))

T rows of a ragged batch, no batch dimension. S residual streams of D channels. Layers differ in role (config.roles): an
Engram before some; window only, or window and compressed entries; a source computes entries or picks, others reuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from v41.model_def.attention import Attention
from v41.model_def.batch import Batch, batch_facts, check_cache, check_model, mention_kept
from v41.model_def.cache import Cache, cache_facts
from v41.model_def.checkpoint import LoadSummary, Progress, load_checkpoint
from v41.model_def.config import LayerRole, V41Config
from v41.model_def.constant import Constant
from v41.model_def.engram import Engram
from v41.model_def.linear import Fp32Linear
from v41.model_def.mhc import Mix, boundary, collapse, entry_streams, post
from v41.model_def.moe import MoE
from v41.model_def.norm import RMSNorm
from v41.model_def.parallel import WHOLE, Share, side_by_side, summed
from v41.model_def.rope import both_frequencies
from v41.model_def.step import plan_step


class V41ForCausalLM(nn.Module):
    window_freqs: Tensor  # of RoPE, in layers that see the window only
    compressed_freqs: Tensor  # and in the others
    loaded: LoadSummary | None = None  # of the checkpoint it came from

    def __init__(self, config: V41Config, share: Share = WHOLE) -> None:
        """`share`: what this process holds of a model that several run together; its weights come from a checkpoint."""
        super().__init__()
        self.config, self.share = config, share
        self.batch_facts, self.cache_facts = batch_facts(config), cache_facts(config)
        self.embed = Embedding(config.vocab_size, share.of_channels(config))
        self.layers = cast("Iterable[Layer]", nn.ModuleList(Layer(config, role, share) for role in config.roles))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Fp32Linear(config.hidden_size, share.of_vocabulary(config))
        for name, freqs in zip(("window_freqs", "compressed_freqs"), both_frequencies(config), strict=True):
            self.register_buffer(name, freqs, persistent=False)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        *,
        share: Share = WHOLE,
        progress: Progress = lambda done, whole: None,
        **changes: Any,
    ) -> V41ForCausalLM:
        """The model a released folder holds: config.json and safetensors. `changes` replace fields of its config.

        `share`: of a process group that runs it together; this process then reads its parts of the tensors alone.
        `progress` hears of bytes read, and of all. Engram's tables stay mapped from the file, on the host, so that must
        stay as it is; `model.to(device)` brings them to another device.
        """
        with torch.device("meta"):
            model = cls(V41Config.from_json(folder).replace(**changes), share)
        model.loaded = load_checkpoint(model, folder, device, progress)
        return model

    @classmethod
    def random(cls, config: V41Config, seed: int = 0, device: torch.device | str = "cpu") -> V41ForCausalLM:
        """Random weights that keep activations in range and damp perturbations (see `into_streams`); the same for the
        same seed and device."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            return cls(config).to(device)

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Logits [L, vocabulary] fp32 of the rows the batch asks for. Writes what later steps need into `cache`."""
        self.share.check_joined("V41ForCausalLM.forward")
        check_cache(batch, cache)
        check_model(batch, cache, self.batch_facts, self.cache_facts)
        mention_kept(batch)
        step = plan_step(batch, cache, self.config.sliding_window, self.window_freqs, self.compressed_freqs)
        rows = side_by_side(self.embed(batch.tokens), self.share)  # [T, D]
        X, A = entry_streams(rows, self.config.hc_mult)  # [T, S, D], [T, S]
        y = B = C = selection = None
        for layer in self.layers:
            if layer.engram is not None:
                X, y = layer.engram(post(X, y, C, B), batch.lookback), None
            X, x, A, C, B = boundary(X, y, C, B, A, layer.attn_mix)
            y, selection = layer.attn(x, step, selection)
            X, x, A, C, B = boundary(X, summed(y, self.share), C, B, A, layer.ffn_mix)
            y = summed(layer.ffn(x), self.share)
        h = self.norm(collapse(post(X, y, C, B), A))[batch.logit_rows]  # [L, D]
        return side_by_side(self.head(h), self.share)


class Layer(nn.Module):
    """The parameters of one layer. What it does with them is in `V41ForCausalLM.forward`."""

    hc_eps, norm_eps = Constant(), Constant()

    def __init__(self, config: V41Config, role: LayerRole, share: Share = WHOLE) -> None:
        super().__init__()
        part = share.of_config(config)
        self.hc_iters, self.hc_eps, self.norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.engram = Engram(config, role.layer) if role.engram else None
        self.attn_norm, self.ffn_norm = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.attn, self.ffn = Attention(part, role), MoE(part)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = initial_mix(config)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = initial_mix(config)

    @property
    def attn_mix(self) -> Mix:
        return self.mix(self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale, self.attn_norm)

    @property
    def ffn_mix(self) -> Mix:
        return self.mix(self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale, self.ffn_norm)

    def mix(self, fn: Tensor, base: Tensor, scale: Tensor, norm: RMSNorm) -> Mix:
        return Mix(fn, base, scale, norm, self.hc_iters, self.hc_eps, self.norm_eps)


class Embedding(nn.Module):
    """Rows of a bf16 table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, width]
        return embedding(ids, self.weight)


def initial_mix(config: V41Config) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """fn, base, scale that keep the streams apart: comb leans to the identity, and X moves all coefficients visibly."""
    S, width = config.hc_mult, config.hc_mult * config.hidden_size
    fn = torch.randn(config.n_coefficients, width) * width**-0.5
    base = torch.cat((torch.zeros(2 * S), 2 * torch.eye(S).flatten()))
    return nn.Parameter(fn), nn.Parameter(base), nn.Parameter(torch.ones(3))
