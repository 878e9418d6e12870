"""Indexer: which compressed entries each row attends to. Scores all entries it may see, keeps the top-k.

    score[t, g] = sum_h w[t, h] relu(q[t, h] . k[g])      over entries g < floor((p + 1) / m), in fp32

A row's picks come in ascending order, -1 where it sees fewer than k; ties go to the lower entry. The candidate source also
keeps, for each row, its best blocks of entries: the re-indexers after it pick inside those only.
Rows of a request are scored together, [R, Q] rows against [R, E] entries: E follows the longest context, not the cache.
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

HEADS_AT_ONCE = 8  # bounds the scores of single heads that exist at one time


class Selection(NamedTuple):
    """What an index source decides for the layers after it."""

    picks: Tensor  # [T, k] entries, ascending, -1 at the end
    candidates: Tensor | None  # [T, E] bool: entries the re-indexers may pick; None before the candidate source


class Indexer(nn.Module):
    def __init__(self, config: V41Config, role: LayerRole) -> None:
        super().__init__()
        self.role, self.config = role, config
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = linear(config, config.q_lora_rank, self.heads * self.width)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        if role.owns_compressor:
            self.wk = Linear(config.head_dim, self.width)
            self.k_norm = RMSNorm(self.width, config.rms_norm_eps)

    def keys(self, latent: Tensor, step: Step) -> Tensor:
        """Index keys as records [T, 68], from latents before RoPE."""
        return MXFP4_RECORD.encode(rotate(self.k_norm(self.wk(latent)), step.entries[self.role.ratio]))

    def forward(self, x: Tensor, q_latent: Tensor, stored: Tensor, step: Step, before: Selection | None) -> Selection:
        """x [T, hidden], q_latent [T, rank]; stored: the records of `keys`, all slots; before: the last selection."""
        batch, config = step.batch, self.config
        entries = candidate_entries(batch.blocks[self.role.ratio], config.candidate_block_size)
        q = rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)), step.compressed)
        q = fake_quant_mxfp4(q)  # [T, H, d]
        w = self.weights_proj(x).float() * (self.width * self.heads) ** -0.5  # [T, H]
        reachable = entries.clamp(max=stored.shape[1] - 1)  # the last block may reach beyond the slot
        k = MXFP4_RECORD.decode(stored[batch.slot_of_request.unsqueeze(-1), reachable])  # [R, E, d]
        scores = index_scores(q[step.rows_of_request], k, w[step.rows_of_request])  # [R, Q, E]
        scores = scores[batch.requests, batch.columns]  # [T, E]

        seen = (batch.positions + 1) // self.role.ratio  # [T] entries the row sees
        scores = scores.masked_fill(entries >= seen.unsqueeze(-1), -torch.inf)
        candidates = before.candidates if before else None
        if self.role.makes_candidates:
            candidates = candidate_mask(scores, seen, config.candidate_topk_blocks, config.candidate_block_size)
        elif self.role.candidate_source is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        return Selection(ascending_picks(scores, config.index_topk), candidates)


def candidate_entries(blocks: Tensor, size: int) -> Tensor:
    """[E] entry numbers of all blocks."""
    return (blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten()


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [R, Q, H, d], k [R, E, d], w [R, Q, H] -> [R, Q, E] fp32."""
    total = torch.zeros((), device=q.device)
    for q_h, w_h in zip(q.float().split(HEADS_AT_ONCE, 2), w.split(HEADS_AT_ONCE, 2), strict=True):
        hits = torch.einsum("rqhd,red->rqhe", q_h, k.float()).relu()
        total = total + (hits * w_h.unsqueeze(-1)).sum(2)
    return total


def candidate_mask(scores: Tensor, seen: Tensor, keep: int, size: int) -> Tensor:
    """[T, E] bool: the entries of each row's `keep` best blocks of `size`, the one with its newest entry always among them."""
    best = scores.unflatten(-1, (-1, size)).amax(-1)  # [T, blocks]
    block = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill(block == ((seen - 1) // size).unsqueeze(-1), torch.inf)
    ranks = ranking_keys(pad(best, (0, keep), value=-torch.inf))  # there may be fewer than `keep`
    worst = ranks.topk(keep, dim=-1).values.amin(-1, keepdim=True)
    kept = (ranks >= worst)[:, : best.shape[-1]] & (best > -torch.inf)
    return kept.repeat_interleave(size, -1)


def ascending_picks(scores: Tensor, k: int) -> Tensor:
    """[T, k] indices of the k best scores in ascending order, then -1 for those that are -inf or NaN."""
    best = topk_lowest_index(scores, k)
    beyond = scores.shape[-1]
    found = torch.where(scores.gather(-1, best) > -torch.inf, best, beyond).sort(-1).values
    return torch.where(found < beyond, found, -1)
