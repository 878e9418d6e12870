"""Buckets: the sizes steps are padded to, so that a few captured graphs serve all of them.

    every chunk one row   rows, requests and logits to one rung of `decode`, candidate blocks to one of `blocks`
    any other step        rows to a rung of `prefill`, those that late layers keep to 1 or one of `kept`, the rest as is
    beyond the last rung  as it is

Such a decode step is captured whole, once for each pair of rungs. In any other step only the work that depends on rows
alone is captured; requests, the longest chunk and the context matter to what runs between, where padding would cost
work and save nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from v41.model_def.errors import LadderNotAscending


def rows_of_prefill(most: int) -> tuple[int, ...]:
    """Multiples of 128, then of an eighth of the power of two below: at most an eighth of a larger step is padding."""
    rungs = [128]
    while rungs[-1] < most:
        rungs.append(rungs[-1] + max(128, (1 << rungs[-1].bit_length() - 1) // 8))
    return tuple(rungs)


def half_octaves(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ...: at most a third is padding, and half of a rung is one."""
    return tuple(sorted({1, *(part << k for part in (2, 3) for k in range(most.bit_length()) if part << k <= most)}))


LONGEST = ("longest", "longest kept", "longest inner")  # the most rows of one request: 1 where all decode


@dataclass(frozen=True)
class Buckets:
    """Four ladders, each ascending and above 0; LadderNotAscending otherwise. Defaults: 256 rows of decode, prefill in
    steps of up to 8192 rows, contexts up to a million tokens."""

    decode: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))
    prefill: tuple[int, ...] = rows_of_prefill(8192)
    blocks: tuple[int, ...] = half_octaves(1 << 17)
    kept: tuple[int, ...] = rows_of_prefill(8192)

    def __post_init__(self) -> None:
        for name in ("decode", "prefill", "blocks", "kept"):
            rungs = getattr(self, name)
            whole = isinstance(rungs, tuple | list) and all(type(n) is int and n > 0 for n in rungs)
            if not whole or not rungs or list(rungs) != sorted({*rungs}):
                raise LadderNotAscending(f"Buckets({name}=...)", ladder=name, rungs=rungs)

    def ladder(self, size: str) -> tuple[int, ...] | None:
        """What a size of a Batch may be after padding, by the name that Batch marks it with; None if it is not padded.

        "rows", "logits" and rows that are kept ("last 128") know both kinds of step.
        """
        if size.startswith("blocks of ratio "):
            return self.blocks
        if size.startswith("last "):
            return tuple(sorted({*self.decode, *self.kept}))
        both, one = tuple(sorted({*self.decode, *self.prefill})), (1,)
        known = {"rows": both, "logits": self.decode, "requests": self.decode, **dict.fromkeys(LONGEST, one)}
        return known.get(size)

    @property
    def whole(self) -> dict[str, int]:
        """Up to which sizes a step is captured whole: a decode step."""
        return {"rows": self.decode[-1], "longest": 1}

    def ranges(self, sizes: Mapping[str, str]) -> tuple[dict[str, int], ...]:
        """Ranges worth code of their own, as limits for the symbols of `sizes` (symbol -> name): a decode step's sizes,
        then rows whose elements 32 bits can count. None where no size is one of a Batch.
        """
        kept = [name for name in sizes.values() if name.startswith("last ")]
        few = {**dict.fromkeys(("rows", "requests", "logits", *kept), self.decode[-1]), **dict.fromkeys(LONGEST, 1)}
        blocks = {name: self.blocks[-1] for name in sizes.values() if name.startswith("blocks of ratio ")}
        decode, wide = {**few, **blocks}, dict.fromkeys(("rows", *kept), 8 * self.prefill[-1])
        found = [{symbol: of[name] for symbol, name in sizes.items() if name in of} for of in (decode, wide)]
        return tuple(found) if found[0] else ()


def round_up(size: int, ladder: tuple[int, ...]) -> int:
    """The first rung that holds `size`; `size` itself beyond the last."""
    i = bisect_left(ladder, size)
    return ladder[i] if i < len(ladder) else size
