"""plan_passes: a pass over a plan runs as one over a graph does: timed, held to all rules, undone where it fails.

Such a pass takes a plan and returns one, and leaves the one it took as it was; so undoing it is to forget what it
returned. One that raises, or returns a plan that breaks a rule of check_plan, is named in the report, and the program
compiles with the plan that entered. With `strict` its error is raised. Torch's switches reach it by its name, as they
reach the others (`disabled_passes`, the bisector).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.fx import Graph, GraphModule

from v41._compat import observed
from v41.passes.check_plan import check_plan
from v41.passes.pipeline import SWITCHED_OFF, failure_of, strictly
from v41.plan import Plan
from v41.report import Decision, PassRun

PLAN_PASSES = ("prefetch_engram", "assign_streams")  # in the order in which they run
PlanPass = Callable[[Plan], tuple[Plan, list[Decision]]]


def run_plan_pass(name: str, run: PlanPass, plan: Plan, *, strict: bool = False) -> tuple[Plan, PassRun]:
    """The plan after `run`, and what it did. With `strict` a failure raises PassFailed, or PlanBroken."""
    start = time.perf_counter()
    made, decisions, failure = plan, list[Decision](), None
    try:
        # Torch asks for a graph, and times and switches the pass by its name alone.
        result = observed(GraphModule({}, Graph()), name, lambda _: run(plan))
        if result is not None:
            if result[0] is not plan:
                check_plan(result[0])
            made, decisions = result
        else:
            failure = SWITCHED_OFF
    except Exception as error:  # as in run_pipeline: the report names the pass, and the program goes on without it
        if strict:
            raise strictly(error, name) from error
        failure = failure_of(error)
    nodes = [sum(piece.nodes for piece in each.pieces) for each in (plan, made)]
    return made, PassRun(name, decisions, nodes[0], nodes[1], (time.perf_counter() - start) * 1e3, failure)
