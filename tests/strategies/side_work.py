"""Small programs with work that has slack: kept for later, looked up by ids, beside writes that it must not pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.partition import partition
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.plan import Plan
from v41.regions import flatten, outline

ROWS, IDS, WEIGHT, TABLE = torch.randn(3, 4), torch.tensor([1, 0, 1]), torch.randn(4, 4), torch.randn(2, 4)
CACHE = torch.zeros(5, 4)
STEPS = ("seam", "seam", "keep", "use", "look up", "gather", "write", "keep a read", "keep a draw")
programs = st.lists(st.sampled_from(STEPS), min_size=3, max_size=9).filter(lambda steps: {*steps} != {"use"})


def program(steps: Sequence[str]) -> GraphModule:
    """seam: a piece of its own. keep: a product for whoever uses it. look up: what hangs on ids alone; gather: and on a
    cache."""

    def run(x: Tensor, ids: Tensor, w: Tensor, table: Tensor, cache: Tensor) -> Any:
        kept = []
        for step in steps:
            match step:
                case "seam":
                    x = x.tanh()
                case "keep":
                    x, y = x.exp() * 0.1, x @ w
                    kept.append(y.exp())
                case "use":
                    x = x + kept.pop(0) if kept else x
                case "look up":
                    x = x + table[ids] @ w
                case "write":
                    cache[0].copy_(x.sum(0))
                case "gather":
                    x = x + cache[ids] @ w
                case "keep a read":
                    x, y = x.exp() * 0.1, cache[ids] @ w
                    kept.append(y.exp())
                case "keep a draw":
                    x, y = x.exp() * 0.1, torch.rand_like(x) @ w
                    kept.append(y.exp())
        return x, *kept

    gm = trace(run, ROWS, IDS, static=(WEIGHT, TABLE, CACHE))
    reinplace_cache_writes(gm)
    for node in [node for node in gm.graph.nodes if node.target is torch.ops.aten.tanh.default]:
        outline(gm, [node], kind="seam")
    return gm


def planned(gm: GraphModule) -> Plan:
    return partition(gm, cut_at=["seam"], along="rows")


def by_nodes(body: GraphModule, rows: int) -> float:
    """A Measure for which every node takes a while."""
    return 10.0 * sum(node.op == "call_function" for node in flatten(body).graph.nodes)


def check_sides(plan: Plan) -> None:
    """What runs on side streams only computes, and reads nothing that the program writes."""
    memory, sides = PlanFacts(plan).memory, [piece for piece in plan.pieces if piece.stream]
    assert [node for piece in sides for node in flatten(piece.body).graph.nodes if effect_of(node)] == []
    written = {memory[name] for piece in plan.pieces for name in piece.writes}
    assert written.isdisjoint(memory[name] for piece in sides for name in piece.reads)
