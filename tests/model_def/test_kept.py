"""Which rows a batch keeps for late layers: those that bounded replay or the exact halo needs, or all of a request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model_def.rows import TINY
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.chunk import inner_last, is_late, kept_last
from v41.model_def.config import V41Config
from v41.model_def.errors import BatchOfAnotherModel
from v41.model_def.model import V41ForCausalLM

LENGTHS = st.sampled_from((0, 1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 1000))
REPLAYS = ("off", "after_source", "from_source")


@given(st.sampled_from(REPLAYS), st.lists(st.tuples(LENGTHS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_kept_rows_are_the_last_of_each_chunk_and_all_of_some(
    replay: str, lengths: list[tuple[int, bool]], padded: bool
) -> None:
    config = TINY.replace(swa_bounded_replay=replay)
    chunks = [Chunk([1] * n, 0, slot, every_logit=every) for slot, (n, every) in enumerate(lengths)]
    batch = build_batch(config, Cache.zeros(config, 4, 1000), chunks, buckets=Buckets() if padded else None)
    needed, first = list[int](), 0
    for n, every in lengths:
        needed += range(first + (0 if every else max(n - kept_last(config), 0)), first + n)
        first += n
    kept = batch.kept_rows.tolist()
    assert set(needed) <= set(kept) and kept == sorted({*kept}) and all(0 <= row < len(batch.tokens) for row in kept)
    assert set(batch.logit_rows[: len(batch.host.logits)].tolist()) <= set(kept)
    if not padded:
        assert kept == needed
    elif len(batch.tokens) > 256:
        assert len(kept) in (*Buckets().kept, len(batch.tokens))
    of_each = [
        sum(a <= row < b for row in kept) for a, b in zip(batch.host.bounds, batch.host.bounds[1:], strict=False)
    ]
    assert len(batch.kept_longest) == max([min(len(kept), 1), *of_each])


def test_a_chunk_whose_late_layers_nobody_reads_keeps_none_and_has_no_logits() -> None:
    config, ladders = TINY.replace(swa_bounded_replay="after_source"), Buckets(kept=(16, 32), prefill=(64, 128))
    chunks = [Chunk([1] * 60, 0, 0, 40, following=31), Chunk([1] * 60, 0, 1, 40, following=30), Chunk([1] * 9, 8, 2)]
    cache = Cache.zeros(config, 4, 64)
    assert build_batch(config, cache, chunks).kept_rows.tolist() == [*range(64, 81)]
    batch = build_batch(config, cache, chunks, buckets=ladders)
    assert (batch.host.logits, len(batch.kept_rows)) == (((2, 8),), 32)
    alone = build_batch(config, cache, chunks[:1], buckets=ladders)
    assert (alone.host.logits, alone.kept_rows.tolist(), alone.logit_rows.tolist()) == ((), [63], [0])


def test_inner_rows_are_kept_ones_that_the_later_half_needs() -> None:
    assert inner_last(TINY) == 31 < kept_last(TINY) and inner_last(V41Config.preset("flash")) == 128 + 9 * 127
    assert inner_last(TINY.replace(swa_bounded_replay="after_source")) is None
    chunks = [Chunk([1] * 90, 0, 0), Chunk([1] * 40, 0, 1), Chunk([1] * 50, 0, 2, every_logit=True)]
    cache = Cache.zeros(TINY, 4, 96)
    for buckets in (None, Buckets(kept=(64, 160), prefill=(200,))):
        batch = build_batch(TINY, cache, chunks, buckets=buckets)
        assert batch.inner_rows is not None and batch.inner_longest is not None
        inner, kept = batch.inner_rows.tolist(), batch.kept_rows.tolist()
        needed = [*range(59, 90), *range(99, 130), *range(130, 180)]
        assert {*needed} <= {*inner} <= {*kept} and inner == sorted(inner) and (buckets or inner == needed)
        assert len(batch.inner_longest) == 50 and len(inner) == (160 if buckets else len(needed))


def test_a_decode_step_keeps_everything_with_its_pads() -> None:
    chunks = [Chunk([1] * 9, 8, slot) for slot in range(3)]
    batch = build_batch(TINY, Cache.zeros(TINY, 4, 16), chunks, buckets=Buckets())
    assert batch.kept_rows.tolist() == [0, 1, 2, 3] and len(batch.kept_longest) == 1


def test_the_halo_is_a_window_less_a_row_for_each_layer_behind_the_source() -> None:
    assert kept_last(V41Config.preset("flash")) == 128 + 19 * 127
    assert kept_last(V41Config.preset("flash").replace(swa_bounded_replay="from_source")) == 128


@pytest.mark.parametrize(("replay", "late"), [("off", []), ("after_source", [4, 5]), ("from_source", [3, 4, 5])])
def test_late_layers(replay: str, late: list[int]) -> None:
    config = V41Config.preset("tiny").replace(swa_bounded_replay=replay)
    assert [layer for layer in range(config.num_hidden_layers) if is_late(config, layer)] == late


def test_a_batch_that_keeps_fewer_rows_than_the_model_needs_is_refused() -> None:
    bounded, cache = TINY.replace(swa_bounded_replay="after_source"), Cache.zeros(TINY, 1, 64)
    batch = build_batch(bounded, cache, [Chunk([1] * 60, 0, 0)])
    with pytest.raises(BatchOfAnotherModel) as raised:
        V41ForCausalLM.random(TINY)(batch, cache)
    for fact in (f"rows kept for late layers = {kept_last(bounded)}, and in this model", "swa_bounded_replay"):
        assert fact in str(raised.value)


def test_eager_never_reads_them() -> None:
    model, cache = V41ForCausalLM.random(TINY), Cache.zeros(TINY, 1, 64)
    batch = build_batch(TINY, cache, [Chunk([1] * 60, 0, 0)])
    with torch.no_grad():
        expected = model(batch, cache)
        batch.kept_rows.fill_(-7)
        assert torch.equal(model(batch, cache), expected)
