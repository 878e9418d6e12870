"""agree: whether logits of a compiled run are those of eager, up to what eager itself owes an fp64 run.

    row of logits   eager [V]   compiled [V]   exact [V]        one per request and step, all fed the same tokens
    holds when      KL(eager || compiled) <= 0.02, and
                    the argmax is eager's, or eager's top-2 gap < 2 * max |eager - exact|

With a gap below twice its own deviation eager cannot tell which of the two is first: the exact run may order them the
other way. That alone excuses another argmax. The deviation is taken per row: a row where fp64 flips a discrete choice
(an FP8 value, a top-k pick) excuses no other. NaN anywhere fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

KL_LIMIT = 0.02


@dataclass(frozen=True)
class Row:
    """How one row of logits compares. The numbers are fp64 Python floats."""

    kl: float
    gap: float  # eager's best logit minus its second
    deviation: float  # max |eager - exact|
    same_argmax: bool
    bit_equal: bool

    @property
    def excused(self) -> bool:
        """Another argmax, within what eager itself owes the exact run."""
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
        """Every row holds, and there is one."""
        return bool(self.rows) and all(row.holds for row in self.rows)

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
        gaps = sorted(row.gap for row in self.rows)
        return gaps[len(gaps) // 2] if gaps else 0.0


def agree(eager: Tensor, compiled: Tensor, exact: Tensor) -> Agreement:
    """One Row for each of the [N, V] logits of three runs over the same tokens; V is 2 or more."""
    assert eager.shape == compiled.shape == exact.shape and eager.shape[-1] > 1
    bit_equal = (eager == compiled).all(-1)
    e, c, x = (logits.double() for logits in (eager, compiled, exact))
    log_p, log_q = e.log_softmax(-1), c.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    top = e.topk(2).values
    columns = (kl, top[:, 0] - top[:, 1], (e - x).abs().amax(-1), e.argmax(-1) == c.argmax(-1), bit_equal)
    return Agreement(tuple(Row(*values) for values in zip(*(column.tolist() for column in columns), strict=True)))


def join(agreements: Iterable[Agreement]) -> Agreement:
    """All rows of several runs as one."""
    return Agreement(tuple(row for agreement in agreements for row in agreement.rows))


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if any is, 0 of none."""
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()
