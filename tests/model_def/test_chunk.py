"""What a chunk's rows see: prompt logprobs stay exact, a hit's rows hang on their request alone, any lengths mix."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model_def.exact import exact
from tests.model_def.rows import QUICK, TINY, alone
from tests.strategies.batches import poisoned
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.chunk import kept_last, reach, replay_start, rows_kept, usable_hit, window_floors
from v41.model_def.model import V41ForCausalLM
from v41.passes.same_values import same_bits

W = QUICK.sliding_window
EACH_TAKES_SECONDS = (Phase.explicit, Phase.reuse, Phase.generate)
forwards = settings(max_examples=settings.default.max_examples // 3, phases=EACH_TAKES_SECONDS)
ids_of = lambda n: st.lists(st.integers(0, QUICK.vocab_size - 1), min_size=n, max_size=n)


@torch.no_grad()
def step(model: V41ForCausalLM, cache: Cache, chunks: list[Chunk]) -> Tensor:
    with exact():
        return model(build_batch(model.config, cache, chunks), cache)


@pytest.mark.parametrize("switch", ["after_source", "from_source"])
def test_prompt_logprobs_are_exact_beside_requests_that_are_cut(switch: str) -> None:
    config, ids = TINY.replace(swa_bounded_replay=switch), [11 * n % 500 for n in range(3 * TINY.sliding_window + 1)]
    model, whole = V41ForCausalLM.random(config, seed=5), alone(V41ForCausalLM.random(TINY, seed=5), ids)
    chunks = [Chunk(ids, 0, 0), Chunk(ids, 0, 1, every_logit=True)]
    logits = step(model, poisoned(config, 2, len(ids)), chunks)
    assert torch.equal(logits[1:], whole)
    assert not torch.equal(logits[0], whole[-1])


@forwards
@given(st.data())
def test_rows_after_a_hit_hang_on_their_request_alone(data: st.DataObject) -> None:
    """Not on chunks, slot or neighbours, nor on what ring and tail hold."""
    ids = data.draw(ids_of(data.draw(st.integers(W + 3, 10 * W))))
    hit = 2 * data.draw(st.integers(1, (len(ids) - 1) // 2))
    model, start = V41ForCausalLM.random(QUICK, seed=5), replay_start(QUICK, hit)

    def after_a_hit(slot: int, source: int, cuts: list[int], beside: list[int]) -> Tensor:
        cache = poisoned(QUICK, 4, len(ids))
        step(model, cache, [Chunk(ids, 0, source, hit)])
        cache.copy_entries(source, slot, hit)
        for n, (begin, end) in enumerate(pairwise([start, *cuts, len(ids)])):
            neighbour = [Chunk(beside, n, 3, n + 1)] if beside else []
            logits = step(model, cache, [*neighbour, Chunk(ids, begin, slot, end, hit)])
        return logits[-1]

    slot, source = data.draw(st.permutations(range(3)))[:2]
    cuts = sorted(data.draw(st.lists(st.integers(start, len(ids) - 1), max_size=3)))
    once = after_a_hit(0, 1, [], [])
    assert torch.isfinite(once).all()
    assert torch.equal(after_a_hit(slot, source, cuts, data.draw(ids_of(len(cuts) + 1))), once)


@torch.no_grad()
def after_two_chunks(model: V41ForCausalLM, rows: int, stale: bool) -> list[Tensor]:
    """Logits behind a prompt's last chunk of so many rows, and what is in the rings then. stale: nothing that the last
    source or the layers behind it left of the first chunk is there."""
    config, first = model.config, 40
    ids, cache = [11 * n % 500 for n in range(first + rows)], Cache.zeros(model.config, 1, first + rows)
    told = model(build_batch(config, cache, [Chunk(ids, 0, 0, first, following=rows)]), cache)
    assert len(told) == 0
    for ring in cache.rings[config.last_kv_source :] if stale else ():
        ring[0] = 0xFF
    return [model(build_batch(config, cache, [Chunk(ids, first, 0)]), cache), *(ring[0] for ring in cache.rings)]


@pytest.mark.parametrize(("switch", "rows"), [("off", 46), ("after_source", 31), ("from_source", 17)])
def test_a_long_chunk_reads_nothing_that_late_layers_left_of_the_one_before(switch: str, rows: int) -> None:
    config = TINY.replace(swa_bounded_replay=switch)
    model = V41ForCausalLM.random(config, seed=5)
    assert reach(config) == rows
    for count, alike in ((rows, True), (rows + 9, True), (rows - 1, False), (1, False)):
        fresh, stale = (after_two_chunks(model, count, each) for each in (False, True))
        assert all(map(same_bits, fresh, stale)) is alike
        kept = rows_kept(config, Chunk([1] * 40, 0, 0, following=count), kept_last(config))
        assert kept == (0 if alike else min(40, kept_last(config)))


LENGTHS = (0, 1, 2, W - 1, W, W + 1, 2 * W, 3 * W + 1)


@forwards
@given(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=24), ids_of(3 * W + 2))
def test_many_requests_of_any_lengths_share_steps(lengths: list[int], ids: list[int]) -> None:
    """Prefill in one step, then a token each: every row as if alone, and whatever comes behind it."""
    model, slots = V41ForCausalLM.random(QUICK, seed=5), range(len(lengths))
    whole, cache = alone(model, ids), poisoned(QUICK, len(lengths), len(ids))
    prompts = step(
        model, cache, [Chunk(ids, 0, slot, n, every_logit=True) for slot, n in zip(slots, lengths, strict=True)]
    )
    assert torch.equal(prompts, torch.cat([whole[:n] for n in lengths]))
    tokens = step(model, cache, [Chunk(ids, n, slot, n + 1) for slot, n in zip(slots, lengths, strict=True)])
    assert torch.equal(tokens, whole[lengths])


@given(st.integers(0, 60), st.integers(1, 60))
def test_a_usable_hit_is_legal_and_worth_it(known: int, prompt: int) -> None:
    hit = usable_hit(QUICK, known, prompt)
    assert 0 <= hit <= known and hit < prompt and hit % 2 == 0
    assert hit == 0 or hit > W
    if min(known, prompt - 1) >= W + 2:
        assert hit >= min(known, prompt - 1) - 1
        build_batch(QUICK, Cache.zeros(QUICK, 1, 60), [Chunk([1] * prompt, hit - W, 0, hit=hit)])


@pytest.mark.parametrize("every_logit", [False, True])
def test_floors_follow_the_chunks_of_a_step(every_logit: bool) -> None:
    config = QUICK.replace(swa_bounded_replay="after_source")
    floors = [window_floors(config, Chunk([1] * 12, a, 0, b, 0, every_logit)) for a, b in ((0, 12), (6, 12), (8, 12))]
    assert floors == [(0, 0)] * 3 if every_logit else [(0, 8), (0, 8), (0, 0)]
