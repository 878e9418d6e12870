"""On a GPU, for every codegen: captured steps have the bits of uncaptured ones, over sizes that grow, shrink, alternate
and leave the ladders; each graph is captured once; all graphs together need little more than the largest one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.v41.test_capture import live_parts
from v41 import backend
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.generation import warm_up
from v41.model_def.model import V41ForCausalLM
from v41.report import Captures
from v41.runtime.capture import CudaGraphs
from v41.runtime.replay import Replayer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = V41Config.preset("tiny")
SLOTS, CAPACITY = 24, 320
LADDERS = Buckets((1, 2, 4, 8, 16), (64, 128, 256))
# rows of each request's chunk: prefill and mixed steps; decode that grows, shrinks, alternates and leaves the ladder
LENGTHS = [[n] for n in (40, 40, 100, 100)] + [[30] * 4, [30] * 4, [1, 50, 1, 7], [1, 50, 1, 7], [300]]
LENGTHS += [[1] * n for n in (1, 2, 3, 4, 7, 12, 16, 12, 7, 4, 3, 2, 1, 16, 1, 16, 1, 20, 20, 2, 5, 2)]


@dataclass
class Switch:
    """Runs a plan with one Replayer or another, or uncaptured."""

    plan: Any
    artifacts: Any
    run: Any = field(init=False)
    _boxed_call = True

    def __post_init__(self) -> None:
        self.captured()

    def captured(self) -> Captures:
        """From here on with graphs of its own, none yet."""
        log, graphs = Captures(), CudaGraphs(torch.device("cuda"))
        log.pool_bytes = graphs.pool_bytes
        self.run = Replayer(self.plan, self.artifacts, graphs, log)
        return log

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        return self.run(inputs)


def compile_tiny(codegen: str) -> tuple[Any, Switch]:
    """The tiny model compiled once, and what decides how its plan runs."""
    torch.compiler.reset()
    model = V41ForCausalLM.random(CONFIG, 0, "cuda").eval()
    made: list[Switch] = []

    def replayer(plan: Any, artifacts: Any, graphs: Any, log: Captures) -> Switch:
        made.append(Switch(plan, artifacts))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Replayer", replayer)
        compiled = torch.compile(model, backend="v41", fullgraph=True, options={"codegen": codegen})
        run_step(compiled, Cache.zeros(CONFIG, SLOTS, CAPACITY, "cuda"), [(0, 0, 5)])
    (switch,) = made
    return compiled, switch


def check_bits(compiled: Any, switch: Switch) -> Captures:
    """Captured and uncaptured steps, each on a cache of its own: equal logits, the old ones too, and equal caches."""
    log = switch.captured()
    captured, caches = switch.run, [Cache.zeros(CONFIG, SLOTS, CAPACITY, "cuda") for _ in range(2)]
    done, kept = [0] * SLOTS, list[tuple[Tensor, ...]]()
    for lengths in LENGTHS:
        chunks = [(slot, 0 if done[slot] + n > CAPACITY else done[slot], n) for slot, n in enumerate(lengths)]
        for slot, start, n in chunks:
            done[slot] = start + n
        results = []
        for run, cache in zip((captured, captured.plain), caches, strict=True):
            switch.run = run
            results.append(run_step(compiled, cache, chunks))
        kept.append(tuple(results))
        assert all(map(torch.equal, *zip(*kept, strict=True))), lengths
        assert all(map(torch.equal, *map(live_parts, caches))), lengths
    assert not log.errors and not log.dropped
    assert log.replays >= 12 and log.segment_replays >= 3 and len(log.captured) == len(set(log.captured))
    return log


def check_memory(compiled: Any, switch: Switch) -> tuple[int, int]:
    """Bytes of the graphs of seven buckets and of the largest alone."""
    cache, found = Cache.zeros(CONFIG, SLOTS, CAPACITY, "cuda"), []
    for rungs in ((1, 2, 4, 8, 16, 64, 256), (256,)):
        log = switch.captured()
        warm_up(compiled, CONFIG, cache, Buckets(rungs), rows=256, contexts=[CAPACITY])
        assert len(log.captured) == len(rungs) and not log.errors
        found.append(log.pool_bytes())
    together, alone = found
    assert alone > 0 and together <= 1.2 * alone, found
    return together, alone


@pytest.mark.parametrize("codegen", ["eager", "inductor", "triton"])
@torch.no_grad()
def test_cuda_replays_have_the_bits_of_the_uncaptured_run(codegen: str) -> None:
    compiled, switch = compile_tiny(codegen)
    check_bits(compiled, switch)
    check_memory(compiled, switch)


def run_step(run: Any, cache: Cache, chunks: list[tuple[int, int, int]]) -> Tensor:
    """Logits of a step with (slot, start, rows) chunks, in buckets."""
    ids = [[(31 * slot + 7 * i) % 500 for i in range(CAPACITY)] for slot in range(SLOTS)]
    made = [Chunk(ids[slot], start, slot, start + n) for slot, start, n in chunks]
    return run(build_batch(CONFIG, cache, made, buckets=LADDERS), cache)[: len(made)]
