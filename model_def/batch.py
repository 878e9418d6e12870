"""Batch: the rows of one step, of several requests, prefill and decode mixed. Built on the host, read by the model.

    chunks   [request 0: positions 0..37) [request 1: 96..97) ...   ->   T rows, one chunk after another, then pad rows

A chunk says which tokens of a request run in this step and in which cache slot. The model reads tensors whose sizes may
change from step to step without a new compilation: the builder marks them. A number that bounds a size is the shape of
an arange. What the host must know again (which logits belong to whom) stays there, in `host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from v41.model_def.buckets import Buckets, round_up
from v41.model_def.cache import SHAPING, Cache, cache_facts, told
from v41.model_def.chunk import Chunk, inner_last, kept_last, replay_start, rows_kept, window_floors
from v41.model_def.config import V41Config
from v41.model_def.errors import (
    BatchOfAnotherCache,
    BatchOfAnotherModel,
    CacheOfAnotherModel,
    ChunkLongerThanSlot,
    ChunkMistyped,
    ChunkOutOfTokens,
    HitBeyondTokens,
    HitNotReplayable,
    LogprobsAfterHit,
    LogprobsLeftOut,
    NoSuchFollowing,
    NoSuchSlot,
    SlotUsedTwice,
    TokenOutOfVocabulary,
)

READ = (*SHAPING, "vocab_size", "image_token_id", "engram_max_ngram_size", "candidate_block_size", "swa_bounded_replay")
NOWHERE = -1  # position of a pad row, token where there is none
# the first size of each tensor of a Batch; where nothing is said it is "rows"
SIZES = {"first_rows": "requests", "slot_of_request": "requests", "longest": "longest", "logit_rows": "logits",
         "kept_longest": "longest kept", "inner_longest": "longest inner"}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """What went in: chunks, the first row of each and the end, (chunk, position) of each row of logits, all rows."""

    chunks: tuple[Chunk, ...]
    bounds: tuple[int, ...]
    logits: tuple[tuple[int, int], ...]
    rows: int  # with pad rows


@dataclass(frozen=True)
class Batch:
    """T rows with pads, R requests, Q rows in the longest chunk, N the longest n-gram, L rows of logits."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]; -1 in pad rows
    slots: Tensor  # [T] cache slot; the pad slot in pad rows
    starts: Tensor  # [T] first position of the row's chunk
    stops: Tensor  # [T] and its end
    floors: Tensor  # [T] no window key below this position (prefix hit)
    late_floors: Tensor  # [T] the same in the layers that SWA bounded replay truncates
    hits: Tensor  # [T] entries of groups that end below this position are in the cache already
    lookback: Tensor  # [T, N] token ids at p, p-1, ...; -1 where there is none, or an image
    requests: Tensor  # [T] which request the row belongs to; 0 in pad rows,
    columns: Tensor  # [T] and which of its rows it is
    first_rows: Tensor  # [R] row each request begins at; 0 for pad requests, which have the pad slot
    slot_of_request: Tensor  # [R]
    longest: Tensor  # arange(Q)
    blocks: dict[int, Tensor]  # ratio -> arange(candidate blocks up to the longest context)
    logit_rows: Tensor  # [L]; row 0 again in pads
    kept_rows: Tensor  # [K] ascending: rows that late layers cannot do without, and some more in pads; see rows_kept
    kept_longest: Tensor  # arange(how many of them one request has at most)
    kept_last: int  # so many last rows of each request are among them
    inner_rows: Tensor | None  # [I] of kept rows, those that the later half of the late layers cannot do without; None
    inner_longest: Tensor | None  # where these are all of them
    inner_last: int | None
    made_for: str  # batch_facts of the model
    cache_slots: int  # of the cache it was built for
    cache_capacity: int
    host: Host

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors_of(self)}
        return mark(replace(self, **moved, blocks={m: t.to(device) for m, t in self.blocks.items()}))


torch.export.register_dataclass(Batch)


@dataclass(frozen=True)
class Sizes:
    """How large a batch is with its pads: rows, requests, rows of logits, the longest chunk, candidate blocks, rows
    that late layers keep, and of these the inner ones."""

    rows: int
    requests: int
    logits: int
    longest: int
    blocks: dict[int, int]  # by ratio
    kept: int
    inner: int


def sizes_of(config: V41Config, chunks: Sequence[Chunk], buckets: Buckets | None = None) -> Sizes:
    """The sizes of `chunks`, padded to `buckets` if given: no chunk at all is then a decode step of pads."""
    lengths = [chunk.rows for chunk in chunks]
    rows, logits = sum(lengths), sum(len(chunk.logit_positions) for chunk in chunks)
    blocks = block_counts(config, max((chunk.end for chunk in chunks), default=0))
    kept, inner = (
        max(sum(rows_kept(config, chunk, last) for chunk in chunks), min(rows, 1))
        for last in (kept_last(config), inner_last(config) or kept_last(config))
    )
    if buckets is None:
        return Sizes(rows, len(chunks), logits, max([0, *lengths]), blocks, kept, inner)
    if rows > buckets.decode[-1] or any(length != 1 for length in lengths):
        rows = round_up(max(rows, 1), buckets.prefill)
        kept, inner = (min(round_up(max(count, 1), (1, *buckets.kept)), rows) for count in (kept, inner))
        return Sizes(rows, len(chunks), max(logits, 1), max(lengths), blocks, kept, inner)
    rows = round_up(max(rows, 1), buckets.decode)
    return Sizes(rows, rows, rows, 1, {m: round_up(count, buckets.blocks) for m, count in blocks.items()}, rows, rows)


def build_batch(
    config: V41Config,
    cache: Cache,
    chunks: Sequence[Chunk],
    *,
    buckets: Buckets | None = None,
    device: torch.device | str | None = None,
) -> Batch:
    """The batch of `chunks`, padded to `buckets` if given, on the cache's device unless another is named.

    Pad rows and pad requests come last; they use the pad slot, and of the logits the first `len(host.logits)` rows are
    anyone's. Refuses, with a type each, what the cache or the vocabulary cannot hold.
    """
    if cache.made_for != cache_facts(config):
        raise CacheOfAnotherModel("build_batch(cache=...)", made_for=cache.made_for, given=cache_facts(config))
    check_chunks(config, cache, chunks)
    return batch_of_sizes(config, cache, chunks, sizes_of(config, chunks, buckets), device)


def batch_of_sizes(
    config: V41Config,
    cache: Cache,
    chunks: Sequence[Chunk],
    sizes: Sizes,
    device: torch.device | str | None = None,
) -> Batch:
    """The batch of legal `chunks` at `sizes` that hold them; without a chunk, pads alone."""
    lengths, bounds = [chunk.rows for chunk in chunks], [0, *accumulate(chunk.rows for chunk in chunks)]
    rows, pad_requests = sizes.rows, sizes.requests - len(chunks)
    repeats = torch.tensor([*lengths, rows - bounds[-1]])

    def per_row(values: Iterable[int], of_pads: int = 0) -> Tensor:
        return torch.tensor([*values, of_pads]).repeat_interleave(repeats)

    row, group = torch.arange(rows), per_row(range(len(chunks)), len(chunks))
    real, starts = group < len(chunks), per_row(chunk.start for chunk in chunks)
    columns = torch.where(real, row - per_row(bounds[:-1]), 0)
    lookback = lookback_ids(chunks, row, group, config.engram_max_ngram_size)
    tokens = lookback[:, 0].clamp(min=0)
    check_tokens(config, chunks, lookback[: bounds[-1], 0], group, columns)
    if config.image_token_id is not None:
        lookback = lookback.where(lookback != config.image_token_id, NOWHERE)
    floors = [window_floors(config, chunk) for chunk in chunks]
    logits = [(i, p) for i, chunk in enumerate(chunks) for p in chunk.logit_positions]

    def keeping(last: int, count: int, among: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T] bool, the numbers of these rows, and arange(the most of one request)."""
        left_out = per_row(chunk.rows - rows_kept(config, chunk, last) for chunk in chunks)  # first rows of each
        kept = with_pads(real & (columns >= left_out), count, among)
        longest = max([min(count, 1), *group[kept & real].bincount().tolist()])
        return kept, kept.nonzero().flatten(), torch.arange(longest)

    kept, kept_rows, kept_longest = keeping(kept_last(config), sizes.kept, torch.ones_like(real))
    inner = inner_last(config)
    _, inner_rows, inner_longest = keeping(inner, sizes.inner, kept) if inner is not None else (None, None, None)
    batch = Batch(
        tokens=tokens,
        positions=torch.where(real, starts + columns, NOWHERE),
        slots=per_row((chunk.slot for chunk in chunks), cache.pad_slot),
        starts=starts,
        stops=per_row(chunk.end for chunk in chunks),
        floors=per_row(floor for floor, _ in floors),
        late_floors=per_row(late for _, late in floors),
        hits=per_row(chunk.hit for chunk in chunks),
        lookback=lookback,
        requests=torch.where(real, group, 0),
        columns=columns,
        first_rows=torch.tensor([*bounds[:-1], *[0] * pad_requests], dtype=torch.int64),
        slot_of_request=torch.tensor(
            [*(chunk.slot for chunk in chunks), *[cache.pad_slot] * pad_requests], dtype=torch.int64
        ),
        longest=torch.arange(max(sizes.longest, min(rows, 1))),  # a pad row has its place, too
        blocks={m: torch.arange(count) for m, count in sizes.blocks.items()},
        logit_rows=torch.tensor(
            [*(bounds[i] + p - chunks[i].start for i, p in logits), *[0] * (sizes.logits - len(logits))],
            dtype=torch.int64,
        ),
        kept_rows=kept_rows,
        kept_longest=kept_longest,
        kept_last=kept_last(config),
        inner_rows=inner_rows,
        inner_longest=inner_longest,
        inner_last=inner,
        made_for=batch_facts(config),
        cache_slots=cache.slots,
        cache_capacity=cache.capacity,
        host=Host(tuple(chunks), tuple(bounds), tuple(logits), rows),
    )
    return batch.to(cache.device if device is None else device)


def with_pads(needed: Tensor, count: int, among: Tensor) -> Tensor:
    """`needed` [T] bool, and further rows of `among` from the end until there are `count`: as good as pads, for nobody
    reads what is computed of them, and nothing of it is stored."""
    spare = (among & ~needed).nonzero().flatten()
    return needed.index_fill(0, spare[len(spare) - count + int(needed.sum()) :], True)


def batch_facts(config: V41Config) -> str:
    """What of `config` decides which numbers a batch holds, as text."""
    return f"{told(config, READ)}\nrows kept for late layers = {kept_last(config)}"


def check_model(batch: Batch, cache: Cache, made_for: str, cache_made_for: str) -> None:
    """Raises where batch or cache is of a model unlike the one with these facts: it would read wrong numbers, and a
    compiled model leaves out rows that are not kept."""
    where = "V41ForCausalLM.forward({}=...)"
    if batch.made_for != made_for:
        raise BatchOfAnotherModel(where.format("batch"), made_for=batch.made_for, given=made_for)
    if cache.made_for != cache_made_for:
        raise CacheOfAnotherModel(where.format("cache"), made_for=cache.made_for, given=cache_made_for)


def mention_kept(batch: Batch) -> None:
    """Makes inputs of a captured graph of what the model itself never reads: which rows late layers need.

    Eager loses nothing by it: it runs all layers on all rows, and so stays the oracle of who leaves some out.
    """
    for unread in (batch.kept_rows, batch.kept_longest, batch.inner_rows, batch.inner_longest):
        if unread is not None:
            unread.detach()


def check_cache(batch: Batch, cache: Cache) -> None:
    """Raises where `cache` is not like the one that `batch` was built for: its pads would write a live slot."""
    built, given = (batch.cache_slots, batch.cache_capacity), (cache.slots, cache.capacity)
    if built != given:
        raise BatchOfAnotherCache("V41ForCausalLM.forward(cache=...)", built=built, given=given)


def check_chunks(config: V41Config, cache: Cache, chunks: Sequence[Chunk]) -> None:
    """Raises for the first chunk that cannot run."""
    if not isinstance(chunks, Sequence):
        raise mistyped("build_batch(chunks=...)", "chunks", chunks, "a list of Chunk")
    used: dict[int, int] = {}
    ratio = max(config.compress_ratios)
    for i, chunk in enumerate(chunks):
        where = f"build_batch(chunks[{i}])"
        check_types(where, chunk, config.engram_max_ngram_size)
        if not 0 <= chunk.start <= chunk.end <= len(chunk.ids):
            raise ChunkOutOfTokens(where, chunk=i, start=chunk.start, stop=chunk.end, known=len(chunk.ids))
        if not 0 <= chunk.slot < cache.slots:
            raise NoSuchSlot(where, chunk=i, slot=chunk.slot, last=cache.slots - 1)
        if chunk.slot in used:
            raise SlotUsedTwice(where, slot=chunk.slot, first=used[chunk.slot], second=i)
        if chunk.end > cache.capacity:
            raise ChunkLongerThanSlot(where, chunk=i, stop=chunk.end, capacity=cache.capacity)
        if chunk.hit > len(chunk.ids):
            raise HitBeyondTokens(where, chunk=i, hit=chunk.hit, known=len(chunk.ids))
        floor = replay_start(config, chunk.hit)
        if chunk.hit < 0 or (chunk.hit and (chunk.start < floor or (ratio and chunk.hit % ratio))):
            raise HitNotReplayable(where, chunk=i, start=chunk.start, hit=chunk.hit, ratio=ratio, floor=floor)
        if chunk.hit and chunk.every_logit:
            raise LogprobsAfterHit(where, chunk=i, hit=chunk.hit)
        if chunk.following < 0:
            raise NoSuchFollowing(where, chunk=i, following=chunk.following)
        if chunk.following and chunk.every_logit:
            raise LogprobsLeftOut(where, chunk=i, following=chunk.following)
        used[chunk.slot] = i


def check_types(where: str, chunk: Chunk, order: int) -> None:
    """ChunkMistyped unless the fields are what they say; of `ids`, those that the step reads."""
    if not isinstance(chunk, Chunk):
        raise mistyped(where, "a chunk", chunk, "a Chunk")
    for name in ("start", "slot", "hit", "stop", "following"):
        value = getattr(chunk, name)
        if type(value) is not int and not (name == "stop" and value is None):
            raise mistyped(where, name, value, "a plain int" + " or None" * (name == "stop"))
    if type(chunk.every_logit) is not bool:
        raise mistyped(where, "every_logit", chunk.every_logit, "True or False")
    if not isinstance(chunk.ids, Sequence) or isinstance(chunk.ids, str | bytes):
        raise mistyped(where, "ids", chunk.ids, "a list of token ids; a tensor has .tolist()")
    for token in chunk.ids[max(chunk.start - order + 1, 0) : max(chunk.end, 0)]:
        if type(token) is not int or token.bit_length() > 63:
            raise mistyped(where, "a token id", token, "plain ints of 64 bits")


def mistyped(where: str, what: str, value: object, wanted: str) -> ChunkMistyped:
    text = repr(value) if isinstance(value, int | float | str | None) else f"of type {type(value).__name__}"
    return ChunkMistyped(where, what=what, value=text, wanted=wanted)


def check_tokens(config: V41Config, chunks: Sequence[Chunk], tokens: Tensor, group: Tensor, columns: Tensor) -> None:
    """Raises for the first of `tokens`, those of all real rows, that the vocabulary does not have."""
    strange = ((tokens < 0) | (tokens >= config.vocab_size)).nonzero().flatten().tolist()
    if strange:
        row, i = strange[0], int(group[strange[0]])
        raise TokenOutOfVocabulary(
            f"build_batch(chunks[{i}])",
            chunk=i,
            token=int(tokens[row]),
            position=chunks[i].start + int(columns[row]),
            vocabulary=config.vocab_size,
        )


def lookback_ids(chunks: Sequence[Chunk], row: Tensor, group: Tensor, order: int) -> Tensor:
    """[rows, order] ids at p, p - 1, ...: real ones across a chunk's start, -1 before the first token and in pads."""
    before = order - 1
    parts = [
        [NOWHERE] * max(before - chunk.start, 0) + list(chunk.ids[max(chunk.start - before, 0) : chunk.end])
        for chunk in chunks
    ]
    pads = [NOWHERE] * (before + int((group == len(chunks)).sum()))
    ids = torch.tensor([*chain(*parts), *pads], dtype=torch.int64)  # `before` more than its rows for each group
    return ids[(row + before * (group + 1)).unsqueeze(-1) - torch.arange(order)]


def block_counts(config: V41Config, context: int) -> dict[int, int]:
    """Ratio -> candidate blocks that cover every entry of `context` tokens, and no fewer entries than top-k picks."""
    ratios, size = sorted({*config.compress_ratios} - {0}), config.candidate_block_size
    return {m: -(-max(config.index_topk, context // m) // size) for m in ratios}


def tensors_of(batch: Batch) -> list[tuple[str, Tensor]]:
    """The tensors by name, but for `blocks`."""
    return [(f.name, value) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)]


def mark(batch: Batch) -> Batch:
    """Tells Dynamo which sizes change from step to step. Nothing where nothing is compiled."""
    sizes = SIZES | {"kept_rows": f"last {batch.kept_last}", "inner_rows": f"last {batch.inner_last}"}
    for name, tensor in tensors_of(batch):
        mark_unbacked(tensor, 0, shape_id=sizes.get(name, "rows"))
    for ratio, blocks in batch.blocks.items():
        mark_unbacked(blocks, 0, shape_id=f"blocks of ratio {ratio}")
    return batch
