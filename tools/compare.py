"""agree: whether logits of a compiled run are those of eager, up to what last bits do to this model.

    row of logits   eager [V]   compiled [V]   last bits [K, V]: eager again, with other last bits (last_bits.py)
    a row holds     KL(eager || compiled) <= 0.02, and
                    the argmax is eager's, or eager's top-2 gap < 2 * the most that last bits moved a logit of it
    a run holds     all its rows do, and they moved, in the median, no more than 4 times as far as last bits move them

With a gap below twice what last bits move, eager cannot tell which of the two is first. That alone excuses another
argmax, and a row that last bits moved far excuses no other. The median sees what no row shows: a small fault in every
row, as a rotation left out, moves it 6 to 10 times as far, where single flips move single rows. NaN anywhere fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KL_LIMIT, MOVE_LIMIT = 0.02, 4.0
JUDGED = 32  # rows of which a median is worth judging


@dataclass(frozen=True)
class Row:
    """How one row of logits compares. The numbers are fp64 Python floats."""

    kl: float
    gap: float  # eager's best logit minus its second
    move: float  # max |eager - compiled|
    same_argmax: bool
    bit_equal: bool
    deviations: tuple[float, ...]  # max |eager - eager with other last bits|, one a run

    @property
    def deviation(self) -> float:
        return largest(self.deviations)

    @property
    def excused(self) -> bool:
        """Another argmax, within what last bits do to this row."""
        return not self.same_argmax and self.gap < 2 * self.deviation

    @property
    def holds(self) -> bool:
        return self.kl <= KL_LIMIT and (self.same_argmax or self.excused)


@dataclass(frozen=True)
class Agreement:
    """The rows of a run, counted."""

    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Every row holds, and there is one; of many rows also the median."""
        few = len(self.rows) < JUDGED
        return bool(self.rows) and all(row.holds for row in self.rows) and (few or self.moved <= MOVE_LIMIT)

    @property
    def moved(self) -> float:
        """How far the compiled run moved a row, over how far the run did that moved most; each in the median."""
        ours = median([row.move for row in self.rows])
        theirs = largest(median(run) for run in zip(*(row.deviations for row in self.rows), strict=True))
        return ours / theirs if theirs else math.inf * ours if ours else 0.0

    @property
    def bit_equal(self) -> int:
        return sum(row.bit_equal for row in self.rows)

    @property
    def same_argmax(self) -> int:
        return sum(row.same_argmax for row in self.rows)

    @property
    def excused(self) -> int:
        return sum(row.excused for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(not row.holds for row in self.rows)

    @property
    def max_kl(self) -> float:
        return largest(row.kl for row in self.rows)

    @property
    def max_deviation(self) -> float:
        return largest(row.deviation for row in self.rows)

    @property
    def median_gap(self) -> float:
        return median([row.gap for row in self.rows])


def agree(eager: Tensor, compiled: Tensor, last_bits: Tensor) -> Agreement:
    """One Row for each of the [N, V] logits of two runs over the same tokens, V 2 or more; last_bits [K, N, V]."""
    assert eager.shape == compiled.shape == last_bits.shape[1:] and eager.shape[-1] > 1
    bit_equal = (eager == compiled).all(-1)
    e, c, others = (logits.double() for logits in (eager, compiled, last_bits))
    log_p, log_q = e.log_softmax(-1), c.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    top = e.topk(2).values
    columns = (kl, top[:, 0] - top[:, 1], (e - c).abs().amax(-1), e.argmax(-1) == c.argmax(-1), bit_equal)
    deviations = map(tuple, (others - e).abs().amax(-1).T.tolist())
    told = zip(*(column.tolist() for column in columns), deviations, strict=True)
    return Agreement(tuple(Row(*values) for values in told))


def join(agreements: Iterable[Agreement]) -> Agreement:
    """All rows of several runs as one."""
    return Agreement(tuple(row for agreement in agreements for row in agreement.rows))


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if any is, 0 of none."""
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()


def median(values: Sequence[float]) -> float:
    """The value in the middle, the upper of two; 0 of none, NaN if any is."""
    if any(map(math.isnan, values)):
        return math.nan
    return sorted(values)[len(values) // 2] if values else 0.0
