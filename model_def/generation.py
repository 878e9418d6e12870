"""Generation: many requests in ragged steps, prompts read in chunks, then one token at a time.

    step   [request 0: next chunk of its prompt] [request 1: the token it chose last] ...  ->  forward  ->  choose

A request waits for a free cache slot and gives it back when its tokens are all there. One whose tokens are known before
is read in the same steps and chooses nothing: teacher forcing. `forward` is the model, eager or compiled.

With `reuse`, a request that begins as another one did takes the entries that lie in that one's slot: a prefix hit, an
approximation (chunk.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from v41.model_def.batch import Batch, Chunk, Sizes, batch_of_sizes, block_counts, build_batch
from v41.model_def.buckets import Buckets, round_up
from v41.model_def.cache import Cache
from v41.model_def.chunk import replay_start, usable_hit
from v41.model_def.config import V41Config
from v41.model_def.errors import (
    LogitsAreNoNumbers,
    NoTemperature,
    RequestGivenTwice,
    RequestWithoutPrompt,
    StepsWithoutRows,
)

Forward = Callable[[Batch, Cache], Tensor]
Choose = Callable[[Tensor], Tensor]  # logits [n, vocabulary] -> token ids [n]


@dataclass
class Request:
    """`ids` are read, the first `prompt` in chunks, then one a step, and chosen until there are `length` of them."""

    ids: list[int]
    prompt: int
    length: int
    done: int = field(default=0, init=False)  # so many are in the cache; the last of all is never read
    hit: int = field(default=0, init=False)  # so many came from another request

    def __post_init__(self) -> None:
        counted = type(self.prompt) is int and type(self.length) is int
        if not counted or not 1 <= self.prompt <= len(self.ids) <= self.length:
            facts = {"prompt": self.prompt, "known": len(self.ids), "length": self.length}
            raise RequestWithoutPrompt("Request", **facts)

    @classmethod
    def to_write(cls, prompt: Sequence[int], tokens: int) -> Request:
        """Continues `prompt` by so many tokens."""
        return cls(list(prompt), len(prompt), len(prompt) + tokens)

    @classmethod
    def forced(cls, ids: Sequence[int], prompt: int) -> Request:
        """Reads `ids` as if those behind `prompt` were being chosen."""
        return cls(list(ids), prompt, len(ids))

    @property
    def finished(self) -> bool:
        return self.done >= self.length - 1 and len(self.ids) >= self.length

    def next_chunk(self, slot: int, rows: int, skip: bool = False) -> Chunk:
        """At most `rows` of the prompt, or the one token behind it. skip: what of it the next chunk makes again."""
        stop = min(self.prompt, self.done + rows) if self.done < self.prompt else self.done + 1
        following = max(min(self.prompt - stop, rows), 0) if skip else 0
        return Chunk(self.ids, self.done, slot, stop, self.hit, following=following)


@dataclass(frozen=True)
class Generated:
    """One step: which requests took part, with how much, and the logits behind the last row of each, or with `skip` of
    those whose chunk has none `following`."""

    requests: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    logits: Tensor  # [requests, vocabulary]
    tokens: dict[int, int]  # request -> what it chose; those that are still reading chose nothing


@torch.no_grad()
def warm_up(
    forward: Forward, config: V41Config, cache: Cache, buckets: Buckets, *, rows: int, contexts: Sequence[int]
) -> None:
    """Runs decode steps of pads alone, so that later ones find their graphs: buckets up to `rows`, the largest first.

    contexts: lengths of requests; each is rounded up to its bucket. Twice each, since a step is captured when its sizes
    come again. Only the pad slot is written.
    """
    rungs = [rung for rung in reversed(buckets.decode) if rung <= round_up(rows, buckets.decode)]
    for context in sorted(contexts, reverse=True):
        blocks = {m: round_up(count, buckets.blocks) for m, count in block_counts(config, context).items()}
        for rung in rungs:
            for _ in range(2):
                forward(batch_of_sizes(config, cache, [], Sizes(rung, rung, rung, 1, blocks, rung, rung)), cache)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row. LogitsAreNoNumbers where a row holds NaN or an infinity."""
    check_numbers("greedy", logits)
    return logits.argmax(-1)


def sampling(temperature: float, generator: torch.Generator) -> Choose:
    """Draws from softmax(logits / temperature), however small that is. NoTemperature where it is not above 0; drawing
    raises LogitsAreNoNumbers as greedy does."""
    if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
        raise NoTemperature("sampling", temperature=temperature)
    divisor = max(temperature, torch.finfo(torch.float32).tiny)  # fp32 has no smaller one to divide by

    def draw(logits: Tensor) -> Tensor:
        check_numbers("sampling", logits)
        shares = ((logits - logits.amax(-1, keepdim=True)) / divisor).softmax(-1)
        return shares.multinomial(1, generator=generator).squeeze(-1)

    return draw


def check_numbers(where: str, logits: Tensor) -> None:
    damaged = ~logits.isfinite().all(-1)
    if damaged.any():
        raise LogitsAreNoNumbers(where, damaged.nonzero().flatten().tolist(), len(logits))


@torch.no_grad()
def generate(
    forward: Forward,
    config: V41Config,
    cache: Cache,
    requests: Sequence[Request],
    *,
    chunk: int,
    choose: Choose = greedy,
    buckets: Buckets | None = None,
    reuse: bool = False,
    skip: bool = False,
) -> Iterator[Generated]:
    """Steps until every request is finished. A prompt is read `chunk` rows at a time; `requests` grow in place.

    `buckets`: what steps are padded to; a model whose steps are captured needs them. `reuse`: take prefix hits. `skip`:
    chunks that are not the last of their prompt return no logits, and need not leave what the next one makes again.
    StepsWithoutRows where `chunk` is no number of rows, RequestGivenTwice where two are one object, LogitsAreNoNumbers
    where no token can be chosen.
    """
    if type(chunk) is not int or chunk < 1:
        raise StepsWithoutRows("generate", chunk=chunk)
    numbers = {id(request): i for i, request in reversed([*enumerate(requests)])}
    for i, request in enumerate(requests):
        if numbers[id(request)] < i:
            raise RequestGivenTwice("generate", first=numbers[id(request)], second=i)
    waiting, slots = list(range(len(requests))), dict[int, int]()  # request -> slot
    held: dict[int, tuple[list[int], int]] = {}  # slot -> a request's tokens, and how many of them it has entries of
    while True:
        slots = {i: slot for i, slot in slots.items() if not requests[i].finished}
        waiting = [i for i in waiting if i not in slots and not requests[i].finished]
        free = [slot for slot in range(cache.slots) if slot not in slots.values()]
        fresh = dict(zip(waiting, free, strict=False))
        slots |= fresh
        if not slots:
            return
        for i, slot in fresh.items():
            if reuse:
                take_prefix(config, cache, requests[i], slot, held)
            held[slot] = requests[i].ids, requests[i].hit
        chunks = tuple(requests[i].next_chunk(slot, chunk, skip) for i, slot in slots.items())
        told = [row for row, part in enumerate(chunks) if not part.following]
        logits = forward(build_batch(config, cache, chunks, buckets=buckets), cache)[: len(told)]
        behind: dict[int, int] = {}  # row of logits -> the request that a token is to be chosen for
        for row, (i, part) in enumerate(zip(slots, chunks, strict=True)):
            requests[i].done = part.end
            held[part.slot] = requests[i].ids, max(part.end, part.hit)
            if part.end == len(requests[i].ids) < requests[i].length:
                behind[row] = i
        tokens = chosen(choose, spread(logits, told, len(chunks)), behind, requests)
        for i, token in tokens.items():
            requests[i].ids.append(token)
        yield Generated(tuple(slots), chunks, logits, tokens)


def spread(logits: Tensor, told: Sequence[int], count: int) -> Tensor:
    """`logits` as those of `count` requests, zeros for the ones that have none."""
    if len(told) == count:
        return logits
    rows = torch.tensor(told, dtype=torch.int64, device=logits.device)
    return logits.new_zeros(count, logits.shape[-1]).index_copy(0, rows, logits)


def chosen(choose: Choose, logits: Tensor, behind: Mapping[int, int], requests: Sequence[Request]) -> dict[int, int]:
    """Request -> its token. An error names the request and the position whose logits are damaged.

    Rows that no token is chosen for are zeros to `choose`: what they hold concerns nobody here, and it draws for as
    many rows as there are, whoever is still reading.
    """
    unused = [row for row in range(len(logits)) if row not in behind]
    asked = logits.index_fill(0, torch.tensor(unused, device=logits.device), 0) if unused else logits
    try:
        tokens = choose(asked).tolist()
    except LogitsAreNoNumbers as error:
        wrong = [behind[row] for row in error.facts["rows"]]  # type: ignore[attr-defined]
        rows = [f"request {i} at position {requests[i].done - 1}" for i in wrong]
        raise LogitsAreNoNumbers("generate", rows, len(logits)) from None
    return {i: tokens[row] for row, i in behind.items()}


def take_prefix(
    config: V41Config, cache: Cache, request: Request, slot: int, held: Mapping[int, tuple[Sequence[int], int]]
) -> None:
    """Begins `request` in `slot` with the longest prefix that some slot holds, if any is worth it."""
    shared = {source: shared_prefix(request.ids, ids[:known]) for source, (ids, known) in held.items()}
    source = max(shared, key=lambda each: (shared[each], each == slot), default=slot)  # best where nothing is copied
    request.hit = usable_hit(config, shared.get(source, 0), request.prompt)
    request.done = replay_start(config, request.hit)
    if request.hit and source != slot:
        cache.copy_entries(source, slot, request.hit)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
