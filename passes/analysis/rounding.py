"""rounding: what it costs that the sizes of a step are rounded up to the rungs of a ladder.

    rows       rung   fewest   at most   on average   bytes at most
                 24       17   + 41 %    + 17 %       7 rows more of all that lives at the fullest border
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from v41.plan import Plan


@dataclass(frozen=True)
class Rounding:
    """One rung of one ladder. Shares are of the real size; `mean_share` is over the sizes `fewest` to `rung`."""

    size: str
    rung: int
    fewest: int  # the smallest size that is rounded up to `rung`
    worst_share: float
    mean_share: float
    worst_bytes: int | None  # that `fewest` takes more at the fullest border; None where no buffer tells

    @property
    def added(self) -> int:
        return self.rung - self.fewest


def rounding_up(plan: Plan) -> Iterator[Rounding]:
    """Every rung of every ladder of `plan`."""
    for size, ladder in plan.buckets.items():
        more = bytes_of_one_more(plan, size)
        for below, rung in pairwise((0, *ladder)):
            fewest = below + 1
            worst, mean = rung / fewest - 1, 2 * rung / (fewest + rung) - 1
            yield Rounding(size, rung, fewest, worst, mean, None if more is None else more * (rung - fewest))


def bytes_of_one_more(plan: Plan, size: str) -> int | None:
    """What a unit of `size` takes at the border where it takes most, in buffers of no other size. None for none."""
    symbols = [symbol for symbol, name in plan.sizes.items() if name == size]
    alive = [0] * (len(plan.pieces) + 2)  # the first is before the first piece
    known = False
    for buffer in plan.buffers.values():
        if buffer.views or (each := _slope(buffer.bytes, symbols)) is None:
            continue
        known = True
        for at in range(buffer.born, buffer.dies + 1):
            alive[at + 1] += each
    return max(alive) if known else None


def _slope(expression: str, symbols: list[str]) -> int | None:
    """How much the expression grows with the symbols; None where it has other symbols, or does not grow."""
    code = compile(expression, "<bytes>", "eval")
    used = set(code.co_names) - set(dir(math)) - {"math", "max", "min"}
    if not used or not used <= set(symbols):
        return None
    one, two = (eval(code, {"math": math}, dict.fromkeys(symbols, value)) for value in (1, 2))
    return int(two - one)
