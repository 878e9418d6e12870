"""A batch or a cache of another model is refused by type, and what differs is named; eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model_def.rows import QUICK
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.errors import BatchOfAnotherModel, CacheOfAnotherModel, EntriesNotThere, OfAnotherModel
from v41.model_def.model import V41ForCausalLM

MODEL = V41ForCausalLM.random(QUICK, 1)
CHUNK = Chunk(list(range(30)), 0, 0, 30)
OF_CACHES: list[dict[str, Any]] = [
    {"sliding_window": 8},
    {"sliding_window": 2},
    {"head_dim": 2 * QUICK.head_dim},
    {"compress_ratios": (0, 2, 2, 2)},
]
OF_BATCHES: list[dict[str, Any]] = [
    {"candidate_block_size": 4},
    {"vocab_size": 2 * QUICK.vocab_size},
    {"image_token_id": 5},
    {"swa_bounded_replay": "after_source"},
]


def cache(config: V41Config = QUICK) -> Cache:
    return Cache.zeros(config, 2, 40)


@pytest.mark.parametrize("fields", OF_CACHES, ids=str)
def test_a_cache_of_another_model_takes_no_batch_and_serves_no_model(fields: dict[str, Any]) -> None:
    other = cache(QUICK.replace(**fields))
    with pytest.raises(CacheOfAnotherModel, match=f"{next(iter(fields))} = .*, and in this model"):
        build_batch(QUICK, other, [CHUNK])
    with pytest.raises(CacheOfAnotherModel, match=f"{next(iter(fields))} = .*, and in this model"):
        MODEL(build_batch(QUICK, cache(), [CHUNK]), other)


@pytest.mark.parametrize("fields", OF_BATCHES, ids=str)
def test_a_batch_of_another_model_is_refused(fields: dict[str, Any]) -> None:
    other = QUICK.replace(**fields)
    with pytest.raises(BatchOfAnotherModel, match=f"{next(iter(fields))} = .*, and in this model"):
        MODEL(build_batch(other, cache(), [CHUNK]), cache())


def test_fields_that_decide_nothing_of_either_are_no_difference() -> None:
    other = QUICK.replace(swiglu_limit=3.0, rms_norm_eps=1e-5)
    with torch.no_grad():
        theirs = MODEL(build_batch(other, cache(other), [CHUNK]), cache(other))
        assert torch.equal(theirs, MODEL(build_batch(QUICK, cache(), [CHUNK]), cache()))


def test_a_compiled_model_refuses_them_too() -> None:
    torch.compiler.reset()
    step = torch.compile(MODEL, backend="eager", fullgraph=False)
    with torch.no_grad(), pytest.raises(OfAnotherModel):
        step(build_batch(QUICK.replace(candidate_block_size=4), cache(), [CHUNK]), cache())


@pytest.mark.parametrize("numbers", [(True, 0, 4), (0.0, 1, 4), (0, 1, 4.0), (0, 5, 4), (0, 1, 41), (0, 1, -1)])
def test_only_whole_numbers_within_the_cache_name_what_is_copied(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(EntriesNotThere):
        cache().copy_entries(*numbers)
