"""Passes take time in proportion to the layers: work is counted in calls of functions, alike on a busy machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.counted import calls_of
from tests.passes.test_trim_replay import kept_of, writing_at_its_end
from tests.strategies.mhc import Stack
from tests.strategies.rows import WINDOW, build
from tests.strategies.tracing import trace
from v41.passes.analysis import rows
from v41.passes.pipeline import run_pipeline
from v41.passes.trim_replay import trim
from v41.regions import outline
from v41.report import PassRun


def calls(sites: int) -> int:
    """How many functions all passes call on so many boundaries; each is found, or less work would be no wonder."""
    stack = Stack(sites=sites)
    fn, rows, weights = stack.to_trace()
    gm = trace(fn, rows, static=weights)
    runs: list[PassRun] = []
    count = calls_of(lambda: runs.extend(run_pipeline(gm)[1]))
    assert sum(run.made.get("mhc_boundary seam", 0) + run.made.get("mhc_boundary entry", 0) for run in runs) == sites
    return count


def test_twice_the_boundaries_are_twice_the_work() -> None:
    calls(3)  # what is found out once a process
    few, some, many = (calls(sites) for sites in (3, 6, 12))
    assert (many - some) / (some - few) < 2.005  # 2.000; 2.009 where every site calls something for every node there is


def trimming(layers: int) -> int:
    """How many functions of passes trim_replay calls where so many late layers are on kept rows, the later half on
    fewer."""
    program = ["gelu", *["window", "norm", "by request", "experts", "ring"] * layers]
    gm, inputs = writing_at_its_end(*build(program))
    outer = kept_of(inputs, WINDOW + layers * WINDOW)
    few = replace(outer, rows=inputs["inner_rows"], longest=inputs["inner_longest"], last=WINDOW + layers)
    decisions = []
    count = calls_of(lambda: decisions.extend(trim(gm, few, outer)), within="passes")
    assert [each.applied for each in decisions] == [True, True]
    return count


def test_twice_the_late_layers_are_twice_the_work() -> None:
    few, some, many = (trimming(layers) for layers in (3, 6, 12))
    assert (many - some) / (some - few) < 2.01  # 1.99


def test_a_body_is_looked_into_once_however_often_rows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And opened calls, or a second seam, have the demand of a whole program told anew."""
    gm, inputs = writing_at_its_end(*build(["norm", "cache", "gelu", "window", "gelu", "window"]))
    outline(gm, [next(node for node in gm.graph.nodes if node.op == "call_function")], kind="part")
    looked = []

    class Counted(rows.Forward):
        def __init__(self, gm, *args) -> None:  # type: ignore[no-untyped-def]
            looked.append(gm)
            super().__init__(gm, *args)

    monkeypatch.setattr(rows, "Forward", Counted)
    outer = kept_of(inputs, 9)
    trim(gm, replace(outer, rows=inputs["inner_rows"], longest=inputs["inner_longest"], last=WINDOW), outer)
    bodies = [each for each in looked if each is not gm]
    assert len(looked) - len(bodies) >= 2 and len(bodies) == len({*bodies}) == 1
