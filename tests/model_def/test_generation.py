"""Requests of any lengths share steps and slots; every token is read once; forced ones see the same logits again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.batches import buckets
from v41.model_def.batch import Batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.errors import (
    ChunkLongerThanSlot,
    LogitsAreNoNumbers,
    NoTemperature,
    RequestGivenTwice,
    RequestWithoutPrompt,
    StepsWithoutRows,
)
from v41.model_def.generation import Choose, Request, generate, greedy, sampling, warm_up
from v41.model_def.model import V41ForCausalLM

TINY = V41Config.preset("tiny")
prompts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=0, max_size=5)


class CountsUp:
    """Stands in for a model: the token after t is t + 1. Remembers (slot, position, token) of all rows."""

    def __init__(self) -> None:
        self.read: list[list[tuple[int, int, int]]] = []

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        columns = (batch.slots.tolist(), batch.positions.tolist(), batch.tokens.tolist())
        self.read.append(list(zip(*columns, strict=True)))
        return torch.eye(TINY.vocab_size)[batch.tokens[batch.logit_rows] + 1]


@given(prompts, st.integers(1, 5), st.integers(1, 20), st.integers(1, 3), st.booleans())
def test_chunks_that_are_skipped_say_what_follows_and_change_no_token(
    given: list[list[int]], tokens: int, chunk: int, slots: int, padded: bool
) -> None:
    made = []
    for skip in (False, True):
        requests = [Request.to_write(prompt, tokens) for prompt in given]
        how = {"chunk": chunk, "skip": skip, "buckets": Buckets() if padded else None}
        steps = list(generate(CountsUp(), TINY, Cache.zeros(TINY, slots, 64), requests, **how))
        made.append((steps, [each.ids for each in requests]))
        for step in steps:
            last = [i for i, part in zip(step.requests, step.chunks, strict=True) if not part.following]
            assert len(step.logits) == len(last) and step.tokens.keys() <= {*last}
            for i, part in zip(step.requests, step.chunks, strict=True):
                assert part.following == (min(chunk, max(requests[i].prompt - part.end, 0)) if skip else 0)
    (whole, written), (skipped, same) = made
    assert written == same and [step.tokens for step in whole] == [step.tokens for step in skipped]


@given(prompts, st.integers(1, 5), st.integers(1, 20), st.integers(1, 3))
def test_every_token_is_read_once(given: list[list[int]], tokens: int, chunk: int, slots: int) -> None:
    model, cache = CountsUp(), Cache.zeros(TINY, slots, 64)
    requests = [Request.to_write(prompt, tokens) for prompt in given]
    read: dict[int, list[int]] = {i: [] for i in range(len(given))}
    for step in generate(model, TINY, cache, requests, chunk=chunk):
        assert len(step.requests) == len(set(step.requests)) <= slots and len(step.logits) == len(step.chunks)
        for i, part in zip(step.requests, step.chunks, strict=True):
            assert part.start == len(read[i]) and 1 <= part.rows <= (chunk if part.start < len(given[i]) else 1)
            read[i] += part.ids[part.start : part.end]
        assert {token for _, _, token in model.read[-1]} <= {t for ids in read.values() for t in ids}
    for i, prompt in enumerate(given):
        assert requests[i].ids == [*prompt, *(prompt[-1] + 1 + n for n in range(tokens))]
        assert read[i] == requests[i].ids[:-1]


@given(prompts, st.integers(1, 20), buckets())
def test_buckets_change_no_token(given: list[list[int]], chunk: int, ladders: Buckets) -> None:
    written = [[Request.to_write(prompt, 3) for prompt in given] for _ in range(2)]
    for requests, padded in zip(written, (None, ladders), strict=True):
        steps = generate(CountsUp(), TINY, Cache.zeros(TINY, 3, 64), requests, chunk=chunk, buckets=padded)
        assert all(len(step.logits) == len(step.requests) for step in steps)
    assert written[0] == written[1]


def test_warming_up_runs_every_decode_bucket_twice_the_largest_first_on_pads_alone() -> None:
    model, ladders = CountsUp(), Buckets((1, 2, 4, 8), (16,), (2, 4, 8, 16))
    warm_up(model, TINY, Cache.zeros(TINY, 3, 64), ladders, rows=3, contexts=[1, 64])
    assert [len(rows) for rows in model.read] == [4, 4, 2, 2, 1, 1] * 2
    assert {row for rows in model.read for row in rows} == {(3, -1, 0)}


class Keeps(CountsUp):
    """Also stores the token of each entry, and knows what the entries of every row it sees ought to be."""

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        for kind in (cache.entries, cache.index_keys):
            for source, records in kind.items():
                m = TINY.compress_ratios[source]
                for chunk in batch.host.chunks:
                    for p in range(max(chunk.start, chunk.hit), chunk.end):
                        records[chunk.slot, p // m if p % m == m - 1 else -1, 0] = chunk.ids[p] % 256
                    own = [token % 256 for token in chunk.ids[m - 1 : max(chunk.hit, chunk.end) : m]]
                    assert records[chunk.slot, : len(own), 0].tolist() == own
        return super().__call__(batch, cache)


stems = st.lists(st.integers(0, 255), min_size=20, max_size=30)
families = st.builds(
    lambda stem, members: [[*stem[:cut], *tail] for cut, tail in members],
    stems,
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 255), max_size=8)), min_size=2, max_size=6),
)


@given(families, st.integers(1, 4), st.integers(1, 30), st.integers(1, 3), st.none() | buckets())
def test_a_shared_prefix_is_read_from_another_slot(
    given: list[list[int]], tokens: int, chunk: int, slots: int, ladders: Buckets | None
) -> None:
    requests, reads = [Request.to_write(prompt, tokens) for prompt in given], dict[int, list[int]]()
    cache, window = Cache.zeros(TINY, slots, 64), TINY.sliding_window
    for step in generate(Keeps(), TINY, cache, requests, chunk=chunk, reuse=True, buckets=ladders):
        for i, part in zip(step.requests, step.chunks, strict=True):
            reads.setdefault(i, []).extend(range(part.start, part.end))
    for i, request in enumerate(requests):
        assert request.ids == [*given[i], *(given[i][-1] + 1 + n for n in range(tokens))]
        assert request.hit == 0 or window < request.hit < len(given[i])
        assert reads[i] == list(range(max(request.hit - window, 0), len(request.ids) - 1))


@pytest.mark.parametrize(("slots", "hits"), [(1, [0, 24, 24]), (2, [0, 0, 30])])
def test_the_longest_prefix_is_taken(slots: int, hits: list[int]) -> None:
    """Between groups, with a row left to run; two that begin in one step share nothing yet."""
    ids = list(range(40))
    prompts = [[*ids[:30], 7], ids[:25] + [9] * 20, ids[:31]]
    requests = [Request.to_write(prompt, 2) for prompt in prompts]
    list(generate(Keeps(), TINY, Cache.zeros(TINY, slots, 64), requests, chunk=64, reuse=True))
    assert [request.hit for request in requests] == hits


def test_a_slot_that_was_copied_into_no_longer_holds_what_it_did() -> None:
    """Both slots become free at once: the third request copies from the second's, over what the fourth would have."""
    one, other = list(range(30)), list(range(100, 130))
    requests = [Request.to_write(prompt, 1) for prompt in (one, other, [*other, 7], [*one, 7])]
    list(generate(Keeps(), TINY, Cache.zeros(TINY, 2, 64), requests, chunk=64, reuse=True))
    assert [request.hit for request in requests] == [0, 0, 30, 0]


def test_a_hit_can_be_taken_on_from_the_step_it_is_taken_in() -> None:
    """Of three slots two become free, then the third: what the fourth request took the fifth, in the same step, and the
    sixth, while rows of the fourth run again, take from it. Nobody else holds it any more."""
    one, other, longer = list(range(30)), list(range(100, 130)), list(range(200, 236))
    prompts = [one, other, longer, *([*one, tail] for tail in (7, 8, 9))]
    requests = [Request.to_write(prompt, 1) for prompt in prompts]
    steps = list(generate(Keeps(), TINY, Cache.zeros(TINY, 3, 64), requests, chunk=4, reuse=True))
    assert [step.requests for step in steps[7:10]] == [(0, 1, 2), (2, 3, 4), (3, 4, 5)]
    assert [request.hit for request in requests] == [0, 0, 0, 30, 30, 30]


def test_nothing_is_shared_unless_asked_for() -> None:
    requests = [Request.to_write(list(range(40)), 2) for _ in range(2)]
    list(generate(Keeps(), TINY, Cache.zeros(TINY, 1, 64), requests, chunk=64))
    assert [request.hit for request in requests] == [0, 0]


def test_a_slot_is_given_on() -> None:
    model = CountsUp()
    requests = [Request.to_write([10 * i], 3) for i in range(4)]
    steps = list(generate(model, TINY, Cache.zeros(TINY, 2, 64), requests, chunk=8))
    assert [step.requests for step in steps] == [(0, 1)] * 3 + [(2, 3)] * 3
    assert steps[0].tokens == {0: 1, 1: 11} and all(len(step.tokens) == 2 for step in steps)


def test_forced_requests_see_the_same_logits() -> None:
    model = V41ForCausalLM.random(TINY, seed=1)
    written = [Request.to_write(prompt, 4) for prompt in ([7], list(range(40)), [5, 6, 7])]
    first = list(generate(model, TINY, Cache.zeros(TINY, 3, 64), written, chunk=16))
    forced = [Request.forced(request.ids, request.prompt) for request in written]
    again = list(generate(model, TINY, Cache.zeros(TINY, 3, 64), forced, chunk=16))
    assert [step.chunks for step in first] == [step.chunks for step in again]
    assert all(torch.equal(a.logits, b.logits) and not b.tokens for a, b in zip(first, again, strict=True))
    assert [len(request.ids) for request in written] == [5, 44, 7]


def test_greedy_takes_the_largest_and_sampling_follows_the_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(4000, 3)
    assert greedy(logits).eq(1).all()
    cold = sampling(1e-3, torch.Generator().manual_seed(0))(logits)
    warm = sampling(2.0, torch.Generator().manual_seed(0))(logits)
    assert cold.eq(1).all()
    assert torch.allclose(warm.bincount(minlength=3) / 4000, (logits[0] / 2).softmax(-1), atol=0.03)


@pytest.mark.parametrize("small", [1e-30, 1e-45, 1e-300, 5e-324])
def test_the_coldest_sampling_is_greedy(small: float) -> None:
    logits = torch.tensor([[1e4, 3e4, -3e4], [0.0, -1e-3, -1e-2]])
    assert torch.equal(sampling(small, torch.Generator().manual_seed(0))(logits), greedy(logits))


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, True, None, "1", torch.tensor(1.0)])
def test_a_temperature_that_is_none_is_refused(temperature: Any) -> None:
    with pytest.raises(NoTemperature):
        sampling(temperature, torch.Generator())


@pytest.mark.parametrize("choose", [greedy, sampling(1.0, torch.Generator())], ids=["greedy", "drawn"])
@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_nothing_is_chosen_from_damaged_logits(choose: Choose, damage: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = damage
    with pytest.raises(LogitsAreNoNumbers, match="of 3 row") as refusal:
        choose(logits)
    assert refusal.value.facts["rows"] == (1,) and choose(logits[::2]).shape == (2,)


class Damages(CountsUp):
    """NaN behind `token`, wherever it is read."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        return super().__call__(batch, cache).masked_fill(batch.tokens[batch.logit_rows, None] == self.token, math.nan)


@pytest.mark.parametrize("choose", [greedy, sampling(1e-3, torch.Generator())], ids=["greedy", "drawn"])
def test_damaged_logits_are_told_by_request_and_position(choose: Choose) -> None:
    """Request 2 waits for a slot; when it writes 32 behind 31, there is nothing to choose behind that one."""
    requests = [Request.to_write([1, 2], 9), Request.to_write([5], 2), Request.to_write([30, 31], 4)]
    steps = generate(Damages(32), TINY, Cache.zeros(TINY, 2, 16), requests, chunk=4, choose=choose)
    with pytest.raises(LogitsAreNoNumbers, match="request 2 at position 2") as refusal:
        list(steps)
    assert refusal.value.where == "generate" and requests[2].ids == [30, 31, 32] and requests[1].ids == [5, 6, 7]


def test_damaged_logits_that_choose_nothing_are_handed_on() -> None:
    """A chunk amid a prompt and a forced token: whoever compares two runs sees the NaN there."""
    requests = [Request.to_write([3, 4, 5, 6], 2), Request.forced([4, 4, 4], 1)]
    asked: list[list[bool]] = []

    def choose(logits: Tensor) -> Tensor:
        asked.append(logits.any(-1).tolist())
        return greedy(logits)

    steps = list(generate(Damages(4), TINY, Cache.zeros(TINY, 2, 8), requests, chunk=2, choose=choose))
    assert asked == [[False, False], [True, False], [True]]  # of five rows of logits two have a token behind them
    assert requests[0].ids == [3, 4, 5, 6, 7, 8]
    assert [step.logits.isnan().any(-1).tolist() for step in steps] == [[True, True], [False, True], [False]]


@pytest.mark.parametrize("chunk", [0, -3, True, 2.0, None])
def test_steps_without_rows_are_refused(chunk: Any) -> None:
    with pytest.raises(StepsWithoutRows):
        next(generate(CountsUp(), TINY, Cache.zeros(TINY, 1, 8), [Request.to_write([1], 2)], chunk=chunk))


def test_one_request_cannot_be_given_twice() -> None:
    one, other = Request.to_write([1], 2), Request.to_write([1], 2)
    assert one == other
    with pytest.raises(RequestGivenTwice, match="requests 1 and 2 are one object"):
        next(generate(CountsUp(), TINY, Cache.zeros(TINY, 3, 8), [other, one, one], chunk=4))
    assert list(generate(CountsUp(), TINY, Cache.zeros(TINY, 2, 8), [other, one], chunk=4))


def test_what_cannot_be_read_is_refused() -> None:
    cache = Cache.zeros(TINY, 1, 8)
    with pytest.raises(ChunkLongerThanSlot):
        list(generate(CountsUp(), TINY, cache, [Request.to_write([1] * 8, 4)], chunk=8))


@pytest.mark.parametrize("make", [lambda: Request.to_write([], 3), lambda: Request.forced([1, 2, 3], 9),
                                  lambda: Request.forced([1, 2], 0), lambda: Request([1, 2], 1, 1),
                                  lambda: Request([1, 2], True, 4), lambda: Request([1, 2], 1, 4.0)])  # fmt: skip
def test_a_request_without_a_prompt_is_refused(make: Any) -> None:
    with pytest.raises(RequestWithoutPrompt, match="give a prompt of one token or more"):
        make()
