"""Indexer: which compressed entries each row attends to. It scores all entries a row may see and keeps the top-k.

    score[t, g] = sum_h w[t, h] relu(q[t, h] . k[g])      over entries g < floor((p + 1) / m), in fp32

Picks come in ascending order, -1 behind them where a row sees fewer than k; ties go to the lower entry. The candidate
source also keeps the best blocks of entries of each row: the re-indexers after it pick inside those only. The rows of a
request are scored together, [R, Q] rows against [R, E] entries; E follows the longest context, never the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from v41.model_def.config import LayerRole, V41Config
from v41.model_def.linear import Linear, linear
from v41.model_def.norm import RMSNorm
from v41.model_def.quantization import MXFP4_RECORD, fake_quant_mxfp4
from v41.model_def.rope import rotate
from v41.model_def.step import Step
from v41.model_def.topk import ranking_keys, topk_lowest_index

HEADS_AT_ONCE = 8  # bounds how many scores of single heads exist at one time
BEHIND_ALL = 2**62  # sorts behind every entry


class Selection(NamedTuple):
    """What index sources decide for the layers after them."""

    picks: Tensor  # [T, k] entries, ascending, then -1
    candidates: Tensor | None  # [T, E] bool, entries the re-indexers may pick; None before the candidate source


class Indexer(nn.Module):
    def __init__(self, config: V41Config, role: LayerRole) -> None:
        super().__init__()
        self.role, self.heads, self.width = role, config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.blocks, self.block = config.candidate_topk_blocks, config.candidate_block_size
        self.wq_b = linear(config, config.q_lora_rank, self.heads * self.width)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        if role.owns_compressor:
            self.wk = Linear(config.head_dim, self.width)
            self.k_norm = RMSNorm(self.width, config.rms_norm_eps)

    def keys(self, latent: Tensor, step: Step) -> Tensor:
        """Index keys as records [T, 68], from latents before RoPE."""
        return MXFP4_RECORD.encode(rotate(self.k_norm(self.wk(latent)), step.entries[self.role.ratio]))

    def forward(self, x: Tensor, q_latent: Tensor, stored: Tensor, step: Step, before: Selection | None) -> Selection:
        """x [T, hidden], q_latent [T, rank]; stored: the records of `keys`; before: what the last source chose."""
        seen = (step.batch.positions + 1) // self.role.ratio  # [T] so many entries does the row see
        entries = entries_of(step.batch.blocks[self.role.ratio], self.block)  # [E]
        scores = self.scores(x, q_latent, stored, entries, step)  # [T, E]
        scores = scores.masked_fill(entries >= seen.unsqueeze(-1), -torch.inf)
        candidates = before.candidates if before else None
        if self.role.makes_candidates:
            candidates = candidate_mask(scores, seen, self.blocks, self.block)
        elif self.role.candidate_source is not None:
            assert candidates is not None
            scores = scores.masked_fill(~candidates, -torch.inf)
        return Selection(ascending_picks(scores, self.topk), candidates)

    def scores(self, x: Tensor, q_latent: Tensor, stored: Tensor, entries: Tensor, step: Step) -> Tensor:
        """Each row against `entries` of its request [T, E]."""
        batch, rows = step.batch, step.rows_of_request
        q = rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)), step.compressed)
        q = fake_quant_mxfp4(q)  # [T, H, d]
        w = self.weights_proj(x).float() * (self.width * self.heads) ** -0.5  # [T, H]
        reachable = entries.clamp(max=stored.shape[1] - 1)  # the last block may end beyond the slot
        k = MXFP4_RECORD.decode(stored[batch.slot_of_request.unsqueeze(-1), reachable])  # [R, E, d]
        return index_scores(q[rows], k, w[rows])[batch.requests, batch.columns]


def entries_of(blocks: Tensor, size: int) -> Tensor:
    """[E] the entries of all blocks."""
    return (blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten()


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [R, Q, H, d], k [R, E, d], w [R, Q, H] -> [R, Q, E] fp32."""
    q, k, total = q.float(), k.float(), torch.zeros((), device=q.device)
    for some_q, some_w in zip(q.split(HEADS_AT_ONCE, 2), w.split(HEADS_AT_ONCE, 2), strict=True):
        matches = torch.einsum("rqhd,red->rqhe", some_q, k).relu()
        total = total + (matches * some_w.unsqueeze(-1)).sum(2)
    return total


def candidate_mask(scores: Tensor, seen: Tensor, keep: int, size: int) -> Tensor:
    """[T, E] bool: entries in each row's `keep` best blocks of `size`; the block of its newest entry is always kept."""
    best = scores.unflatten(-1, (-1, size)).amax(-1)  # [T, blocks]
    block = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill(block == ((seen - 1) // size).unsqueeze(-1), torch.inf)
    keys = ranking_keys(pad(best, (0, keep), value=-torch.inf))  # there may be fewer than `keep`
    worst = keys.topk(keep, dim=-1).values.amin(-1, keepdim=True)
    kept = (keys >= worst)[:, : best.shape[-1]] & (best > -torch.inf)
    return kept.repeat_interleave(size, -1)


def ascending_picks(scores: Tensor, k: int) -> Tensor:
    """[T, k] indices of the k best of the last dimension in ascending order, then -1 for those that are -inf or NaN."""
    best = topk_lowest_index(scores, k)
    found = torch.where(scores.gather(-1, best) > -torch.inf, best, BEHIND_ALL).sort(-1).values
    return torch.where(found < BEHIND_ALL, found, -1)
