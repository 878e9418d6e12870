"""A row's result hangs on its request alone: not on chunks, neighbours, slots, pad rows or what a cache held before.

Everything here is bit for bit: sums in exact mode do not show their order. What a batch cannot hold is refused with a
type each; what it is made of is checked against plain bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model_def.exact import exact
from tests.model_def.rows import QUICK, TINY, alone, scheduled
from tests.strategies.batches import Schedule, buckets, poisoned, schedules
from tests.strategies.configs import configs
from v41.model_def.batch import Chunk, build_batch, mark, tensors_of
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.errors import (
    ChunkLongerThanSlot,
    ChunkMistyped,
    ChunkOutOfTokens,
    HitBeyondTokens,
    HitNotReplayable,
    LogprobsAfterHit,
    LogprobsLeftOut,
    ModelError,
    NoSuchFollowing,
    NoSuchSlot,
    SlotUsedTwice,
    TokenOutOfVocabulary,
)
from v41.model_def.model import V41ForCausalLM

TWO_LAYERS = QUICK.replace(  # the two kinds with the most in them: this compiles in seconds
    num_hidden_layers=2,
    compress_ratios=(2, 2),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0, 1),
    candidate_source_layer_id=0,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    hc_sinkhorn_iters=1,
)
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # of examples that take a second each
forwards = settings(max_examples=settings.default.max_examples // 3, phases=NO_SHRINKING)


def check_rows(config: V41Config, schedule: Schedule) -> None:
    model = V41ForCausalLM.random(config, seed=5)
    for request, logits in zip(schedule.requests, scheduled(model, schedule), strict=True):
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, alone(model, request))


@forwards
@given(schedules(TINY.vocab_size, requests=6))
def test_rows_hang_on_their_request_alone(schedule: Schedule) -> None:
    check_rows(QUICK, schedule)


@pytest.mark.slow
@settings(phases=NO_SHRINKING)
@given(st.data())
def test_rows_of_any_model_hang_on_their_request_alone(data: st.DataObject) -> None:
    config = data.draw(configs(max_layers=5))
    check_rows(config, data.draw(schedules(config.vocab_size)))


@forwards
@given(schedules(TINY.vocab_size, requests=4), st.data(), st.integers(-1, 300))
def test_pad_rows_reach_nothing(schedule: Schedule, data: st.DataObject, garbage: int) -> None:
    """Pad rows of NaN with any numbers beside them: no slot of the cache changes, and no row's logits do."""
    model, chunks = V41ForCausalLM.random(QUICK, seed=6), schedule.steps[0]
    rows, nobody = sum(chunk.rows for chunk in chunks), QUICK.vocab_size - 1
    model.embed.weight.data[nobody] = torch.nan
    results = []
    for ladders in (None, data.draw(st.just(Buckets((rows + 2,), (rows + 3,), (30,))) | buckets())):
        cache = poisoned(QUICK, schedule.slots, 40)
        batch = build_batch(QUICK, cache, chunks, buckets=ladders)
        for tensor in (batch.starts, batch.stops, batch.floors, batch.late_floors, batch.hits, batch.lookback):
            tensor[rows:] = garbage
        batch.tokens[rows:] = nobody
        batch.first_rows[len(chunks) :] = len(batch.tokens) - 1
        with exact(), torch.no_grad():
            logits = model(batch, cache)[: len(batch.host.logits)]
        live = [t[:-1] for t in (*cache.rings, *cache.tails.values())]
        stored = [t[:-1, :-1] for t in (*cache.entries.values(), *cache.index_keys.values())]
        results.append([t.view(torch.uint8) for t in (logits, *live, *stored)])
    assert all(map(torch.equal, *results))


@torch.no_grad()
def test_a_nan_is_seen_wherever_its_row_is_seen() -> None:
    """Though index keys lose it: of 30 rows with one NaN at 12, none before it has any, and all whose window holds it.
    In chunks too, which read it back from the ring."""
    model, ids, window = V41ForCausalLM.random(QUICK, seed=8), list(range(30)), QUICK.sliding_window
    model.embed.weight.data[12, 0] = torch.nan
    for cuts in ([0, 30], [0, 13, 14, 30]):
        cache = Cache.zeros(QUICK, 1, 30)
        chunks = [Chunk(ids, start, 0, stop, every_logit=True) for start, stop in pairwise(cuts)]
        logits = torch.cat([model(build_batch(QUICK, cache, [chunk]), cache) for chunk in chunks])
        assert not logits[:12].isnan().any() and logits[12 : 12 + window].isnan().all()


@given(schedules(TINY.vocab_size))
def test_fields_are_what_they_say(schedule: Schedule) -> None:
    config, order = TINY, TINY.engram_max_ngram_size
    cache = Cache.zeros(config, schedule.slots, 64)
    for chunks in schedule.steps:
        batch, rows = build_batch(config, cache, chunks, buckets=schedule.buckets), iter(range(10**6))
        real = sum(chunk.rows for chunk in chunks)
        for r, chunk in enumerate(chunks):
            assert int(batch.first_rows[r]) == batch.host.bounds[r] and int(batch.slot_of_request[r]) == chunk.slot
            for column, p in enumerate(range(chunk.start, chunk.end)):
                t = next(rows)
                assert (int(batch.tokens[t]), int(batch.positions[t])) == (chunk.ids[p], p)
                assert int(batch.slots[t]) == chunk.slot
                assert (int(batch.requests[t]), int(batch.columns[t])) == (r, column)
                assert (int(batch.starts[t]), int(batch.stops[t])) == (chunk.start, chunk.end)
                assert batch.lookback[t].tolist() == [chunk.ids[p - n] if p >= n else -1 for n in range(order)]
        pads = list(range(next(rows), len(batch.tokens)))
        assert batch.host.rows == len(batch.tokens) >= real
        assert batch.positions[pads].eq(-1).all() and batch.slots[pads].eq(cache.pad_slot).all()
        assert batch.lookback[pads].eq(-1).all()
        assert batch.logit_rows.tolist() == [*range(real), *[0] * (len(batch.logit_rows) - real)]
        assert batch.first_rows[len(chunks) :].eq(0).all()
        assert batch.slot_of_request[len(chunks) :].eq(cache.pad_slot).all()
        for ratio, blocks in batch.blocks.items():
            entries = len(blocks) * config.candidate_block_size
            assert entries >= config.index_topk and all(chunk.end // ratio <= entries for chunk in chunks)


def test_one_row_of_logits_a_chunk_unless_all_are_asked_for() -> None:
    cache = Cache.zeros(TINY, 4, 16)
    ids = [1] * 5
    chunks = [Chunk(ids, 0, 0), Chunk(ids, 3, 1, 3), Chunk(ids, 2, 2, every_logit=True), Chunk([1] * 9, 8, 3)]
    batch = build_batch(TINY, cache, chunks, buckets=Buckets(prefill=(16,)))
    assert len(batch.tokens) == 16 and batch.logit_rows.tolist() == [4, 5, 6, 7, 8]
    assert batch.host.logits == ((0, 4), (2, 2), (2, 3), (2, 4), (3, 8))


def test_the_look_back_goes_across_chunks_and_hits_and_sees_no_image() -> None:
    config = TINY.replace(image_token_id=9)
    ids = [3, 4, 5, 9, 9, 6, 7, *[1] * 25]
    cache = Cache.zeros(config, 3, 32)
    chunks = [Chunk(ids, 1, 0, 8), Chunk(ids, 6, 1, 7), Chunk(ids, 4, 2, hit=20)]
    batch = build_batch(config, cache, chunks)
    assert batch.tokens.tolist() == [*ids[1:8], 7, *ids[4:]]
    by_position = {2: [5, 4, 3, -1], 3: [-1, 5, 4, 3], 5: [6, -1, -1, 5], 6: [7, 6, -1, -1], 7: [1, 7, 6, -1]}
    for p, expected in by_position.items():
        assert batch.lookback[p - 1].tolist() == expected, p
    assert batch.lookback[7].tolist() == by_position[6] and batch.lookback[8:12].tolist() == [
        [-1, -1, 5, 4], by_position[5], by_position[6], by_position[7]]  # fmt: skip
    assert build_batch(TINY, cache, chunks).lookback[2].tolist() == [9, 5, 4, 3]  # where nothing stands for an image


FLOORS = {  # switch, start, stop, hit, every logit -> floors of the rows; W is 16
    ("off", 0, 60, 0, False): (0, 0),
    ("after_source", 0, 60, 0, False): (0, 44),
    ("after_source", 0, 16, 0, False): (0, 0),  # no longer than the window: nothing is cut off
    ("after_source", 59, 60, 0, False): (0, 0),  # a decode step sees its whole window
    ("after_source", 0, 60, 0, True): (0, 0),  # prompt logprobs want every row right
    ("from_source", 32, 60, 48, False): (32, 44),
    ("off", 40, 60, 48, False): (32, 32),
    ("after_source", 32, 60, 12, False): (0, 44),  # a hit within the window is computed again
    ("after_source", 32, 48, 48, False): (32, 32),  # a chunk that ends where the hit does
    ("from_source", 16, 60, 32, False): (16, 44),  # the higher floor of both
}


@pytest.mark.parametrize("case", FLOORS)
def test_window_floors(case: tuple[str, int, int, int, bool]) -> None:
    switch, start, stop, hit, every_logit = case
    config = TINY.replace(swa_bounded_replay=switch)
    chunk = Chunk([1] * 60, start, 0, stop, hit, every_logit)
    batch = build_batch(config, Cache.zeros(config, 1, 60), [chunk])
    assert (set(batch.floors.tolist()), set(batch.late_floors.tolist())) == tuple({floor} for floor in FLOORS[case])
    assert set(batch.hits.tolist()) == {hit}


REFUSALS: list[tuple[type[ModelError], list[Chunk], dict[str, Any], dict[str, object]]] = [
    (ChunkLongerThanSlot, [Chunk([1] * 33, 0, 0)], {}, {"chunk": 0, "stop": 33, "capacity": 32}),
    (SlotUsedTwice, [Chunk([1], 0, 1), Chunk([1], 0, 0), Chunk([1], 0, 1)], {}, {"slot": 1, "first": 0, "second": 2}),
    (NoSuchSlot, [Chunk([1], 0, 2)], {}, {"slot": 2, "last": 1}),
    (NoSuchSlot, [Chunk([1], 0, -1)], {}, {"slot": -1}),
    (TokenOutOfVocabulary, [Chunk([1], 0, 0), Chunk([4, 5, 512], 1, 1)], {}, {"chunk": 1, "token": 512, "position": 2}),
    (TokenOutOfVocabulary, [Chunk([-1], 0, 0)], {}, {"token": -1, "position": 0}),
    (ChunkOutOfTokens, [Chunk([1, 2], 0, 0, 3)], {}, {"stop": 3, "known": 2}),
    (ChunkOutOfTokens, [Chunk([1, 2], 2, 0, 1)], {}, {"start": 2, "stop": 1}),
    (ChunkOutOfTokens, [Chunk([1, 2], -1, 0, 1)], {}, {"start": -1}),
    (HitBeyondTokens, [Chunk([1] * 30, 28, 0, hit=36)], {}, {"hit": 36, "known": 30}),
    (HitNotReplayable, [Chunk([1] * 30, 14, 0, hit=25)], {}, {"hit": 25, "ratio": 2}),
    (HitNotReplayable, [Chunk([1] * 30, 7, 0, hit=24)], {}, {"start": 7, "floor": 8}),
    (LogprobsAfterHit, [Chunk([1] * 30, 8, 0, hit=24, every_logit=True)], {}, {"chunk": 0, "hit": 24}),
    (NoSuchFollowing, [Chunk([1], 0, 0, following=-1)], {}, {"chunk": 0, "following": -1}),
    (LogprobsLeftOut, [Chunk([1], 0, 1), Chunk([1], 0, 0, every_logit=True, following=9)], {}, {"chunk": 1}),
]


@pytest.mark.parametrize(("error", "chunks", "options", "facts"), REFUSALS)
def test_what_cannot_run_is_refused(
    error: type[ModelError], chunks: list[Chunk], options: dict[str, Any], facts: dict[str, object]
) -> None:
    cache = Cache.zeros(TINY, 2, 32)
    with pytest.raises(error) as refusal:
        build_batch(TINY, cache, chunks, **options)
    assert facts.items() <= refusal.value.facts.items()
    assert "\n  at   build_batch(" in str(refusal.value) and "\n  fix  " in str(refusal.value)


MISTYPED: list[tuple[Any, str]] = [  # chunks, and what the error names
    (Chunk([1], 0, 0), "chunks"), (iter([Chunk([1], 0, 0)]), "chunks"), ([([1], 0, 0)], "a chunk"), ([None], "a chunk"),
    *(([Chunk([1, 2], **{"start": 0, "slot": 0, name: value})], name)  # type: ignore[arg-type]
      for name in ("start", "slot", "stop", "hit", "following") for value in (True, 1.0, "1", torch.tensor(1))),
    ([Chunk([1], None, 0)], "start"), ([Chunk([1], 0, 0, every_logit=1)], "every_logit"),  # type: ignore[arg-type]
    *(([Chunk(ids, 0, 0)], "ids") for ids in (torch.tensor([1]), "12", b"12", {1, 2}, None)),  # type: ignore[arg-type]
    *(([Chunk([7, token], 0, 0)], "a token id")
      for token in (True, 1.0, None, torch.tensor(1), 1 << 63)),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(("chunks", "what"), MISTYPED)
def test_what_has_another_type_is_named(chunks: Any, what: str) -> None:
    with pytest.raises(ChunkMistyped) as refusal:
        build_batch(TINY, Cache.zeros(TINY, 2, 32), chunks)
    assert refusal.value.facts["what"] == what and "build_batch(chunks" in str(refusal.value)


@pytest.mark.parametrize(("device", "found"), [(None, "meta"), ("cpu", "cpu")])
def test_a_batch_is_where_its_cache_is_unless_told_otherwise(device: str | None, found: str) -> None:
    batch = build_batch(TINY, Cache.zeros(TINY, 1, 16, "meta"), [Chunk([1, 2, 3], 0, 0)], device=device)
    assert {tensor.device.type for _, tensor in tensors_of(batch)} == {found}


def test_moving_a_batch_keeps_its_marks_and_its_numbers() -> None:
    batch = build_batch(TINY, Cache.zeros(TINY, 1, 16), [Chunk([1, 2, 3], 0, 0)])
    moved = batch.to("meta")
    assert moved.host is batch.host and moved.blocks[2].device.type == moved.tokens.device.type == "meta"
    for one in (batch, moved):
        for name, tensor in (*tensors_of(one), *one.blocks.items()):
            assert tensor._dynamo_unbacked_indices == {0}, name
    assert mark(batch) is batch


def test_it_is_a_pytree() -> None:
    batch = build_batch(TINY, Cache.zeros(TINY, 1, 16), [Chunk([1, 2, 3], 0, 0)])
    doubled: Any = torch.utils._pytree.tree_map_only(Tensor, lambda t: 2 * t, batch)
    assert torch.equal(doubled.positions, 2 * batch.positions) and doubled.host == batch.host


def compiled(model: V41ForCausalLM) -> tuple[Callable[..., Tensor], list[int]]:
    """The model with its graph run as it is, and the number of nodes of each graph that was made."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[int] = []

    def count(gm: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(len(gm.graph.nodes))
        return aot_eager(gm, inputs)

    return torch.compile(model, backend=count, fullgraph=True), graphs


@pytest.mark.parametrize("config", [TWO_LAYERS, pytest.param(QUICK, marks=pytest.mark.slow)], ids=["two", "four"])
@torch.no_grad()
def test_one_graph_for_all_sizes(config: V41Config) -> None:
    """0 to 300 rows, 1 to 8 requests: compiled once, without a break; results and caches are eager's, bit for bit."""
    torch.compiler.reset()
    model = V41ForCausalLM.random(config, seed=7)
    forward, graphs = compiled(model)
    caches = [Cache.zeros(config, 8, 304) for _ in range(2)]
    runs, ids = [(forward, caches[0]), (model, caches[1])], [(7 * i) % 500 for i in range(304)]
    for lengths in ([5, 1], [0], [1], [2], [127], [128, 1, 1], [129], [300, 1, 2, 3, 0, 5, 6, 7], [0] * 8):
        chunks = [Chunk(ids, 0, slot, length) for slot, length in enumerate(lengths)]
        ours, eager = (run(build_batch(config, cache, chunks), cache) for run, cache in runs)
        assert torch.equal(ours, eager), lengths
    chunks = [Chunk(ids, length, slot, length + 1) for slot, length in enumerate([300, 1, 2, 3])]
    ours, eager = (run(build_batch(config, cache, chunks, buckets=Buckets()), cache)[:4] for run, cache in runs)
    assert torch.equal(ours, eager)
    for name in ("entries", "index_keys", "tails"):
        one, other = (getattr(cache, name) for cache in caches)
        assert all(torch.equal(one[source][:-1], other[source][:-1]) for source in one)
    assert len(graphs) == 1, graphs
