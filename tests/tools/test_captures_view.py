"""What became of captured steps is shown whole, and JSON has the same."""

from __future__ import annotations

import json
from dataclasses import fields
from io import StringIO

from rich.console import Console

from v41.report import Captures, CompileReport
from v41.tools.captures_view import capture_values
from v41.tools.report_view import as_json, show

LOG = Captures(
    captured=["rows=4 requests=4", "rows=128 segment_0", "rows=128 segment_2"],
    replays=4,
    segment_replays=6,
    piecewise={"longest above 1": 5},
    uncaptured={"rows=3 is in no bucket": 2},
    warm_ups=3,
    dropped=["rows=4 requests=4"],
    errors=["rows=8 requests=8: RuntimeError: not permitted"],
    host_ns=160_000,
    pool_bytes=lambda: 3 << 20,
)


def test_the_table_and_the_remarks() -> None:
    console = Console(width=120, file=StringIO())
    show(console, [CompileReport(captures=LOG)])
    text = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    start = text.index("how steps ran                       steps  graphs")
    assert text[start + 1 : start + 8] == """\
one graph                               4       1
in segments: longest above 1            5       2
warm-up, of these and of new sizes      3       -
uncaptured: rows=3 is in no bucket      2       -
capture  40.0 µs on the host a step that is one graph; 3.0 MiB in all graphs
dropped  1: an input lay at another address; the first rows=4 requests=4
error    rows=8 requests=8: RuntimeError: not permitted: runs uncaptured""".splitlines()


def test_json_has_every_field() -> None:
    (graph,) = as_json([CompileReport(captures=LOG)])
    assert json.loads(json.dumps(graph))["captures"] == capture_values(LOG)
    assert {field.name for field in fields(Captures)} - {"host_ns"} <= capture_values(LOG).keys()
    assert as_json([CompileReport()])[0]["captures"] is None
