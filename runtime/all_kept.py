"""all_kept: a piece that takes rows does so where some are left out; where every row is kept it hands on what it read.

    8192 rows, 128 kept     X'[128], at'[128], grid = taken(X, at, kept, ...)
    16 rows, 16 kept        X, at, rest(...)         no gather is launched

Which it is follows from sizes, on the host, so a captured step holds one of the two; passes/replay_seam.py says why
that is exact. Results may then be inputs themselves: no piece writes a value of the plan that is not a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from v41.runtime.executor import Artifact


@dataclass(frozen=True)
class AllKept:
    """Places are those of inputs; see Parted. `rest` computes, from `reads`, the results that are no input."""

    kept: int
    whole: Sequence[tuple[int, int]]
    same: Sequence[int | None]
    reads: Sequence[int]
    taken: Artifact
    rest: Artifact | None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        count = args[self.kept].shape[0]
        if any(args[at].shape[dim] != count for at, dim in self.whole):
            return self.taken(*args)
        computed = iter(self.rest(*[args[at] for at in self.reads]) if self.rest is not None else ())
        return tuple([next(computed) if at is None else args[at] for at in self.same])


def fresh(artifact: Artifact) -> Artifact:
    """`artifact`, with results in memory of their own: what a graph returned is overwritten by graphs of its rung that
    were captured in a step in which it was free by then."""
    return artifact.taken if isinstance(artifact, AllKept) else artifact


def parts_of(artifact: Artifact) -> list[Artifact]:
    """What was compiled for `artifact`: the parts of a piece that runs one or the other, else itself."""
    if not isinstance(artifact, AllKept):
        return [artifact]
    return [artifact.taken, *([] if artifact.rest is None else [artifact.rest])]
