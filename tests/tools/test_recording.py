"""Requests of any lengths share steps, every token is read once, and a replay sees the same tokens in their places."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from v41.model_def.batch import Batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.recording import record, replay, steps_needed

CONFIG = V41Config.preset("tiny")
prompts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=5)


class Reader:
    """Stands in for a model: says `token + 1` and remembers what it was given."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int, int]] = []  # slot, position, token

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        self.read += zip(*(column.tolist() for column in (batch.slots, batch.positions, batch.tokens)), strict=True)
        return torch.eye(CONFIG.vocab_size)[(batch.tokens[batch.logit_rows] + 1) % CONFIG.vocab_size]


@given(prompts, st.integers(1, 6), st.integers(1, 20))
def test_every_token_is_read_once(given: list[list[int]], tokens: int, chunk: int) -> None:
    reader = Reader()
    made = record(reader, CONFIG, given, tokens=tokens, chunk=chunk)
    for prompt, ids in zip(given, made.requests, strict=True):
        assert ids == [*prompt, *(prompt[-1] + 1 + i for i in range(tokens))]
    all_but_the_last = [(slot, at, id) for slot, ids in enumerate(made.requests) for at, id in enumerate(ids[:-1])]
    assert sorted(reader.read) == all_but_the_last
    assert len(made.steps) == steps_needed(given, tokens, chunk)
    assert sum(step.rows for step in made.steps) == len(all_but_the_last)
    assert len(made.places) == len(made.logits) and len(set(made.places)) == len(made.places)


@given(prompts, st.integers(1, 6), st.integers(1, 20))
def test_a_replay_reads_the_same(given: list[list[int]], tokens: int, chunk: int) -> None:
    first, second = Reader(), Reader()
    made = record(first, CONFIG, given, tokens=tokens, chunk=chunk)
    assert torch.equal(replay(second, CONFIG, made), made.logits)
    assert first.read == second.read


def test_a_replay_of_the_plain_model_is_bit_equal() -> None:
    torch.manual_seed(0)
    model = V41ForCausalLM(CONFIG)
    made = record(model, CONFIG, [[7], list(range(40)), [5, 6, 7]], tokens=3, chunk=16)
    assert torch.equal(replay(model, CONFIG, made), made.logits)
    assert [len(ids) for ids in made.requests] == [4, 43, 6]
