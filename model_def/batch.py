"""Batch: the rows of one step, of several requests, prefill and decode mixed. Built on the host, read by the model.

    chunks   [request 0: rows p0..p1) [request 1: ...) ...   ->   T rows, one after another, then pad rows up to a bucket

A chunk says which tokens of a request run in this step and in which cache slot. Everything the model reads is a tensor whose
sizes may change from step to step without a new compilation: the builder marks them. Numbers that bound a size are the shape
of an arange. What the host must know again (which logits belong to whom) stays on the host, in `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch.nn.functional import pad

from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.errors import ModelError


class ChunkLongerThanSlot(ModelError, ValueError):
    """facts: chunk, stop, capacity."""

    found = "chunk {chunk} runs to position {stop}, and a cache slot holds {capacity} tokens"
    fix = "build the cache with a larger capacity, or end the request earlier"


class SlotUsedTwice(ModelError, ValueError):
    """facts: slot, first, second (numbers of the chunks)."""

    found = "chunks {first} and {second} both use cache slot {slot}"
    fix = "give every request of a step a slot of its own; rows of one request are one chunk"


class NoSuchSlot(ModelError, ValueError):
    """facts: chunk, slot, slots."""

    found = "chunk {chunk} uses cache slot {slot}, and the cache has slots 0 to {last}"
    fix = "use a slot the cache has, or build the cache with more"


class TokenOutOfVocabulary(ModelError, ValueError):
    """facts: chunk, token, position, vocabulary."""

    found = "chunk {chunk} holds token {token} at position {position}; the vocabulary has {vocabulary} tokens"
    fix = "tokenize with the model's own tokenizer"


class ChunkOutOfTokens(ModelError, ValueError):
    """facts: chunk, start, stop, known."""

    found = "chunk {chunk} covers positions {start} to {stop}, of {known} known tokens"
    fix = "pass the request's tokens from its first one on, at least to the end of the chunk, and start <= stop"


class HitInsideGroup(ModelError, ValueError):
    """facts: chunk, hit, ratio, start, floor."""

    found = "chunk {chunk} starts at {start} with a prefix hit of {hit} tokens"
    fix = "let a hit end between groups (a multiple of {ratio}) and start within [{floor}, ...): the rows of its last window run again"


class BucketTooSmall(ModelError, ValueError):
    """facts: rows, bucket."""

    found = "the chunks have {rows} rows, the bucket {bucket}"
    fix = "choose a bucket that holds the rows; pad rows need at least one chunk beside them"


# the size in front of each tensor of a Batch; where nothing is said it is "rows"
SIZES = {"first_rows": "requests", "slot_of_request": "requests", "longest": "longest", "logit_rows": "logits"}


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a request that lives in cache slot `slot`.

    ids: the request's tokens from its first one on. stop: None means all of them.
    hit: so many leading tokens were found in a prefix cache: their entries are in the slot, their window keys are not. The
    rows of the last window before `hit` run again, write no entry, and see no window key below that window.
    every_logit: logits of all rows instead of the last; such a request is never approximated.
    """

    ids: Sequence[int]
    start: int
    slot: int
    stop: int | None = None
    hit: int = 0
    every_logit: bool = False

    @property
    def end(self) -> int:
        return len(self.ids) if self.stop is None else self.stop


@dataclass(frozen=True)
class Host:
    """What was put in: the chunks, the first row of each (and the end), the (chunk, position) of each row of logits."""

    chunks: tuple[Chunk, ...]
    bounds: tuple[int, ...]
    logits: tuple[tuple[int, int], ...]
    rows: int  # with pad rows


@dataclass(frozen=True)
class Batch:
    """T rows with pads, R requests, Q rows in the longest chunk, N n-gram order, L rows of logits."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]; -1 in pad rows
    slots: Tensor  # [T] cache slot; the pad slot in pad rows
    starts: Tensor  # [T] first position of the row's chunk in this step
    stops: Tensor  # [T] and the end of it
    floors: Tensor  # [T] no window key below this position (prefix hit)
    late_floors: Tensor  # [T] the same in the layers that SWA bounded replay truncates
    hits: Tensor  # [T] entries that end below this position are cached and not written
    lookback: Tensor  # [T, N] token ids at p, p-1, ...; -1 where there is none
    requests: Tensor  # [T] which request the row belongs to,
    columns: Tensor  # [T] and which of its rows it is
    first_rows: Tensor  # [R] row each request begins at
    slot_of_request: Tensor  # [R]
    longest: Tensor  # arange(Q)
    blocks: dict[int, Tensor]  # ratio -> arange(candidate blocks up to the longest context)
    logit_rows: Tensor  # [L]
    host: Host

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        tensors = {f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return _mark(replace(self, **tensors, blocks={m: t.to(device) for m, t in self.blocks.items()}))


torch.export.register_dataclass(Batch)


def build_batch(
    config: V41Config, cache: Cache, chunks: Sequence[Chunk], *, bucket: int | None = None, device: torch.device | str = "cpu"
) -> Batch:
    """The batch of `chunks`, padded to `bucket` rows if given. Refuses what the cache or the vocabulary cannot hold."""
    check_chunks(config, cache, chunks)
    lengths = [chunk.end - chunk.start for chunk in chunks]
    bounds = [0, *accumulate(lengths)]
    rows = bounds[-1] if bucket is None else bucket
    if rows < bounds[-1] or (rows and not chunks):
        raise BucketTooSmall("build_batch(bucket=...)", rows=bounds[-1], bucket=rows)
    pads = rows - bounds[-1]

    def per_row(values: Sequence[int], of_pads: int) -> Tensor:
        return torch.tensor([*values, of_pads]).repeat_interleave(torch.tensor([*lengths, pads]))

    owner, first = per_row(range(len(chunks)), 0), per_row(bounds[:-1], bounds[-1])
    starts = per_row([chunk.start for chunk in chunks], 0)
    columns = torch.arange(rows) - first
    real = torch.arange(rows) < bounds[-1]
    lookback = torch.cat([torch.empty(0, config.engram_max_ngram_size, dtype=torch.int64)]
                         + [lookback_ids(chunk, config.engram_max_ngram_size) for chunk in chunks])
    lookback = pad(lookback, (0, 0, 0, pads), value=-1)
    floors = [window_floor(config, chunk) for chunk in chunks]
    logits = [(i, p) for i, chunk in enumerate(chunks) for p in logit_positions(chunk)]
    return _mark(Batch(
        tokens=lookback[:, 0].clamp(min=0),
        positions=torch.where(real, starts + columns, -1),
        slots=per_row([chunk.slot for chunk in chunks], cache.pad_slot),
        starts=starts,
        stops=per_row([chunk.end for chunk in chunks], 0),
        floors=per_row([floor for floor, _ in floors], 0),
        late_floors=per_row([late for _, late in floors], 0),
        hits=per_row([chunk.hit for chunk in chunks], 0),
        lookback=lookback,
        requests=owner,
        columns=torch.where(real, columns, 0),
        first_rows=torch.tensor(bounds[:-1], dtype=torch.int64),
        slot_of_request=torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int64),
        longest=torch.arange(max(lengths, default=0)),
        blocks={m: torch.arange(block_count(config, chunks, m)) for m in sorted({*config.compress_ratios} - {0})},
        logit_rows=torch.tensor([bounds[i] + p - chunks[i].start for i, p in logits], dtype=torch.int64),
        host=Host(tuple(chunks), tuple(bounds), tuple(logits), rows),
    ).to(device))


def check_chunks(config: V41Config, cache: Cache, chunks: Sequence[Chunk]) -> None:
    """Raises for the first chunk that cannot run."""
    used: dict[int, int] = {}
    ratio = max(config.compress_ratios, default=1)
    for i, chunk in enumerate(chunks):
        where = f"build_batch(chunks[{i}])"
        if not 0 <= chunk.start <= chunk.end <= len(chunk.ids):
            raise ChunkOutOfTokens(where, chunk=i, start=chunk.start, stop=chunk.end, known=len(chunk.ids))
        if not 0 <= chunk.slot < cache.slots:
            raise NoSuchSlot(where, chunk=i, slot=chunk.slot, last=cache.slots - 1)
        if chunk.slot in used:
            raise SlotUsedTwice(where, slot=chunk.slot, first=used[chunk.slot], second=i)
        if chunk.end > cache.capacity:
            raise ChunkLongerThanSlot(where, chunk=i, stop=chunk.end, capacity=cache.capacity)
        if chunk.hit and (chunk.hit % ratio or chunk.start < window_floor(config, chunk)[0]):
            raise HitInsideGroup(where, chunk=i, hit=chunk.hit, ratio=ratio, start=chunk.start, floor=window_floor(config, chunk)[0])
        used[chunk.slot] = i
        for position in range(chunk.start, chunk.end):
            if not 0 <= chunk.ids[position] < config.vocab_size:
                raise TokenOutOfVocabulary(where, chunk=i, token=chunk.ids[position], position=position, vocabulary=config.vocab_size)


def lookback_ids(chunk: Chunk, order: int) -> Tensor:
    """[rows, order] ids at p, p - 1, ...; real ones across the chunk's border, -1 before the first token."""
    before = max(chunk.start - order + 1, 0)
    ids = torch.tensor(list(chunk.ids[before : chunk.end]), dtype=torch.int64)
    ids = pad(ids, (order - 1 - (chunk.start - before), 1), value=-1)  # [order - 1 + rows + 1]: a chunk may be empty
    return ids.unfold(0, order, 1)[:-1].flip(-1)


def window_floor(config: V41Config, chunk: Chunk) -> tuple[int, int]:
    """The lowest window position the chunk's rows see: in most layers, and in those SWA bounded replay truncates."""
    floor = max(chunk.hit - config.sliding_window, 0)
    trims = chunk.end - chunk.start > config.sliding_window and not chunk.every_logit
    if config.swa_bounded_replay == "off" or not trims:
        return floor, floor
    return floor, max(floor, chunk.end - config.sliding_window)


def logit_positions(chunk: Chunk) -> range:
    """Positions whose logits the chunk asks for: the last row's, or all."""
    return range(chunk.start if chunk.every_logit else max(chunk.end - 1, chunk.start), chunk.end)


def block_count(config: V41Config, chunks: Sequence[Chunk], ratio: int) -> int:
    """Candidate blocks that cover every entry a row of `chunks` sees, and at least the top-k."""
    entries = max([config.index_topk, *(chunk.end // ratio for chunk in chunks)])
    return -(-entries // config.candidate_block_size)


def _mark(batch: Batch) -> Batch:
    """Tells Dynamo which sizes change from step to step. Harmless where nothing is compiled."""
    for f in fields(batch):
        tensor = getattr(batch, f.name)
        if isinstance(tensor, Tensor):
            mark_unbacked(tensor, 0, shape_id=SIZES.get(f.name, "rows"))
    for ratio, blocks in batch.blocks.items():
        mark_unbacked(blocks, 0, shape_id=f"blocks{ratio}")
    return batch
