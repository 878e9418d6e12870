"""A plan's tables: artifacts with their pieces, reasons of borders, what rungs cost; JSON has each rung."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console
from rich.table import Table

from tests.strategies.plans import plan
from v41.plan import Buffer, Plan
from v41.report import CompileReport
from v41.tools.plan_view import artifacts_table, rounding_table
from v41.tools.report_view import as_json, show


def example() -> Plan:
    """Two pieces of one artifact, and one that cannot be captured."""
    bare = plan("x", "c", "first: x -> a, x", "second: a -> b, a", "third: b -> c, b")
    first, second, third = (replace(piece, nodes=7, sizes=("u0",)) for piece in bare.pieces)
    pieces = (
        replace(first, border="start of the graph", key="6f" * 8),
        replace(second, border="region seam", key="6f" * 8),
        replace(third, border="not capturable: item", key="07" * 8, sizes=("u0", "u1"), uncapturable="item"),
    )
    buffers = {"a": Buffer("a", "f32[u0, 262144]", "first", 0, 1, "1048576*u0")}
    sizes = {"u0": "rows", "u1": "requests"}
    return replace(bare, pieces=pieces, sizes=sizes, buckets={"rows": (1, 2, 4), "requests": (8,)}, buffers=buffers)


def text(made: Table | None) -> list[str]:
    console = Console(width=140, file=StringIO())
    console.print(made)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_artifacts() -> None:
    assert text(artifacts_table(example())) == """\
artifact  begins                sizes           capture  first piece  pieces  nodes
6f6f6f6f  start of the graph    rows            yes      first             2      7
07070707  not capturable: item  rows, requests  item     third             1      7""".splitlines()


def test_rounding() -> None:
    assert text(rounding_table(example())) == """\
size      rungs  from  to  at most  of  on average  MiB at most
rows          3     1   4     +33%   3         +5%            1
requests      1     8   8    +700%   1        +78%            -""".splitlines()


def test_the_report_tells_borders_and_every_rung() -> None:
    report = CompileReport(plan=example())
    console = Console(width=140, file=StringIO())
    show(console, [report])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "pieces begin at" in shown and "not capturable: item" in shown and "MiB at most" in shown
    (values,) = json.loads(json.dumps(as_json([report])))
    assert values["borders"] == {"start of the graph": 1, "region seam": 1, "not capturable: item": 1}
    assert [(rung["size"], rung["rung"], rung["fewest"]) for rung in values["rounding"]] == [
        ("rows", 1, 1), ("rows", 2, 2), ("rows", 4, 3), ("requests", 8, 1)]  # fmt: skip


def test_without_ladders_there_is_nothing_to_tell() -> None:
    bare = replace(example(), buckets={})
    assert rounding_table(bare) is None and as_json([CompileReport(plan=bare)])[0]["rounding"] == []
