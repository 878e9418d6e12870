"""steps: the sizes of a step of so many rows, by name and by the symbols of a plan.

    rows 16      a decode step: 16 requests of `context` tokens each, every one a row     requests=16 longest=1 ...
    rows 4096    more rows than a decode step has: one request that reads 4096 tokens     requests=1 longest=4096 ...

Sizes are those of a Batch, built as the model's own runner builds it. A model that is not V4.1 has sizes of its own:
each is the number of rows, unless --size gives another, and so is what follows from values alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from v41._compat import without_storage
from v41._compat_tools import marked_sizes
from v41.errors import ContextBeyondModel, RowsBeyondBuckets, SizesMissing, StepTooLarge, UnknownSize, UnusedOption
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.overlap import ROWS
from v41.plan import Plan
from v41.tools.nearest import choices
from v41.tools.tables import counted

CONTEXT = 4096  # tokens that decode reads where none are given, or as many as the model can
MOST = 1 << 20  # rows of a step: a Batch of them takes seconds, and no step has as many


@dataclass(frozen=True)
class Step:
    """`sizes` by name, `symbols` by symbol of the plan."""

    label: str
    sizes: dict[str, int]
    symbols: dict[str, int]

    def __str__(self) -> str:
        return f"{self.label}: " + ", ".join(f"{name} = {size}" for name, size in self.sizes.items())


def step_of_rows(
    plan: Plan,
    config: V41Config | None,
    rows: int,
    context: int | None = None,
    given: Mapping[str, int] | None = None,
    buckets: Buckets | None = None,
) -> Step:
    """A step of `rows`. context: tokens that each row of decode reads (CONTEXT, or as many as the model can). given:
    sizes that are something else. SizesMissing where a size has no number, UnknownSize where none has that name. Of a
    V4.1 model StepTooLarge with more than MOST rows, ContextBeyondModel with more tokens than it can read; of another
    UnusedOption for `context`.

    buckets: sizes are rounded up to these.
    """
    sizes = named_sizes(plan)
    names = dict.fromkeys(sizes.values())
    if config is not None and rows > MOST:
        raise StepTooLarge("--tokens", rows=rows, most=MOST)
    if config is None and context is not None:
        raise UnusedOption("--context", option="--context", reason="only of V4.1 is known which sizes follow from it")
    if config is None:
        label, known = counted(rows, "row"), dict.fromkeys(names, rows)
    else:
        label, chunks = chunks_of(config, rows, context)
        known = sizes_of_batch(config, chunks, buckets)
    known |= given or {}
    for name in given or {}:
        if name not in names:
            raise UnknownSize("--size", name=name, known=choices(name, names) or "there is none, whatever the rows")
    if missing := [name for name in names if name not in known]:
        raise SizesMissing("--size", sizes=", ".join(missing))
    return Step(label, {name: known[name] for name in names}, {u: known[name] for u, name in sizes.items()})


def check_decode(where: str, rows: int, whole: Mapping[str, int]) -> None:
    """RowsBeyondBuckets for more rows than a decode step has. whole: up to which sizes a step is captured whole."""
    most = whole.get(ROWS)
    if most is not None and rows > most:
        raise RowsBeyondBuckets(where, rows=rows, most=most)


def named_sizes(plan: Plan) -> dict[str, str]:
    """Symbol -> name; what no input has, as how many numbers a mask picks, goes by its symbol."""
    return plan.sizes | {u: u for piece in plan.pieces for u in piece.sizes if u not in plan.sizes}


def chunks_of(config: V41Config, rows: int, context: int | None) -> tuple[str, list[Chunk]]:
    """Requests that decode, or, of more rows than such a step has, that read their prompts: few, as long as may be."""
    most = config.max_position_embeddings
    if context is not None and context > most:
        raise ContextBeyondModel("--context", context=context, most=most)
    if rows <= Buckets().decode[-1]:
        tokens = [0] * (context or min(CONTEXT, most))
        return f"decode of {rows} at {len(tokens)} tokens", [Chunk(tokens, len(tokens) - 1, i) for i in range(rows)]
    lengths = [most] * (rows // most) + [rows % most] * (rows % most > 0)
    label = f"prefill of {rows}" + f" in {len(lengths)} requests" * (len(lengths) > 1)
    return label, [Chunk([0] * length, 0, i) for i, length in enumerate(lengths)]


def sizes_of_batch(config: V41Config, chunks: list[Chunk], buckets: Buckets | None = None) -> dict[str, int]:
    """Every size that a Batch of `chunks` is marked with, by its name."""
    with without_storage():
        cache = Cache.zeros(config, len(chunks), max(chunk.end for chunk in chunks))
    batch = build_batch(config, cache, chunks, buckets=buckets, device="cpu")
    leaves = [*vars(batch).values(), *batch.blocks.values()]
    return marked_sizes(leaf for leaf in leaves if isinstance(leaf, Tensor))


def steps_of(
    plan: Plan, config: V41Config | None, rows: Iterable[int], context: int | None, given: Mapping[str, int]
) -> list[Step]:
    return [step_of_rows(plan, config, count, context, given) for count in rows]


def alike(steps: Iterable[Step]) -> list[list[Step]]:
    """Steps of the same sizes together: they do the same work."""
    found: dict[tuple[tuple[str, int], ...], list[Step]] = {}
    for step in steps:
        found.setdefault(tuple(step.sizes.items()), []).append(step)
    return [*found.values()]


def heading(same: Sequence[Step]) -> str:
    """What is told of: one step, or several whose work is the same, and why it is."""
    if not same[0].sizes:
        return "every step, since no size of this program changes"
    return str(same[0]) + "".join(f"; the same for {each.label}" for each in same[1:])
