"""cases of `bench program`: the model, what its cache holds, the batch of each step, and the bytes no step can spare.

    decode 16        16 requests, each with a context of about 4096 tokens, read one token more; where there are several
                     contexts, each has requests of its own, and the name says which: decode 16 of 131072
    prefill 8192     one request's first 8192 tokens, in one step

The context is read once, by eager, and copied into every slot; last tokens differ, so rows pick differently. Of a long
context MOST_READ tokens are read, and entries like theirs, no two alike, stand for the rest. A step reads nothing that
it wrote when it ran before, so the contenders share one cache. Hence decode rows stand at even positions: an odd one
would end a group of two, and the step before has left its own token as the group's first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.engram import EngramTable
from v41.model_def.model import Embedding, V41ForCausalLM
from v41.model_def.moe import MoE
from v41.tools.bench.boundary import COPY_BYTES_A_US

PART = 2048
MOST_READ = 8192  # tokens of a context, in parts
LAST_BITS = 0x11  # of the two e2m1 codes of a byte


@dataclass(frozen=True)
class Case:
    """A step: `batch` in buckets, as v41 wants it. `plain`: as long as its chunks and of no marked size. `parts`: steps
    of at most PART rows that read the same, of a step that is longer."""

    kind: str  # decode or prefill
    rows: int
    batch: Batch
    plain: Batch
    cache: Cache
    parts: tuple[Batch, ...] = ()
    context: int | None = None  # of each request, where cases differ in it

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}" + (f" of {self.context}" if self.context else "")


def cut(config: V41Config) -> V41Config:
    """`config` in four layers: window only; a ratio-2 source with Engram; the candidate source; a re-indexer in it."""
    return config.replace(
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=config.engram_num_embeddings[:1],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


@torch.no_grad()
def prepare(
    model: V41ForCausalLM, decode: Sequence[int], prefill: Sequence[int], contexts: Sequence[int], room: int = 0
) -> list[Case]:
    """The cases, the largest first, on one cache that holds what they read. `contexts`: tokens at most, the last one
    read by the step; the cache has room for so many more."""
    device, config = model.head.weight.device, model.config
    most, longest = max([1, *decode]), max(contexts)
    slots = most * len(contexts)
    cache = Cache.zeros(config, slots + 1, max([longest, *prefill]) + room, device)
    ids = token_ids(config, max([longest, *prefill]) + most)
    shared, last = ids[:MOST_READ][: even(longest)], ids[-most:]
    for part in in_parts([Chunk(shared, 0, 0)]):
        model(build_batch(config, cache, part), cache)
    for kind, width in ((cache.entries, config.head_dim), (cache.index_keys, config.index_head_dim)):
        for source, records in kind.items():
            lengthen(records[0], MOST_READ // config.compress_ratios[source], width // 2)
    for records in tensors_of(cache):
        records[1:slots] = records[:1]
    cases = []
    for at, context in enumerate(sorted(contexts, reverse=True)):
        start, slot = even(context), most * at
        for rows in sorted(decode, reverse=True):
            chunks = [Chunk([*ids[:start], last[i]], start, slot + i) for i in range(rows)]
            named = context if len(contexts) > 1 else None
            cases.append(replace(case("decode", rows, chunks, config, cache), context=named))
    for rows in sorted(prefill, reverse=True):
        cases.append(case("prefill", rows, [Chunk(ids[:rows], 0, slots)], config, cache))
    return cases


def even(context: int) -> int:
    """Where the last of `context` tokens stands, or the one before it."""
    return (context - 1) // 2 * 2


def lengthen(records: Tensor, count: int, codes: int) -> None:
    """What follows the first `count` records becomes like them, over and over, other last bits in the `codes` bytes of
    their e2m1 codes: equal entries would score alike, and all be picked or none."""
    draw = torch.Generator(records.device).manual_seed(0)
    for at in range(count, len(records), count):
        part = records[at : at + count]
        part.copy_(records[: len(part)])
        part[:, :codes] ^= torch.randint(256, (len(part), codes), generator=draw, dtype=torch.uint8,
                                         device=records.device) & LAST_BITS  # fmt: skip


def case(kind: str, rows: int, chunks: Sequence[Chunk], config: V41Config, cache: Cache) -> Case:
    def plain(chunks: Sequence[Chunk]) -> Batch:
        return unmarked(build_batch(config, cache, chunks))

    parts = [plain(part) for part in in_parts(chunks)] if rows > PART else []
    return Case(kind, rows, build_batch(config, cache, chunks, buckets=Buckets()), plain(chunks), cache, tuple(parts))


def in_parts(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """The one chunk of a step that reads, PART rows at a time."""
    (whole,) = chunks
    ends = [*range(whole.start + PART, len(whole.ids), PART), len(whole.ids)]
    return [[Chunk(whole.ids, start, whole.slot, end)] for start, end in pairwise([whole.start, *ends])]


def eager_logits(model: V41ForCausalLM, case: Case) -> Tensor:
    """Of the plain model. Where one step does not fit into the device's memory, the parts of it one after another."""
    try:
        return model(case.plain, case.cache)
    except torch.OutOfMemoryError:
        if not case.parts:
            raise
    for part in case.parts:
        logits = model(part, case.cache)
    return logits


def unmarked(batch: Batch) -> Batch:
    """The same batch with tensors that no compiler was told anything of."""
    changed = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    made = Batch(**{**vars(batch), **changed})
    return Batch(**{**vars(made), "blocks": {m: blocks.clone() for m, blocks in batch.blocks.items()}})


def tensors_of(cache: Cache) -> list[Tensor]:
    groups = (cache.entries, cache.index_keys, cache.tails)
    return [*cache.rings, *(tensor for group in groups for tensor in group.values())]


def token_ids(config: V41Config, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (count,), generator=generator).tolist()


@torch.no_grad()
def weight_bytes(model: V41ForCausalLM, case: Case) -> int:
    """Bytes of the weights that a step reads: of experts those that its rows pick, of tables the rows looked up."""
    touched: dict[nn.Module, set[int]] = {}  # of a stack of experts or a table, these of its first dimension
    hooks = []
    for module in model.modules():
        if isinstance(module, MoE):
            hooks.append(module.gate.register_forward_hook(picks_of(module, touched)))
        elif isinstance(module, (Embedding, EngramTable)):
            hooks.append(module.register_forward_hook(rows_of(touched)))
    try:
        eager_logits(model, case)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(bytes_read(module, touched.get(module)) for module in model.modules())


def picks_of(moe: MoE, touched: dict[nn.Module, set[int]]) -> Callable[..., None]:
    def note(gate: nn.Module, inputs: tuple[Tensor], result: tuple[Tensor, Tensor]) -> None:
        for weights in moe.experts.children():
            touched.setdefault(weights, set()).update(result[1].unique().tolist())

    return note


def rows_of(touched: dict[nn.Module, set[int]]) -> Callable[..., None]:
    def note(table: nn.Module, inputs: tuple[Tensor], result: Tensor) -> None:
        touched.setdefault(table, set()).update(inputs[0].unique().tolist())

    return note


def bytes_read(module: nn.Module, touched: set[int] | None) -> int:
    """Bytes of a module's own parameters, or of these slices of each."""
    parameters = list(module.parameters(recurse=False))
    if touched is None:
        return sum(p.numel() * p.element_size() for p in parameters)
    return sum(len(touched) * p[0].numel() * p.element_size() for p in parameters)


def floor_us(bytes_read: int) -> float:
    """µs to read so many bytes at this GPU's copy rate."""
    return bytes_read / COPY_BYTES_A_US
