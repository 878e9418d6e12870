"""Passes take time in proportion to the layers: work is counted in calls of functions, alike on a busy machine."""

from __future__ import annotations

from tests.counted import calls_of
from tests.strategies.mhc import Stack
from tests.strategies.tracing import trace
from v41.passes.pipeline import run_pipeline
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
