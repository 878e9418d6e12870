"""streams_view: the streams of decode steps: at which rows which plan runs, what runs beside its caller's stream, when.

    rows of a decode step  streams  pieces  beside  events  us on one stream   us
    1 to 16                      3     574      84     165              2710  2544      predicted, of the most rows
    32 to 256                    1     490       -       -              3895  3895

A piece runs beside where a pass found that it has slack (assign_streams). Its layer is that of the piece it was cut
from. Other steps run on one stream, as does a program that knows no rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from v41.overlap import ROWS, RUNGS
from v41.plan import Plan
from v41.tools.predicted import Predicted
from v41.tools.run import Run
from v41.tools.tables import add, table
from v41.tools.timeline import length, schedule


@dataclass(frozen=True)
class Used:
    """One plan of decode steps of `rows`, some of RUNGS, at the most of which the times are."""

    rows: tuple[int, ...]
    plan: Plan
    one_stream_us: float
    us: float

    @property
    def beside(self) -> list[str]:
        """The pieces that do not run on the caller's stream."""
        return [piece.name for piece in self.plan.pieces if piece.stream]


def used(found: Predicted) -> list[Used]:
    """The plans of decode steps by rows, in order; none of a program without a size of that name."""
    made: list[Used] = []
    if ROWS not in found.plan.sizes.values():
        return made
    for _, same in groupby(RUNGS, key=lambda rows: id(found.at(rows))):
        rows = tuple(same)
        plan, most = found.at(rows[0]), rows[-1]
        alone, ours = (length(each, schedule(each, found.us(each, most))) for each in (found.plan, plan))
        made.append(Used(rows, plan, alone, ours))
    return made


def streams_table(plans: list[Used]) -> Table | None:
    """None where there are no such steps."""
    made = table("rows of a decode step", "streams", "pieces", "beside", "events", "us on one stream", "us")
    for each in plans:
        rows = f"{each.rows[0]} to {each.rows[-1]}" if len(each.rows) > 1 else str(each.rows[0])
        streams = len({piece.stream for piece in each.plan.pieces})
        add(made, rows, streams, len(each.plan.pieces), len(each.beside) or None, len(each.plan.events) or None,
            each.one_stream_us, each.us)  # fmt: skip
    return made if plans else None


def beside_by_layer(run: Run, plans: list[Used]) -> Counter[int | None]:
    """How many pieces of each layer run beside in decode steps of one row."""
    names = plans[0].beside if plans else []
    return Counter(run.layer_of.get(cut_from(name)) for name in names)


def cut_from(name: str) -> str:
    """The piece of the program on one stream that side work of that name is a part of, or all of."""
    return name.removesuffix("_side")


def streams_values(plans: list[Used]) -> list[dict[str, Any]]:
    """The same, as values json can write, with the pieces and events by name."""
    return [
        {
            "rows": list(each.rows),
            "streams": {piece.name: piece.stream for piece in each.plan.pieces if piece.stream},
            "events": [[event.after, event.before] for event in each.plan.events],
            "one_stream_us": round(each.one_stream_us, 1),
            "us": round(each.us, 1),
        }
        for each in plans
    ]
