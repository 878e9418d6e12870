"""open_reduced: where no kernel adds up over ranks, a fused all-reduce becomes the collective and the region again.

    before   region(kind="all_reduce_boundary", body = all_reduce, wait, mhc_boundary)
    after    all_reduce -> wait -> region(kind="mhc_boundary")

The collective then runs as it is, and what reads the sum is lowered as on one rank. Exact: inlining moves nodes and
rewrites none.
"""

from __future__ import annotations

from torch.fx import GraphModule

from v41.passes.matching import programs
from v41.regions import REDUCED, inline, regions


def open_reduced(gm: GraphModule) -> int:
    """Inlines every fused all-reduce of `gm` and of its subgraphs, in place. How many there were."""
    calls = [(program, call) for program in programs(gm) for call in regions(program, REDUCED)]
    for program, call in calls:
        inline(program, call)
    return len(calls)
