"""The cache has the released sizes, is written in place and only where a step belongs; and a step costs what its rows
and contexts cost, whatever the capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies.configs import configs
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.errors import CacheBeyondPositions, CacheHasNoRoom, EntriesNotThere
from v41.model_def.model import V41ForCausalLM

TINY = V41Config.preset("tiny").replace(hc_sinkhorn_iters=1)


def all_tensors(cache: Cache) -> dict[str, Tensor]:
    named = {f"ring {i}": ring for i, ring in enumerate(cache.rings)}
    for kind in ("entries", "index_keys", "tails"):
        named |= {f"{kind} {source}": tensor for source, tensor in getattr(cache, kind).items()}
    return named


def test_released_sizes() -> None:
    """890 bytes a token; rings of 67,584 bytes a layer; a tail where groups have two tokens."""
    cache = Cache.zeros(V41Config.preset("flash"), 3, 1000, device="meta")
    assert cache.bytes_per_token() == 890
    assert {ring.shape for ring in cache.rings} == {(4, 128, 528)} and len(cache.rings) == 40
    assert {source: tuple(t.shape) for source, t in cache.entries.items()} == {
        2: (4, 501, 288), 8: (4, 501, 288), 14: (4, 501, 288), 20: (4, 1001, 288)}
    assert {t.shape[2] for t in cache.index_keys.values()} == {68}
    assert {source: (tuple(t.shape), t.dtype) for source, t in cache.tails.items()} == {
        source: ((4, 2, 512), torch.float32) for source in (2, 8, 14)}
    assert {t.dtype for name, t in all_tensors(cache).items() if "tails" not in name} == {torch.uint8}


@pytest.mark.parametrize(("asked", "has"), [(1, 2), (2, 2), (37, 38)])
def test_capacity_is_whole_groups(asked: int, has: int) -> None:
    cache = Cache.zeros(TINY, 1, asked)
    assert cache.capacity == has and cache.bytes_per_token() == Cache.zeros(TINY, 1, 64).bytes_per_token()


@given(configs(max_layers=6), st.integers(1, 40), st.integers(1, 3))
def test_bytes_a_token_are_what_the_tensors_grow_by(config: V41Config, tokens: int, slots: int) -> None:
    """Two groups' worth at a time, of any model; rings and tails do not grow."""
    small, large = (Cache.zeros(config, slots, 2 * n, "meta") for n in (tokens, tokens + 1))
    grown = [sum(t.nbytes for t in all_tensors(cache).values()) for cache in (small, large)]
    assert grown[1] - grown[0] == (slots + 1) * 2 * small.bytes_per_token() == (slots + 1) * 2 * large.bytes_per_token()
    for name, tensor in all_tensors(small).items():
        assert ("ring" in name or "tail" in name) == (tensor.shape == all_tensors(large)[name].shape), name


@pytest.mark.parametrize("value", [0, -4, True, 2.0, "8", None, torch.tensor(8)])
@pytest.mark.parametrize("name", ["slots", "capacity"])
def test_a_cache_for_nobody_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CacheHasNoRoom) as refusal:
        Cache.zeros(TINY, **{"slots": 2, "capacity": 8, name: value})
    assert refusal.value.facts["name"] == name


def test_a_cache_beyond_the_positions_of_the_model_is_refused() -> None:
    """RoPE is stretched so far and no further; one less than the next group is rounded up within it."""
    assert Cache.zeros(TINY, 1, TINY.max_position_embeddings, "meta").capacity == TINY.max_position_embeddings
    with pytest.raises(CacheBeyondPositions) as refusal:
        Cache.zeros(TINY, 1, TINY.max_position_embeddings + 1, "meta")
    assert refusal.value.facts == {"capacity": 1025, "positions": 1024}


@settings(max_examples=settings.default.max_examples // 3)  # each runs a model
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2))
def test_a_step_writes_its_own_places_only(start: int, rows: int, slot: int) -> None:
    """Every other byte stays, and what is written lies where it lay: in the same memory."""
    model, ids, capacity = V41ForCausalLM.random(TINY, seed=2), list(range(60)), 60
    cache = Cache.zeros(TINY, 3, capacity)
    for t in all_tensors(cache).values():
        t.fill_(7)
    before = {name: (t.clone(), t.data_ptr()) for name, t in all_tensors(cache).items()}
    with torch.no_grad():
        model(build_batch(TINY, cache, [Chunk(ids, start, slot, start + rows)]), cache)
    stop, window = start + rows, TINY.sliding_window
    for name, after in all_tensors(cache).items():
        old, address = before[name]
        assert after.data_ptr() == address
        kind, _, number = name.partition(" ")
        places = after.shape[1] - 1 if kind in ("entries", "index_keys") else after.shape[1]
        changed = {(s, e) for s, e in (after != old).any(-1).nonzero().tolist() if s < 3 and e < places}
        if kind == "ring":
            allowed = {(slot, p % window) for p in range(max(start, stop - window), stop)}
        elif kind == "tails":
            allowed = {(slot, 0), (slot, 1)} if rows else set()
        else:
            m = TINY.compress_ratios[int(number)]
            allowed = {(slot, g) for g in range(start // m, stop // m)}
        assert changed == allowed, name


class Writes(TorchDispatchMode):
    """Places (slot, place) that each in-place indexed write names."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[Tensor, list[tuple[int, int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default:
            slots, *rest = torch.broadcast_tensors(*args[1])
            self.places.append((args[0], list(zip(slots.tolist(), *(r.tolist() for r in rest), strict=True))))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_no_place_that_counts_is_written_twice_in_a_step() -> None:
    """A chunk of three windows and a bit: which of two writes to one place came last would be the device's choice."""
    model, ids = V41ForCausalLM.random(TINY, seed=4), list(range(60))
    cache = Cache.zeros(TINY, 2, 60)
    with Writes() as written:
        chunks = [Chunk(ids, 3, 1, 55), Chunk(ids, 0, 0, 17)]
        model(build_batch(TINY, cache, chunks, buckets=Buckets(prefill=(80,))), cache)
    assert len(written.places) == len(all_tensors(cache))
    for tensor, places in written.places:
        entries = any(tensor is t for kind in (cache.entries, cache.index_keys) for t in kind.values())
        live = [p for p in places if p[0] != cache.pad_slot and not (entries and p[1] == tensor.shape[1] - 1)]
        assert live and len(live) == len(set(live))


class Bytes(TorchDispatchMode):
    """Bytes that operators allocate: outputs that are no view and no argument written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(arg.alias_info is not None for arg in func._schema.arguments):
            leaves = torch.utils._pytree.tree_leaves(out)
            self.total += sum(t.nbytes for t in leaves if isinstance(t, Tensor))
        return out


@torch.no_grad()
def test_cost_follows_rows_and_contexts_and_not_capacity() -> None:
    config = TINY.replace(max_position_embeddings=64 * 128)
    model, ids = V41ForCausalLM.random(config, seed=3), [(3 * i) % 500 for i in range(96)]

    def cost(slots: int, capacity: int, stop: int) -> tuple[int, Tensor]:
        cache = Cache.zeros(config, slots, capacity)
        model(build_batch(config, cache, [Chunk(ids, 0, 0, stop)]), cache)
        batch = build_batch(config, cache, [Chunk(ids, stop, 0, stop + 1)])
        with Bytes() as counted:
            logits = model(batch, cache)
        return counted.total, logits

    (small, logits), (large, same) = cost(1, 128, 90), cost(64, 64 * 128, 90)
    assert small == large and torch.equal(logits, same)
    assert cost(1, 128, 20)[0] < small  # and a shorter context is cheaper


@pytest.mark.parametrize("source, slot, tokens", [(0, 2, 4), (-1, 1, 4), (0, 1, 65), (0, 1, -4)])
def test_entries_are_copied_between_slots_that_hold_them(source: int, slot: int, tokens: int) -> None:
    """The pad slot is none, and what lies behind a slot's capacity is another's."""
    cache = Cache.zeros(V41Config.preset("tiny"), 2, 64)
    with pytest.raises(EntriesNotThere) as caught:
        cache.copy_entries(source, slot, tokens)
    assert caught.value.facts == {"source": source, "slot": slot, "tokens": tokens, "last": 1, "capacity": 64}


def test_entries_of_so_many_tokens_are_copied_and_no_more() -> None:
    cache = Cache.zeros(TINY, 2, 64)
    for group in (cache.entries, cache.index_keys):
        for records in group.values():
            records[0] = 7
    cache.copy_entries(0, 1, 21)
    for source, ratio in ((source, TINY.compress_ratios[source]) for source in TINY.kv_source_layer_ids):
        for group in (cache.entries, cache.index_keys):
            assert group[source][1].eq(7).all(-1).tolist() == [g < 21 // ratio for g in range(64 // ratio + 1)]
    assert all(ring.eq(0).all() for ring in cache.rings)  # window keys stay away
