"""Hypothesis strategies for ragged batches: requests cut into chunks, chunks gathered in steps, slots shuffled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from v41.model_def.batch import Chunk
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config


@dataclass(frozen=True)
class Schedule:
    """Steps that read every token of every request once, in order."""

    requests: tuple[list[int], ...]
    steps: tuple[tuple[Chunk, ...], ...]
    owners: tuple[tuple[int, ...], ...]  # request of each chunk
    buckets: Buckets | None  # what each step is padded to
    slots: int


@st.composite
def schedules(draw: st.DrawFn, vocabulary: int, requests: int = 3, tokens: int = 40) -> Schedule:
    """At most `requests` requests of at most `tokens` tokens; a chunk may be empty, and all logits are asked for."""
    request = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=tokens)
    ids = draw(st.lists(request, min_size=1, max_size=requests))
    slots = draw(st.permutations(range(len(ids) + draw(st.integers(0, 2)))))
    left: dict[int, list[Chunk]] = {}
    for i, known in enumerate(ids):
        cuts = sorted(draw(st.lists(st.integers(0, len(known)), max_size=4)))
        bounds = zip([0, *cuts], [*cuts, len(known)], strict=True)
        left[i] = [Chunk(known, start, slots[i], stop, every_logit=True) for start, stop in bounds]
    steps, owners = [], []
    while left:
        who = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        steps.append(tuple(left[i].pop(0) for i in who))
        owners.append(tuple(who))
        left = {i: chunks for i, chunks in left.items() if chunks}
    return Schedule(tuple(ids), tuple(steps), tuple(owners), draw(st.none() | buckets()), len(slots))


@st.composite
def buckets(draw: st.DrawFn) -> Buckets:
    """Ladders with a few rungs; some steps lie beyond the last."""

    def ladder(most: int) -> tuple[int, ...]:
        return tuple(sorted(draw(st.sets(st.integers(1, most), min_size=1, max_size=4))))

    return Buckets(ladder(6), ladder(24), ladder(24))


def poisoned(config: V41Config, slots: int, capacity: int) -> Cache:
    """A cache in which every number read before it is written is NaN: e4m3 values and scales of bytes 0xFF."""
    cache = Cache.zeros(config, slots, capacity)
    for tensor in (*cache.rings, *cache.entries.values(), *cache.index_keys.values()):
        tensor.fill_(0xFF)
    for tail in cache.tails.values():
        tail.fill_(torch.nan)
    return cache
