"""The model end to end: layers of a kind compile once, and every step has the bits of eager, caches included."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

import v41
from tests.v41.test_trimmed_model import live
from v41.lowering.inductor import supported
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import PRESETS, V41Config
from v41.model_def.model import V41ForCausalLM
from v41.regions import region_of, regions
from v41.report import CompileReport

pytestmark = pytest.mark.slow


def small() -> V41Config:
    """Window with Engram, a ratio-2 source with Engram, a ratio-1 source that makes candidates."""
    three = dict(compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2))
    return V41Config(**PRESETS["tiny"] | three | dict(num_hidden_layers=3, candidate_source_layer_id=2))


def steps(lengths: tuple[int, ...] = (23, 40, 1)) -> list[list[Chunk]]:
    """A ragged prefill, two steps of decoding, and one of a single request."""
    draw = random.Random(0)
    ids = [[draw.randrange(500) for _ in range(n + 3)] for n in lengths]
    prefill = [Chunk(tokens[:n], 0, slot) for slot, (tokens, n) in enumerate(zip(ids, lengths, strict=True))]
    decode = [
        [Chunk(tokens[: n + k + 1], n + k, slot) for slot, (tokens, n) in enumerate(zip(ids, lengths, strict=True))]
        for k in range(2)
    ]
    return [prefill, *decode, [Chunk(ids[1], lengths[1] + 2, 1)]]


def check_bits_at_every_step(config: V41Config, **options: object) -> CompileReport:
    """Compiles a model once, asks for eager's bits of logits and caches, and returns the report."""
    torch.manual_seed(0)
    model = V41ForCausalLM(config).eval()
    ours, theirs = (Cache.zeros(config, 3, 64) for _ in range(2))
    function = torch.compile(model, backend="v41", fullgraph=True, options=options)
    with torch.no_grad(), v41.collect() as reports:
        for chunks in steps():
            expected = model(build_batch(config, theirs, chunks), theirs)
            assert torch.equal(function(build_batch(config, ours, chunks), ours), expected)
            assert all(map(torch.equal, live(ours), live(theirs)))
    (report,) = reports
    assert not report.fallbacks
    return report


def tensors_of(cache: Cache) -> list[Tensor]:
    return [*cache.rings, *cache.entries.values(), *cache.index_keys.values(), *cache.tails.values()]


def test_a_small_model_has_eagers_bits_in_one_compile() -> None:
    config = small()
    report = check_bits_at_every_step(config, codegen="eager", verify=True)
    assert [(run.name, run.failure, run.refused) for run in report.passes if run.failure or run.refused] == []
    (writes,) = (run for run in report.passes if run.name == "reinplace_cache_writes")
    assert writes.applied == len(tensors_of(Cache.zeros(config, 3, 64)))
    assert report.plan is not None and report.artifacts < report.pieces
    kinds = Counter(region_of(call).kind for piece in report.plan.pieces for call in regions(piece.body))
    assert kinds["mhc_boundary"] == 2 * config.num_hidden_layers
    assert kinds["mhc_exit"] == 1


def test_inductor_has_eagers_bits_of_the_whole_tiny_model() -> None:
    if reason := supported(torch.device("cpu")):
        pytest.skip(reason)
    check_bits_at_every_step(V41Config.preset("tiny"), codegen="inductor")
