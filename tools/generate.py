"""generate and replay: a ragged batch of requests, run so that another run can be fed the very same tokens.

    generate   step 0: first chunk of every prompt   step 1: the next chunk, or a new token where a prompt is done   ...
    replay     the same steps with the tokens already known (teacher forcing), on a cache of its own -> logits alone

Prompts of different lengths share every step: short ones write while long ones are still read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config

Forward = Callable[[Batch, Cache], Tensor]
Choose = Callable[[Tensor], Tensor]  # logits [n, V] -> token ids [n]


@dataclass(frozen=True)
class Step:
    chunks: tuple[Chunk, ...]
    logits: Tensor  # [one a chunk, V], on the CPU
    seconds: float

    @property
    def rows(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True)
class Generation:
    """What `generate` did. `requests` are the prompts with what was written after them."""

    requests: list[list[int]]
    steps: list[Step]

    @property
    def logits(self) -> Tensor:
        """[N, V]: a row for each request in each step, in order."""
        return torch.cat([step.logits for step in self.steps])

    @property
    def places(self) -> list[tuple[int, int]]:
        """Request and position of each row of `logits`."""
        return [(chunk.slot, chunk.end - 1) for step in self.steps for chunk in step.chunks]


def steps_needed(prompts: Sequence[Sequence[int]], tokens: int, chunk: int) -> int:
    """Steps that `generate` takes: the last token written is never read."""
    return max((-(-len(prompt) // chunk) + tokens - 1 for prompt in prompts), default=0)


@torch.no_grad()
def generate(
    forward: Forward,
    config: V41Config,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    chunk: int,
    device: str = "cpu",
    choose: Choose = lambda logits: logits.argmax(-1),
    progress: Callable[[Step], None] = lambda step: None,
) -> Generation:
    """Continues each prompt by `tokens` ids that `choose` picks, reading at most `chunk` rows of a prompt in a step."""
    made = Generation([list(prompt) for prompt in prompts], [])
    cache = new_cache(config, made.requests, tokens, device)
    goals = [len(prompt) + tokens for prompt in prompts]
    done = [0] * len(prompts)
    while True:
        chunks = tuple(
            Chunk(ids, done[slot], slot, min(len(ids), done[slot] + chunk))
            for slot, ids in enumerate(made.requests)
            if done[slot] < goals[slot] - 1
        )
        if not chunks:
            return made
        step = run(forward, config, cache, chunks, device)
        for each, token in zip(chunks, choose(step.logits).tolist(), strict=True):
            done[each.slot] = each.end
            if each.end == len(made.requests[each.slot]):
                made.requests[each.slot].append(token)
        made.steps.append(step)
        progress(step)


@torch.no_grad()
def replay(forward: Forward, config: V41Config, made: Generation, device: str = "cpu") -> Tensor:
    """The logits of `forward` over the steps of another generation: [N, V], rows as in `made.logits`."""
    cache = new_cache(config, made.requests, 0, device)
    return torch.cat([run(forward, config, cache, step.chunks, device).logits for step in made.steps])


def run(forward: Forward, config: V41Config, cache: Cache, chunks: Sequence[Chunk], device: str) -> Step:
    """One step. Copying the logits to the host ends it, so the time is the whole of it."""
    start = time.perf_counter()
    logits = forward(build_batch(config, cache, chunks, device=device), cache).cpu()
    return Step(tuple(chunks), logits, time.perf_counter() - start)


def new_cache(config: V41Config, requests: Sequence[Sequence[int]], tokens: int, device: str) -> Cache:
    """Slots for `requests` and `tokens` more of each."""
    return Cache.zeros(config, len(requests), max(map(len, requests), default=0) + tokens, device)
