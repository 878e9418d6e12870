"""steps: the sizes of a step of so many rows, by name and by the symbols of a plan.

    rows 16      a decode step: 16 requests of `context` tokens each, every one a row     requests=16 longest=1 ...
    rows 4096    more rows than a decode step has: one request that reads 4096 tokens     requests=1 longest=4096 ...

A model that is not V4.1 has sizes of its own: each is the number of rows, unless --size gives another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from v41.errors import SizesMissing
from v41.model_def.batch import block_counts
from v41.model_def.buckets import Buckets
from v41.model_def.config import V41Config
from v41.plan import Plan

CONTEXT = 4096


@dataclass(frozen=True)
class Step:
    """`sizes` by name, `symbols` by symbol of the plan."""

    label: str
    sizes: dict[str, int]
    symbols: dict[str, int]

    def __str__(self) -> str:
        return f"{self.label}: " + ", ".join(f"{name} = {size}" for name, size in self.sizes.items())


def step_of_rows(
    plan: Plan, config: V41Config | None, rows: int, context: int = CONTEXT, given: Mapping[str, int] | None = None
) -> Step:
    """A step of `rows`. given: sizes that are something else. SizesMissing for what has no name and is not given."""
    names = dict.fromkeys(plan.sizes.values())
    if config is None:
        label, known = f"{rows} rows", dict.fromkeys(names, rows)
    elif rows <= Buckets().decode[-1]:
        label = f"decode of {rows} at {context} tokens"
        known = {"rows": rows, "requests": rows, "logits": rows, "longest": 1, **_blocks(config, context)}
    else:
        label = f"prefill of {rows}"
        known = {"rows": rows, "requests": 1, "logits": 1, "longest": rows, **_blocks(config, rows)}
    known |= given or {}
    strange = [f"{name} is none of {', '.join(names)}" for name in given or {} if name not in names]
    missing = [name for name in names if name not in known]
    if strange or missing:
        raise SizesMissing("--size", sizes=", ".join(strange or missing))
    return Step(label, {name: known[name] for name in names}, {u: known[name] for u, name in plan.sizes.items()})


def _blocks(config: V41Config, context: int) -> dict[str, int]:
    return {f"blocks of ratio {ratio}": count for ratio, count in block_counts(config, context).items()}


def steps_of(
    plan: Plan, config: V41Config | None, rows: Iterable[int], context: int, given: Mapping[str, int]
) -> list[Step]:
    return [step_of_rows(plan, config, count, context, given) for count in rows]
