"""Buckets: ladders ascend, rounding up finds the first rung that holds a size, and a step's sizes come from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.batches import Schedule, buckets, schedules
from v41.model_def.batch import Chunk, sizes_of
from v41.model_def.buckets import Buckets, half_octaves, round_up, rows_of_prefill
from v41.model_def.config import V41Config
from v41.model_def.errors import LadderNotAscending

TINY = V41Config.preset("tiny")


@given(buckets(), st.integers(0, 60))
def test_rounding_up_takes_the_first_rung_that_holds_a_size(ladders: Buckets, size: int) -> None:
    for ladder in (ladders.decode, ladders.prefill, ladders.blocks):
        holding = [rung for rung in ladder if rung >= size]
        assert round_up(size, ladder) == (holding[0] if holding else size)


def test_the_default_ladders() -> None:
    ladders = Buckets()
    assert ladders.decode[:6] == (1, 2, 4, 8, 16, 24) and ladders.decode[-1] == 256
    assert ladders.prefill[:2] == (128, 256) and ladders.prefill[-3:] == (7168, 7680, 8192)
    assert [round_up(n, ladders.prefill) for n in (2049, 4096, 4097)] == [2304, 4096, 4608]
    assert half_octaves(20) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert rows_of_prefill(128) == (128,)
    wasted = [(round_up(n, ladders.prefill) - n) / n for n in range(1024, 8193)]
    assert max(wasted) <= 1 / 8
    assert max((round_up(n, ladders.blocks) - n) / round_up(n, ladders.blocks) for n in range(1, 1 << 15)) <= 1 / 3


def test_both_ratios_of_a_context_climb_together() -> None:
    """One context takes one rung of each ratio's ladder, with an exception at the edge of a rung: few pairs exist."""
    released = V41Config.preset("flash")
    pairs = {
        tuple(sizes_of(released, [Chunk(range(end), end - 1, 0)], Buckets()).blocks.values())
        for end in range(1, 65537, 61)
    }
    assert 8 < len(pairs) <= 2 * len(half_octaves(65536 // released.candidate_block_size))


@given(schedules(TINY.vocab_size), buckets())
def test_sizes_lie_on_the_ladders_a_step_needs(schedule: Schedule, ladders: Buckets) -> None:
    for chunks in schedule.steps:
        exact, padded = sizes_of(TINY, chunks), sizes_of(TINY, chunks, ladders)
        decode = all(chunk.rows == 1 for chunk in chunks) and len(chunks) <= ladders.decode[-1]
        if decode:
            assert padded.rows == padded.requests == padded.logits == round_up(len(chunks), ladders.decode)
            assert padded.blocks == {m: round_up(count, ladders.blocks) for m, count in exact.blocks.items()}
        else:
            assert padded.rows == round_up(max(exact.rows, 1), ladders.prefill)
            assert (padded.requests, padded.blocks) == (exact.requests, exact.blocks)
            assert padded.logits == max(exact.logits, 1)
            assert padded.kept == min(round_up(exact.kept, (1, *ladders.kept)), padded.rows) or exact.rows == 0
        assert padded.longest == exact.longest


def test_more_single_rows_than_a_decode_step_holds_are_no_decode_step() -> None:
    chunks = [Chunk([1] * 9, 8, slot) for slot in range(5)]
    assert sizes_of(TINY, chunks, Buckets((2, 4), (64,))).rows == 64
    assert sizes_of(TINY, chunks[:3], Buckets((2, 4), (64,))).rows == 4


def test_no_chunk_is_a_decode_step_of_pads() -> None:
    sizes = sizes_of(TINY, [], Buckets())
    assert (sizes.rows, sizes.requests, sizes.logits, sizes.longest) == (1, 1, 1, 1)


def test_ladders_by_the_name_of_a_size() -> None:
    ladders = Buckets((1, 2), (2, 64), (3,))
    assert ladders.ladder("rows") == (1, 2, 64) and ladders.ladder("blocks of ratio 2") == (3,)
    assert ladders.ladder("requests") == ladders.ladder("logits") == (1, 2)
    assert {ladders.ladder(f"longest{of}") for of in ("", " kept", " inner")} == {(1,)}
    assert Buckets((1, 2), (2, 64), (3,), (128,)).ladder("last 255") == (1, 2, 128)
    assert ladders.ladder("tokens.0") is None and ladders.whole == {"rows": 2, "longest": 1}


@pytest.mark.parametrize("rungs", [(), (0, 1), (2, 1), (1, 1), (1, 2.5), [1, True], 3, ("a", 1), {1}])
def test_a_ladder_that_does_not_ascend_is_refused(rungs: object) -> None:
    with pytest.raises(LadderNotAscending, match="prefill"):
        Buckets(prefill=rungs)  # type: ignore[arg-type]
