"""Cache: what a request keeps between steps, as stored records, in slots of fixed capacity. Written in place.

    rings       every layer        [slots + 1, W, 528]            fp8 window records, position p at p mod W
    entries     every KV source    [slots + 1, entries + 1, 288]  fp4 records of the compressed latents
    index_keys  every KV source    [slots + 1, entries + 1, 68]   mxfp4 records that the indexers score
    tails       ratio-2 sources    [slots + 1, 2, 512]            fp32 value and gate of a group's first token

The last slot and, in each slot, the last entry are nobody's: they absorb what has no other place to go (pad rows, rows
that complete no group), so every write has one shape. Bytes are the released sizes. No step reads or copies a whole
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41.model_def.config import V41Config
from v41.model_def.errors import CacheBeyondPositions, CacheHasNoRoom, EntriesNotThere
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD

SHAPING = (  # what decides which records there are
    "num_hidden_layers",
    "sliding_window",
    "head_dim",
    "index_head_dim",
    "compress_ratios",
    "kv_source_layer_ids",
)


def cache_facts(config: V41Config) -> str:
    """What of `config` decides which records a cache has, as text: caches of equal text serve the same models."""
    return told(config, SHAPING)


def told(config: V41Config, names: Sequence[str]) -> str:
    """Fields of `config`, a line each."""
    return "\n".join(f"{name} = {getattr(config, name)}" for name in names)


@dataclass(frozen=True)
class Cache:
    """Room for `slots` requests of up to `capacity` tokens. Build it with `Cache.zeros`."""

    made_for: str  # cache_facts of the model
    slots: int
    capacity: int
    rings: tuple[Tensor, ...]  # a layer each
    entries: Mapping[int, Tensor]  # by KV source
    index_keys: Mapping[int, Tensor]
    tails: Mapping[int, Tensor]

    @classmethod
    def zeros(cls, config: V41Config, slots: int, capacity: int, device: torch.device | str = "cpu") -> Cache:
        """An empty cache; `capacity` is rounded up to whole groups.

        CacheHasNoRoom where there is nothing to hold, CacheBeyondPositions where it is more than the model reads.
        """
        for name, value in (("slots", slots), ("capacity", capacity)):
            if type(value) is not int or value < 1:
                raise CacheHasNoRoom("Cache.zeros", name=name, value=value)
        if capacity > config.max_position_embeddings:
            positions = config.max_position_embeddings
            raise CacheBeyondPositions("Cache.zeros", capacity=capacity, positions=positions)
        width, key_width, window = config.head_dim, config.index_head_dim, config.sliding_window
        ratios = {source: config.compress_ratios[source] for source in config.kv_source_layer_ids}
        capacity += -capacity % max([1, *ratios.values()])

        def records(rows: int, size: int) -> Tensor:
            return torch.zeros(slots + 1, rows, size, dtype=torch.uint8, device=device)

        return cls(
            cache_facts(config),
            slots,
            capacity,
            tuple(records(window, FP8_RECORD.size(width)) for _ in range(config.num_hidden_layers)),
            {source: records(capacity // m + 1, FP4_RECORD.size(width)) for source, m in ratios.items()},
            {source: records(capacity // m + 1, MXFP4_RECORD.size(key_width)) for source, m in ratios.items()},
            {source: torch.zeros(slots + 1, 2, width, device=device) for source, m in ratios.items() if m > 1},
        )

    @property
    def pad_slot(self) -> int:
        return self.slots

    @property
    def device(self) -> torch.device:
        return self.rings[0].device

    def copy_entries(self, source: int, slot: int, tokens: int) -> None:
        """What the first `tokens` of the request in slot `source` leave for good, into another slot: a prefix hit."""
        slots, enough = range(self.slots), 0 <= tokens <= self.capacity
        whole = all(type(number) is int for number in (source, slot, tokens))
        if not whole or source not in slots or slot not in slots or not enough:
            facts = {"source": source, "slot": slot, "last": self.slots - 1, "capacity": self.capacity}
            raise EntriesNotThere("Cache.copy_entries", tokens=tokens, **facts)
        for group in (self.entries, self.index_keys):
            for records in group.values():
                entries = tokens * (records.shape[1] - 1) // self.capacity
                records[slot, :entries] = records[source, :entries]

    def bytes_per_token(self) -> float:
        """What one more token of context costs; rings and tails do not grow."""
        grown = sum((t.shape[1] - 1) * t.shape[2] for group in (self.entries, self.index_keys) for t in group.values())
        return grown / self.capacity
