"""predicted: what a timeline needs of a program: how long each piece takes by rows, and who runs on side streams.

    found = predicted(plan)                 plan: on one stream, as captured
    found.at(16)                            the plan that a decode step of 16 rows uses: one of its `sides`, or itself
    found.us(found.at(16), 16)              {"piece_4": 4.9, ...}

All of it is values that a file can hold, so a timeline of a saved run is that of the model. As at run time, side
streams are judged at powers of two of rows, and the next above counts; larger steps are not captured and have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from v41._compat_trace import young_garbage_alone
from v41.formulas import evaluate
from v41.model_def.buckets import round_up
from v41.overlap import RUNGS
from v41.passes.analysis.times import Machine, Times
from v41.passes.assign_streams import assign_streams
from v41.plan import Plan
from v41.report import Decision


@dataclass(frozen=True)
class PieceTime:
    """Of one artifact. moved: bytes, a formula over `rows`."""

    fixed_us: float
    moved: str

    def us(self, rows: int) -> float:
        return self.fixed_us + evaluate(self.moved, {"rows": rows}) / Machine().bytes_us


@dataclass(frozen=True)
class Predicted:
    """plan: with those that have side streams. times: of all their pieces, by key. judged: each site with slack."""

    plan: Plan
    times: Mapping[str, PieceTime]
    judged: Sequence[Decision]

    def at(self, rows: int) -> Plan:
        """The plan that is used for a decode step of `rows`."""
        rung = round_up(rows, RUNGS)  # of more rows than the last, none
        return next((each for each in self.plan.sides if rung in each.pays_at), self.plan)

    def us(self, plan: Plan, rows: int) -> dict[str, float]:
        """Of each piece of `plan`, one of these."""
        return {piece.name: self.times[piece.key].us(rows) for piece in plan.pieces}


def predicted(plan: Plan) -> Predicted:
    """Finds side streams for `plan`, which has none, and predicts."""
    with young_garbage_alone():
        made, decisions = assign_streams(plan, RUNGS)
        return with_times(plan if made is plan else replace(plan, overlapped=made), decisions)


def with_times(plan: Plan, judged: Sequence[Decision]) -> Predicted:
    """Predicts how long pieces of `plan` take, and of those with side streams that it holds."""
    reckoned = Times(plan.sizes)
    works = {piece.key: reckoned.piece(piece) for each in (plan, *plan.sides) for piece in each.pieces}
    return Predicted(plan, {key: PieceTime(work.fixed_us, work.formula) for key, work in works.items()}, judged)
