"""plan_only: what the backend makes of Dynamo's graph for a device that need not be here, up to the plan.

    codegen "triton"      as on a GPU: regions that get kernels are pieces of their own, all else is Inductor's
            "inductor"    as where no kernel is generated
            "eager"       as on a CPU

Decompositions, cuts and passes are those of the backend under that codegen; nothing is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from v41._compat import graph_break, input_name, times_compiled_before
from v41._compat_trace import functional_aten
from v41.backend import in_buckets, planned
from v41.codegen import kept_whole
from v41.gradients import gradients_requested, refuse_gradients
from v41.options import parse
from v41.report import CompileReport
from v41.sums import FUSED, LIBRARY, groups_of

ORDERS = {"triton": ("triton", "inductor", "eager"), "inductor": ("inductor", "eager"), "eager": ("eager",)}
WHO = {
    "triton": "as on a GPU, which need not be here; the rest through inductor",
    "inductor": "as on a device that keeps the rounding points",
    "eager": "as on a CPU",
}
SUMS = {FUSED: "as on GPUs that can write each other's memory", LIBRARY: "no kernel adds up over ranks there"}


def plan_only(
    gm: GraphModule,
    inputs: Sequence[Any],
    codegen: str,
    verify: bool | str = False,
    heard: Callable[[str], None] = lambda phase: None,
    all_reduce: str | None = None,
) -> CompileReport:
    """The report of `gm`, with its plan. verify, all_reduce: the backend's options of these names; None: kernels add up
    over ranks where there are kernels. heard: is told what begins."""
    sums = all_reduce or (FUSED if codegen == "triton" else LIBRARY)
    options, order = parse({"verify": verify, "all_reduce": sums}, None), ORDERS[codegen]
    refuse_gradients(gm, inputs)
    report = CompileReport(graph_break=graph_break(gm), recompiles=times_compiled_before())
    report.cache = "off: nothing is compiled"
    told = "options" if verify else "default"
    report.options = {"codegen": (codegen, WHO[codegen]), "verify": (verify, told)}
    if groups_of(gm):
        report.options["all_reduce"] = (sums, "options" if all_reduce else SUMS[sums])
    names = [input_name(node) for node in gm.graph.nodes if node.op == "placeholder"]
    start = time.perf_counter()

    def inference(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        report.seconds["aot_autograd"] = time.perf_counter() - start
        plan = report.plan = in_buckets(planned(aten, order, options, report, names, heard), {})
        report.pieces, report.artifacts = len(plan.pieces), len(plan.keys)
        return _nothing

    def training(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        raise gradients_requested(gm, inputs)

    functional_aten(gm, inputs, inference, training, whole=kept_whole(order))
    return report


def _nothing(inputs: list[Any]) -> Any:
    raise AssertionError("what was planned alone is not run")
