"""Attention: every row against its window and, where the layer has a compressed branch, the entries picked for it.

    o_t = sum_k p_k k / (sum_k p_k + exp(sink - max))        p_k = exp(q_t . k / sqrt(D) - max)
    k over [W window keys, K picked entries], one latent that is key and value of all heads, stored quantised

One softmax over both branches; the sink takes weight and adds no value. P is rounded to bf16 before it meets values.
T rows, H heads, D channels, G groups of heads in the output projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from v41.model_def.chunk import is_late
from v41.model_def.compressor import Compressor, completed_entry
from v41.model_def.config import LayerRole, V41Config
from v41.model_def.indexer import Indexer, Selection
from v41.model_def.linear import Fp8Linear, Linear, into_streams, linear
from v41.model_def.norm import RMSNorm
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD
from v41.model_def.rope import Turn, rotate
from v41.model_def.step import Step


class Attention(nn.Module):
    def __init__(self, config: V41Config, role: LayerRole) -> None:
        super().__init__()
        self.role, self.heads, self.width = role, config.num_attention_heads, config.head_dim
        self.groups = config.o_groups
        hidden, rank, eps = config.hidden_size, config.q_lora_rank, config.rms_norm_eps
        self.wq_a, self.q_norm = linear(config, hidden, rank), RMSNorm(rank, eps)
        self.wq_b = linear(config, rank, self.heads * self.width)
        self.wkv, self.kv_norm = linear(config, hidden, self.width), RMSNorm(self.width, eps)
        # multiplies bf16 as it is, however its file stores it: a release has fp8, and the loader puts that here
        self.wo_a: Linear | Fp8Linear = Linear(
            self.heads * self.width // self.groups, self.groups * config.o_lora_rank
        )
        self.wo_b = linear(config, self.groups * config.o_lora_rank, hidden, into_streams(config))
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.compressor = Compressor(config, role.layer) if role.owns_compressor else None
        self.indexer = Indexer(config, role) if role.owns_indexer else None
        self.late = is_late(config, role.layer)

    def forward(self, x: Tensor, step: Step, selection: Selection | None) -> tuple[Tensor, Selection | None]:
        """x [T, hidden] -> y [T, hidden], and the selection for the layers after."""
        by = step.compressed if self.role.ratio else step.plain
        q_latent, q, records = self.enter(x, by)
        keys, visible = self.window(records, step)
        entries = picks = None
        if self.role.ratio:
            selection = self.select(x, q_latent, step, selection)
            entries, picks = self.picked(selection.picks, step), selection.picks
        return self.leave(q, by, keys, visible, entries, picks), selection

    @nested_compile_region  # what computes is traced once for all layers; what reads and writes the cache lies between
    def enter(self, x: Tensor, by: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> latent of the queries [T, rank], queries [T, H, D] before RoPE, window records [T, 528]."""
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        return q_latent, q, FP8_RECORD.encode(rotate(self.kv_norm(self.wkv(x)), by))

    @nested_compile_region
    def leave(
        self, q: Tensor, by: Turn, keys: Tensor, visible: Tensor, entries: Tensor | None, picks: Tensor | None
    ) -> Tensor:
        """Queries before RoPE [T, H, D], records of window keys [T, W, 528] and entries [T, K, 288] -> [T, hidden].

        Keys turn before they are stored; queries turn here, beside the turn back of what they find, so that RoPE and
        attention can be one launch.
        """
        q = rotate(q, by)
        keys = FP8_RECORD.decode(keys)
        if entries is not None and picks is not None:
            keys = torch.cat((keys, FP4_RECORD.decode(entries)), 1)  # [T, W + K, D]
            visible = torch.cat((visible, picks >= 0), 1)
        return self.project(rotate(attend(q, keys, visible, self.attn_sink), by, inverse=True))

    def window(self, records: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Records of each row's window keys, its own among them, and which it sees. The last W go into the ring."""
        batch, window, ring = step.batch, step.window, step.cache.rings[self.role.layer]
        behind = ring[batch.slots.unsqueeze(-1), window.places]  # [T, W, 528]
        keys = torch.where(window.in_step.unsqueeze(-1), records[window.rows], behind)
        last = batch.positions >= batch.stops - ring.shape[1]
        ring[torch.where(last, batch.slots, step.cache.pad_slot), batch.positions % ring.shape[1]] = records
        return keys, window.late_visible if self.late else window.visible

    def select(self, x: Tensor, q_latent: Tensor, step: Step, selection: Selection | None) -> Selection:
        """The entries to attend to: an index source picks, others reuse. A KV source stores its entries first."""
        if self.compressor is not None:
            self.store(self.compressor(x, step), step)
        if self.indexer is not None:
            stored = step.cache.index_keys[self.kv_source]
            selection = self.indexer(x, q_latent, stored, step, selection)
        assert selection is not None  # the rules of a config put an index source in front
        return selection

    def store(self, latent: Tensor, step: Step) -> None:
        """Writes entries and index keys of the groups that this step completes."""
        assert self.indexer is not None  # a KV source is an index source
        slots, entries, index_keys = step.batch.slots, step.cache.entries, step.cache.index_keys
        at = completed_entry(step, self.role.ratio, none=entries[self.kv_source].shape[1] - 1)
        index_keys[self.kv_source][slots, at] = self.indexer.keys(latent, step)
        entries[self.kv_source][slots, at] = FP4_RECORD.encode(rotate(latent, step.entries[self.role.ratio]))

    def picked(self, picks: Tensor, step: Step) -> Tensor:
        """Records of the picked entries [T, K, 288]; any entry where there is no pick."""
        return step.cache.entries[self.kv_source][step.batch.slots.unsqueeze(-1), picks.clamp(min=0)]

    def project(self, o: Tensor) -> Tensor:
        """o [T, H, D] -> [T, hidden]: each group of heads through its own A, then all through B."""
        o = o.flatten(1).unflatten(-1, (self.groups, -1))  # [T, G, H D / G]
        wo_a = self.wo_a.decoded().unflatten(0, (self.groups, -1))  # [G, rank, H D / G]
        return self.wo_b(torch.einsum("tgd,grd->tgr", o, wo_a).flatten(1))

    @property
    def kv_source(self) -> int:
        assert self.role.kv_source is not None
        return self.role.kv_source


def attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """q [T, H, D], keys [T, K, D] (values too), visible [T, K], sink [H] -> [T, H, D]. No visible key: 0."""
    keys = keys.masked_fill(~visible.unsqueeze(-1), 0).float()  # what a row does not see may hold anything
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = (scores - top).exp()  # [T, H, K]
    total = p.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp()
    return (torch.einsum("thk,tkd->thd", p.to(q.dtype).float(), keys) / total).to(q.dtype)
