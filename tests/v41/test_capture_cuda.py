"""On a GPU, for every codegen: captured steps have the bits of uncaptured ones, over sizes that grow, shrink, alternate
and leave the ladders; each graph is captured once; all graphs together need little more than the largest one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import v41
from tests.v41.test_capture import live_parts
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.generation import warm_up
from v41.model_def.model import V41ForCausalLM
from v41.report import Captures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS, CAPACITY = 24, 320
LADDERS = Buckets((1, 2, 4, 8, 16), (64, 128, 256))
# rows of each request's chunk: decode that grows, shrinks, alternates and leaves the ladder; prefill and mixed steps
LENGTHS = [[n] for n in (40, 40, 100, 100)] + [[30] * 4, [30] * 4, [1, 50, 1, 7], [1, 50, 1, 7], [300]]
LENGTHS += [[1] * n for n in (1, 2, 3, 4, 7, 12, 16, 12, 7, 4, 3, 2, 1, 16, 1, 16, 1, 20, 20, 2, 5, 2)]


@pytest.mark.parametrize("codegen", ["eager", "inductor", "triton"])
@torch.no_grad()
def test_cuda_replays_have_the_bits_of_the_uncaptured_run(codegen: str) -> None:
    torch.compiler.reset()
    config = V41Config.preset("tiny")
    model = V41ForCausalLM.random(config, 0, "cuda").eval()
    caches = [Cache.zeros(config, SLOTS, CAPACITY, "cuda") for _ in range(2)]
    with v41.collect() as reports:
        options = {"codegen": codegen}
        captured = torch.compile(model, backend="v41", fullgraph=True, options=options)
        run_step(captured, config, caches[0], [(0, 0, 5)])
        torch.compiler.reset()
        plain = torch.compile(model, backend="v41", fullgraph=True, options=options | {"capture": "off"})
        run_step(plain, config, caches[1], [(0, 0, 5)])
        done, kept = [0] * SLOTS, list[tuple[Tensor, ...]]()
        for lengths in LENGTHS:
            chunks = [(slot, 0 if done[slot] + n > CAPACITY else done[slot], n) for slot, n in enumerate(lengths)]
            for slot, start, n in chunks:
                done[slot] = start + n
            runs = zip((captured, plain), caches, strict=True)
            kept.append(tuple(run_step(run, config, cache, chunks) for run, cache in runs))
            assert all(map(torch.equal, *zip(*kept, strict=True))), lengths
            assert all(map(torch.equal, *map(live_parts, caches))), lengths
    log = next(report.captures for report in reports if report.captures is not None)
    print(f"\n{codegen}: {facts(log)}")
    assert not log.errors and not log.dropped
    assert log.replays >= 12 and log.segment_replays >= 3 and len(log.captured) == len(set(log.captured))


@torch.no_grad()
def test_cuda_graphs_together_need_little_more_than_the_largest() -> None:
    torch.compiler.reset()
    config = V41Config.preset("tiny")
    model = V41ForCausalLM.random(config, 0, "cuda").eval()
    cache = Cache.zeros(config, SLOTS, CAPACITY, "cuda")
    ladders = Buckets((1, 2, 4, 8, 16, 64, 256))
    with v41.collect() as reports:
        captured = torch.compile(model, backend="v41", fullgraph=True)
        warm_up(captured, config, cache, ladders, rows=256, contexts=[CAPACITY])
    log = reports[0].captures
    assert log is not None and not log.errors and len(log.captured) == 7
    together = log.pool_bytes()
    torch.compiler.reset()
    with v41.collect() as reports:
        captured = torch.compile(model, backend="v41", fullgraph=True)
        warm_up(captured, config, cache, Buckets((256,)), rows=256, contexts=[CAPACITY])
    alone = reports[0].captures
    assert alone is not None and len(alone.captured) == 1
    print(f"\n7 graphs {together / 2**20:.1f} MiB, the largest alone {alone.pool_bytes() / 2**20:.1f} MiB")
    assert together <= 1.2 * alone.pool_bytes()


def run_step(run: object, config: V41Config, cache: Cache, chunks: list[tuple[int, int, int]]) -> Tensor:
    """Logits of a step with (slot, start, rows) chunks, in buckets."""
    ids = [[(31 * slot + 7 * i) % 500 for i in range(CAPACITY)] for slot in range(SLOTS)]
    made = [Chunk(ids[slot], start, slot, start + n) for slot, start, n in chunks]
    return run(build_batch(config, cache, made, buckets=LADDERS), cache)[: len(made)]  # type: ignore[operator]


def facts(log: Captures) -> str:
    replays = f"{len(log.captured)} graphs, {log.replays} replays, {log.segment_replays} of segments"
    others = f"uncaptured {log.uncaptured}, piecewise {log.piecewise}, {log.warm_ups} warm-ups"
    return f"{replays}, {others}, host {log.host_us} µs a replay, {log.pool_bytes()} bytes"
