"""Rows of a request by two ways: all in one step on a cache of its own, and by a schedule among others.

In exact mode, where sums do not show their order, both have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.model_def.exact import exact
from tests.strategies.batches import Schedule, poisoned
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM

TINY = V41Config.preset("tiny")
QUICK = TINY.replace(  # window only; ratio 2 behind an Engram; ratio 1 with candidates; a re-indexer inside them
    num_hidden_layers=4,
    compress_ratios=(0, 2, 1, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(660,),
    hidden_size=64,
    hc_sinkhorn_iters=2,
    sliding_window=4,
    index_topk=3,
    candidate_topk_blocks=2,
    candidate_block_size=2,
)


@torch.no_grad()
def alone(model: V41ForCausalLM, request: list[int]) -> Tensor:
    """Logits of all rows [tokens, V], in one step on a fresh cache."""
    cache = Cache.zeros(model.config, 1, len(request))
    with exact():
        return model(build_batch(model.config, cache, [Chunk(request, 0, 0, every_logit=True)]), cache)


@torch.no_grad()
def scheduled(model: V41ForCausalLM, schedule: Schedule) -> list[Tensor]:
    """The same rows by way of `schedule`, on a cache full of NaN."""
    cache = poisoned(model.config, schedule.slots, max(map(len, schedule.requests)))
    rows: list[list[Tensor]] = [[] for _ in schedule.requests]
    for s, chunks in enumerate(schedule.steps):
        batch = build_batch(model.config, cache, chunks, buckets=schedule.buckets)
        with exact():
            logits = model(batch, cache)
        for row, (chunk, position) in zip(logits[: len(batch.host.logits)], batch.host.logits, strict=True):
            owner = rows[schedule.owners[s][chunk]]
            assert position == len(owner)
            owner.append(row)
    return [torch.stack(row) for row in rows]
