"""record and replay: what a ragged generation read, wrote and computed, so that another run can be fed the very same.

record   prompts -> Recording: tokens, and per step its rows, its logits, its time
replay   the same steps with the tokens already known (teacher forcing), on a cache of its own -> logits alone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.generation import Choose, Forward, Request, generate, greedy

Progress = Callable[[], None]  # called after every step


@dataclass(frozen=True)
class Step:
    rows: int
    places: tuple[tuple[int, int], ...]  # request and position of each row of logits
    logits: Tensor  # [one a request, V], on the CPU
    seconds: float


@dataclass(frozen=True)
class Recording:
    """`requests`: each prompt with what was written after it; `prompts`: how long it was."""

    requests: list[list[int]]
    prompts: list[int]
    chunk: int
    steps: list[Step]

    @property
    def logits(self) -> Tensor:
        """[N, V]: a row for each request in each step, in order."""
        return torch.cat([step.logits for step in self.steps])

    @property
    def places(self) -> list[tuple[int, int]]:
        """Request and position of each row of `logits`."""
        return [place for step in self.steps for place in step.places]


def steps_needed(prompts: Sequence[Sequence[int]], tokens: int, chunk: int) -> int:
    """Steps that `record` takes: the last token written is never read."""
    return max((-(-len(prompt) // chunk) + tokens - 1 for prompt in prompts), default=0)


def record(
    forward: Forward,
    config: V41Config,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    chunk: int,
    device: str = "cpu",
    choose: Choose = greedy,
    progress: Progress = lambda: None,
) -> Recording:
    """Continues every prompt by `tokens` that `choose` picks, all in one ragged batch, and keeps what came out."""
    requests = [Request.to_write(prompt, tokens) for prompt in prompts]
    steps = run(forward, config, requests, chunk, device, choose, progress)
    return Recording([request.ids for request in requests], [len(prompt) for prompt in prompts], chunk, steps)


def replay(
    forward: Forward, config: V41Config, made: Recording, device: str = "cpu", progress: Progress = lambda: None
) -> Tensor:
    """The logits of `forward` over the steps of a recording: [N, V], rows as in `made.logits`."""
    requests = [Request.forced(ids, prompt) for ids, prompt in zip(made.requests, made.prompts, strict=True)]
    return torch.cat([step.logits for step in run(forward, config, requests, made.chunk, device, progress=progress)])


def run(
    forward: Forward,
    config: V41Config,
    requests: Sequence[Request],
    chunk: int,
    device: str,
    choose: Choose = greedy,
    progress: Progress = lambda: None,
) -> list[Step]:
    """Every step, with a slot for each request. Copying the logits to the host ends a step, so its time is whole."""
    longest = max(request.length for request in requests)
    cache = Cache.zeros(config, len(requests), max(longest - 1, 1), device)  # the last token is never read
    steps: list[Step] = []
    start = time.perf_counter()
    buckets = Buckets() if cache.device.type == "cuda" else None  # where nothing is captured, pads are wasted work
    for made in generate(forward, config, cache, requests, chunk=chunk, choose=choose, buckets=buckets):
        logits, parts = made.logits.cpu(), list(zip(made.requests, made.chunks, strict=True))
        rows, places = sum(part.end - part.start for _, part in parts), tuple((i, part.end - 1) for i, part in parts)
        steps.append(Step(rows, places, logits, time.perf_counter() - start))
        progress()
        start = time.perf_counter()
    return steps
