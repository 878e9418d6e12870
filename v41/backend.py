"""backend="v41": torch.compile's call, from Dynamo's graph to the function that runs its pieces.

    Dynamo graph -> AOTAutograd (inference, functional, decomposed) -> passes -> Plan of pieces -> one boxed function

Settings come from torch.compile's `options=` alone, so one module-level callable serves every compile. Example inputs
are traced with, never run and never kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import (
    functional_aten,
    graph_break,
    input_name,
    outside_of_tracing,
    real_tensors,
    times_compiled_before,
)
from v41.errors import GradientsRequested
from v41.options import Options, parse
from v41.passes.partition import partition
from v41.passes.pipeline import CUT_AT, run_pipeline, text_of
from v41.report import CompileReport, programs_wanted, publish, source_of
from v41.runtime.executor import Artifact, eager_artifact, executor

# ATen kernels whose decomposition rounds otherwise: they stay whole where pieces run their ATen nodes, to keep bits.
WHOLE_IN_EAGER = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "logsumexp",
        "silu",
        "gelu",
        "softplus",
        "mish",
        "elu",
        "hardswish",
        "log_sigmoid_forward",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit_no_training",
        "_fused_rms_norm",
        "linalg_vector_norm",
        "std",
        "std_mean",
        "lerp",
        "addcmul",
        "mv",
    ]
)


def v41(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="v41", options={...})` calls. See v41.options for the options."""
    parsed = parse(options, mode)
    refuse_gradients(gm, example_inputs)
    codegen, why = effective_codegen(parsed, device_of(example_inputs))
    report = CompileReport(graph_break=graph_break(gm), recompiles=times_compiled_before())
    report.options = {
        "codegen": (codegen, why),
        "verify": (parsed.verify, "options" if parsed.verify else "default"),
    }
    start = time.perf_counter()

    def inference(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        report.seconds["aot_autograd"] = time.perf_counter() - start
        return build(aten, codegen, parsed.verify, report)

    def training(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        raise gradients_requested(gm, example_inputs)

    whole = WHOLE_IN_EAGER if codegen == "eager" else ()
    compiled = functional_aten(gm, example_inputs, inference, training, whole=whole)
    publish(report)
    return compiled


def build(aten: GraphModule, codegen: str, check: bool, report: CompileReport) -> Callable[[list[Any]], Any]:
    """One functional ATen graph, all the way to the boxed function that runs it."""
    clock = time.perf_counter
    start = clock()
    programs = programs_wanted()
    report.program = text_of(aten) if programs else None
    with real_tensors():
        program, report.passes = run_pipeline(aten, check=check, programs=programs)
    report.seconds["passes"], start = clock() - start, clock()
    plan = partition(program, cut_at=CUT_AT)
    report.seconds["partition"], start = clock() - start, clock()
    bodies = {piece.key: piece.body for piece in reversed(plan.pieces)}
    artifacts = {key: artifact(bodies[key], names, codegen, report) for key, names in plan.keys.items()}
    report.seconds["codegen"] = clock() - start
    report.plan, report.pieces, report.artifacts = plan, len(plan.pieces), len(artifacts)
    return executor(plan, artifacts)


def artifact(body: GraphModule, names: Sequence[str], codegen: str, report: CompileReport) -> Artifact:
    """What the pieces `names` run. What Inductor cannot compile runs as eager, and the report says why."""
    if codegen == "inductor":
        from v41.lowering.inductor import compile_piece

        try:
            return compile_piece(body, names[0])
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
            report.fallbacks.append(f"{', '.join(names)} as eager: Inductor raised {type(error).__name__}: {first}")
    return eager_artifact(body)


def effective_codegen(options: Options, device: torch.device) -> tuple[str, str]:
    """How pieces run, and who decided: the option, or for "auto" whether Inductor keeps the rounding points here."""
    if options.codegen == "eager":
        return "eager", "options"
    from v41.lowering.inductor import supported

    with outside_of_tracing():
        reason = supported(device)
    if options.codegen == "inductor":
        return "inductor", "options" if reason is None else f"options, although {reason}"
    return ("inductor", "auto") if reason is None else ("eager", f"auto: {reason}")


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The accelerator that the inputs live on, or the CPU."""
    devices = [value.device for value in inputs if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def refuse_gradients(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises where gradients would flow, before tracing; a graph that switches them itself is left to AOTAutograd."""
    needing = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    if needing and torch.is_grad_enabled() and not any(switches_gradients(node) for node in gm.graph.nodes):
        raise gradients_requested(gm, inputs)


def switches_gradients(node: Node) -> bool:
    return "set_grad_enabled" in str(node.target) or "inference_mode" in str(node.target)


def gradients_requested(gm: GraphModule, inputs: Sequence[Any]) -> GradientsRequested:
    needing = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    placeholder = [node for node in gm.graph.nodes if node.op == "placeholder"][needing[0]]
    where = next((s for s in (source_of(node) for node in placeholder.users) if s != "unknown"), "torch.compile")
    return GradientsRequested(where, count=len(needing), total=len(tensors), first=input_name(placeholder))
