"""roll: a run of equal steps becomes a loop, so that a kernel's size does not grow with the iterations of its body.

    before   e0 e1 e2 | e3 e4 e5 | e6 e7 e8      the same ops each, reading the step before or what precedes
    after    Loop(first step, times=3)        begun where the fewest values pass from step to step

Found by structure alone: expression i and expression i + period have the same op and the same operands, counted from
where they stand, or one fixed expression in front of the run. Exact: the same operations on the same values in the
same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from v41.lowering.rowwise.expr import Expr

LEAST = 4  # steps that make a loop worth reading
LONGEST = 512  # expressions of one step


@dataclass(frozen=True)
class Loop:
    """`first`: the expressions of the first step; `last`: those of the last, in the same order. `carried` maps a
    position of the step to what stands there before the first one: the value that the next step reads."""

    first: tuple[Expr, ...]
    last: tuple[Expr, ...]
    times: int
    carried: dict[int, Expr]


def roll(numbers: list[Expr], used_outside: set[Expr]) -> list[Expr | Loop]:
    """`numbers` with the longest legal run replaced by a Loop, repeatedly. `used_outside`: what others read."""
    place = {expr: i for i, expr in enumerate(numbers)}
    best = max(_runs(numbers, place), key=lambda run: run[1] - run[0], default=None)
    if best is None:
        return list(numbers)
    start, stop, period = best
    steps = (stop - start) // period
    starts = [start + turn for turn in range(period) if start + turn + (steps - 1) * period <= stop]
    loops = [
        (at, _loop(numbers, place, at, at + (stop - at) // period * period, period, used_outside)) for at in starts
    ]
    legal = [(len(loop.carried), at, loop) for at, loop in loops if loop is not None]
    if not legal:
        return list(numbers)
    _, at, loop = min(legal, key=lambda found: found[:2])
    return [*roll(numbers[:at], used_outside), loop, *roll(numbers[at + loop.times * period :], used_outside)]


def _runs(numbers: list[Expr], place: dict[Expr, int]) -> list[tuple[int, int, int]]:
    """(start, stop, period) of the maximal runs of at least LEAST equal steps."""
    found = []
    codes = _codes(numbers)
    for period in range(2, min(LONGEST, len(numbers) // LEAST) + 1):
        for i, stop in _alike(codes, period):
            while i < stop:
                start = i
                while i < stop and _same(numbers, place, i, period, start):
                    i += 1
                steps = (i - start) // period + 1
                if steps >= LEAST:
                    found.append((start, start + steps * period, period))
                i = max(i, start + 1)
    return found


def _codes(numbers: list[Expr]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same number for expressions that differ in their operands alone."""
    known: dict[Any, int] = {}
    told = [(expr.op, expr.dtype, expr.data, len(expr.args)) for expr in numbers]
    return np.array([known.setdefault(each, len(known)) for each in told], np.int64)


def _alike(codes: np.ndarray[Any, np.dtype[np.int64]], period: int) -> list[tuple[int, int]]:
    """(first, stop) of the maximal stretches in which each code is the one `period` behind it, as long as LEAST steps
    need. Most periods have none, and no operand is looked at."""
    same = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
    edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
    return [(int(a), int(b)) for a, b in edges if b - a >= (LEAST - 1) * period]


def _same(numbers: list[Expr], place: dict[Expr, int], i: int, period: int, start: int) -> bool:
    """Whether expression i + period, of the same code, does to its surroundings what expression i does."""
    for x, y in zip(numbers[i].args, numbers[i + period].args, strict=True):
        fixed = x is y and place.get(x, -1) < start
        moving = place.get(x, -1) >= max(start - period, 0) and place.get(y, -1) == place[x] + period
        if not fixed and not moving:
            return False
    return True


def _loop(
    numbers: list[Expr], place: dict[Expr, int], start: int, stop: int, period: int, used_outside: set[Expr]
) -> Loop | None:
    """The Loop, if only its last step is read from outside and each step reads at most one step back."""
    inside = set(numbers[start : stop - period])
    later = {arg for expr in numbers[stop:] for arg in expr.args} | used_outside
    if inside & later:
        return None
    carried: dict[int, Expr] = {}
    for i in range(start + period, start + 2 * period):
        for arg in numbers[i].args:
            at = place.get(arg, -1)
            if start <= at < start + period:
                carried[at - start] = numbers[at - period]
    return Loop(
        tuple(numbers[start : start + period]), tuple(numbers[stop - period : stop]), (stop - start) // period, carried
    )
