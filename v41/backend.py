"""backend="v41": torch.compile's call, from Dynamo's graph to the function that runs its pieces.

    Dynamo graph -> AOTAutograd (inference, functional, decomposed) -> passes -> Plan of pieces -> one boxed function

Settings come from torch.compile's `options=` alone, so one module-level callable serves every compile. Example inputs
are traced with, never run and never kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat import (
    graph_break,
    input_name,
    outputs_rebuilt_from_inputs,
    real_tensors,
    shape_ids,
    times_compiled_before,
)
from v41._compat_frames import is_cut
from v41._compat_trace import functional_aten, young_garbage_alone
from v41.artifact_cache import open_cache
from v41.codegen import effective_codegen, kept_whole, ways
from v41.errors import UnknownBuckets
from v41.gradients import gradients_requested, refuse_gradients
from v41.lowering.rewrites import options_of
from v41.lowering.tuned import Tuning
from v41.model_def.buckets import Buckets
from v41.options import Options, parse
from v41.overlap import lanes_of, overlapped, sites_told, wanted
from v41.passes.analysis.collectives import spoken
from v41.passes.changes import mark
from v41.passes.check_plan import check_plan
from v41.passes.open_reduced import open_reduced
from v41.passes.open_shared import open_shared
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT, PIPELINE, ROW_KERNELS, run_pipeline, text_of
from v41.passes.plan_passes import run_plan_pass
from v41.passes.prefetch_engram import prefetch_engram
from v41.passes.replay_seam import KIND as SEAM
from v41.passes.replay_seam import parted
from v41.passes.side_work import HALVES
from v41.plan import Plan
from v41.regions import REDUCED, cuts, flatten, region_of, regions
from v41.report import Captures, CompileReport, programs_wanted, publish
from v41.runtime.all_kept import AllKept, parts_of
from v41.runtime.capture import CudaGraphs, Graphs
from v41.runtime.executor import Artifact, Run, eager_artifact, executor
from v41.runtime.replay import Replayer
from v41.runtime.same_program import check_same_program
from v41.sums import FUSED, Checked, Sums, decided, told

if TYPE_CHECKING:
    from v41.lowering.generated import GeneratedPiece
    from v41.lowering.rowwise import Unsupported


def v41(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="v41", options={...})` calls. See v41.options for the options."""
    parsed = parse(options, mode)
    refuse_gradients(gm, example_inputs)
    refuse_unknown_buckets(gm, parsed.buckets or {})
    device = device_of(example_inputs)
    report = CompileReport(graph_break=graph_break(gm), recompiles=times_compiled_before())
    sums = decided(gm, parsed, device, lambda: effective_codegen(parsed, device)[0])
    parsed = replace(parsed, all_reduce=sums.how)
    cache = open_cache(gm, parsed, [(each.name, each.run) for each in PIPELINE], device)
    stored = cache.load(report, example_inputs)
    if stored is not None:
        check_plan(stored.plan)
        compiled = stored.wrapped(run_of(stored.plan, stored.artifacts, parsed, device, report, sums), example_inputs)
        publish(report)
        return compiled
    report.cache = cache.says
    codegen, why = effective_codegen(parsed, device)
    made: list[tuple[Plan, dict[str, Artifact]]] = []
    report.options = {
        "codegen": (codegen, why),
        "verify": (parsed.verify, "options" if parsed.verify else "default"),
    }
    start = time.perf_counter()

    names = [input_name(node) for node in gm.graph.nodes if node.op == "placeholder"]

    def inference(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        report.seconds["aot_autograd"] = time.perf_counter() - start
        made.append(build(aten, ways(codegen, device), parsed, report, names, device))
        return run_of(*made[0], parsed, device, report, sums)

    def training(aten: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        raise gradients_requested(gm, example_inputs)

    whole = kept_whole(ways(codegen, device) if device.type != "cpu" else ())
    with cache.recorded() as wrapper:
        compiled = functional_aten(gm, example_inputs, inference, training, whole=whole)
    if made:
        cache.save(wrapper, *made[0], report, example_inputs)
    publish(report)
    return compiled


def build(
    aten: GraphModule,
    order: Sequence[str],
    options: Options,
    report: CompileReport,
    names: Sequence[str],
    device: torch.device,
) -> tuple[Plan, dict[str, Artifact]]:
    """One functional ATen graph, all the way to its plan and an artifact a key. names: what the user calls inputs."""
    clock = time.perf_counter
    plan, start = planned(aten, order, options, report, names), clock()
    bodies = {piece.key: piece.body for piece in reversed(plan.pieces)}
    ranges = Buckets().ranges(plan.sizes) if device.type != "cpu" and "inductor" in order else ()  # where speed counts
    if ranges:
        limits = [", ".join(dict.fromkeys(f"{plan.sizes[u]} <= {most}" for u, most in each.items())) for each in ranges]
        report.options["code for"] = ("; ".join(limits), "v41; beyond these, Inductor's pieces run their ATen nodes")
    shared = SHARED.get()
    known = {} if shared is None else shared.setdefault((*order, str(device)), {})
    artifacts = {
        key: known.get(key) or artifact(bodies[key], names, order, report, ranges) for key, names in plan.keys.items()
    }
    known.update(artifacts)
    overlaps, who = wanted(options, device, plan)
    if overlaps:

        def compiled(body: GraphModule, key: str) -> Artifact:
            if key not in artifacts:
                known[key] = artifacts[key] = known.get(key) or artifact(body, ["side work"], order, report, ranges)
            return artifacts[key]

        bucketed = in_buckets(plan, options.buckets or {})
        plan, run = overlapped(bucketed, device, compiled, order[0], strict=options.strict)
        report.passes.append(run)
        who = f"{who}; {sites_told(run, plan)}"
    report.options["overlap"] = ("on" if plan.overlapped else "off", who)
    parts = [part for made in artifacts.values() for part in parts_of(made)]
    report.options |= options_of(part.rewrites for part in parts if hasattr(part, "rewrites"))
    granted = granted_by(parts, plan.sizes)
    if granted:
        report.options["granted"] = ("; ".join(granted), "v41; a call that breaks one runs ATen nodes")
    report.seconds["codegen"] = clock() - start
    report.plan, report.pieces, report.artifacts = plan, len(plan.pieces), len(artifacts)
    return plan, artifacts


SHARED: ContextVar[dict[tuple[str, ...], dict[str, Artifact]] | None] = ContextVar("v41_shared_artifacts", default=None)


@contextmanager
def shared_artifacts() -> Iterator[None]:
    """Programs compiled in the block share what equal pieces run: where variants of a model are compared, each piece is
    compiled once. What ways and devices make of a piece is kept apart; other options say nothing of pieces."""
    before = SHARED.set({})
    try:
        yield
    finally:
        SHARED.reset(before)


@young_garbage_alone()
def planned(
    aten: GraphModule,
    order: Sequence[str],
    options: Options,
    report: CompileReport,
    names: Sequence[str],
    heard: Callable[[str], None] = lambda phase: None,
) -> Plan:
    """One functional ATen graph, through the passes to its plan, for a device on which pieces run in the ways `order`.
    Nothing is compiled. names: what the user calls inputs. heard: is told each pass, and partition, as it begins."""
    clock = time.perf_counter
    start = clock()
    programs = programs_wanted()
    report.program = text_of(aten) if programs else None
    inputs = [node.name for node in aten.graph.nodes if node.op == "placeholder"]
    called = dict(zip(inputs, names, strict=True)) if len(inputs) == len(names) else {}
    cut_at = kernel_kinds(order, options.all_reduce == FUSED)
    asked: dict[str, Any] = {"check": options.verify, "strict": options.strict, "programs": programs}
    with real_tensors():
        program, report.passes = run_pipeline(aten, **asked, called=called, own=cut_at, told=heard)
    report.seconds["passes"], start = clock() - start, clock()
    heard("partition")
    mark(program)
    if REDUCED not in cut_at:
        open_reduced(program)
    open_shared(program, cut_at)
    plan = partition(program, cut_at=(*cut_at, SEAM), along=ALONG, called=called)
    plan, early = run_plan_pass("prefetch_engram", prefetch_engram, plan, strict=options.strict)
    if early.decisions or early.failure:
        report.passes.append(early)
    plan = replace(plan, rebuilt=tuple(sorted(outputs_rebuilt_from_inputs(len(plan.outputs)))))
    groups, collectives = spoken(program)
    plan = replace(plan, groups=groups, collectives=collectives)
    check_plan(plan)
    report.seconds["partition"] = clock() - start
    return plan


def granted_by(artifacts: Iterable[Artifact], names: Mapping[str, str]) -> list[str]:
    """What the widest code of any of `artifacts` takes for granted of sizes, each told by its name."""
    found = dict.fromkeys(condition for made in artifacts for condition in getattr(made, "granted", ()))
    return [re.sub(r"\bu\d+\b", lambda symbol: names.get(symbol[0], symbol[0]), condition) for condition in found]


def run_of(
    plan: Plan,
    artifacts: Mapping[str, Artifact],
    options: Options,
    device: torch.device,
    report: CompileReport,
    sums: Sums,
) -> Run:
    """The boxed function that runs `plan`: captured where options and device allow, which `report.captures` counts."""
    if (added := told(plan, artifacts)) is not None:
        report.options["all-reduce"] = (added, sums.who)
    workspaces = sums.bind(artifacts.values())
    if (same := check_same_program(plan, artifacts)) is not None:
        report.options["ranks"] = (same, "compared before the first step")
    report.plan = plan = in_buckets(plan, options.buckets or {})
    graphs, why = graphs_of(device, options.capture)
    report.options["capture"] = ("off" if graphs is None else "on", why)
    if graphs is not None:
        report.captures = Captures(pool_bytes=graphs.pool_bytes)
        from v41.lowering.ahead import Ahead

        ahead = Ahead(plan, artifacts, device)
        run: Run = Replayer(plan, artifacts, graphs, report.captures, lanes_of(device), ahead)
    else:
        run = executor(plan, artifacts, lanes_of(device) if options.overlap == "on" else None)
    run = Checked(run, workspaces) if workspaces else run
    return Tuning(run) if options.tune else run


def in_buckets(plan: Plan, given: Mapping[str, Sequence[int]]) -> Plan:
    """`plan` with the ladder of each size, by its name: `given`, else what model_def pads a batch to."""
    names, own = dict.fromkeys(plan.sizes.values()), Buckets()
    ladders = {name: tuple(given[name]) if name in given else own.ladder(name) for name in names}
    return replace(plan, buckets={name: rungs for name, rungs in ladders.items() if rungs}, whole=own.whole)


def refuse_unknown_buckets(gm: GraphModule, given: Iterable[str]) -> None:
    """Raises where `given` names no size of the program, of a Batch or of an input. Of a function that is cut into
    graphs, it may be a size of another one."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    marked = sorted({*shape_ids([node.meta.get("example_value") for node in inputs]).values()})
    named = {input_name(node) for node in inputs}
    for size in given:
        may_be = size in marked or Buckets().ladder(size) or {size, size.rpartition(".")[0]} & named
        if not may_be and not is_cut(gm):
            known = (*marked, "rows", "requests", "logits", "longest", "blocks of ratio N", "INPUT.AXIS")
            raise UnknownBuckets("torch.compile(options=...)", size=size, known=", ".join(dict.fromkeys(known)))


def graphs_of(device: torch.device, capture: str) -> tuple[Graphs | None, str]:
    """What captures on `device`, and who decided."""
    if capture == "off":
        return None, "options"
    return (CudaGraphs(device), "auto") if device.type == "cuda" else (None, f"auto: no CUDA graphs on {device.type}")


def artifact(
    body: GraphModule,
    names: Sequence[str],
    order: Sequence[str],
    report: CompileReport,
    tiers: Sequence[Mapping[str, int]] = (),
) -> Artifact:
    """What the pieces `names` run: the first way of `order` that takes them. The report says why others did not.

    tiers: ranges of sizes for which Inductor makes code of their own, as limits by symbol.
    """
    if (apart := parted(body)) is not None:
        taken = artifact(flatten(body), names, order, report, tiers)
        rest = None if apart.rest is None else artifact(apart.rest, names, order, report, tiers)
        return AllKept(apart.kept, apart.taken, apart.same, apart.reads, taken, rest)
    for way, following in pairwise(order):
        made = generated(body, names, report) if way == "triton" else compiled_by_inductor(body, names, tiers)
        if not isinstance(made, str):
            return made
        if made:
            report.fallbacks.append(f"{', '.join(names)} as {following}: {made}")
    return eager_artifact(body)


def generated(body: GraphModule, names: Sequence[str], report: CompileReport) -> Artifact | str:
    """The generated kernel of a piece of regions, or why there is none; "" for pieces between regions."""
    made = kernel_of(body, names[0])
    if made is None:
        return ""
    from v41.lowering.generated import GeneratedPiece

    if not isinstance(made, GeneratedPiece):
        return f"no kernel, since {made.node} ({made.op}) {made.reason}"
    report.kernels.setdefault(made.kernel.name, []).extend(names)
    return made


def kernel_of(body: GraphModule, piece: str) -> GeneratedPiece | Unsupported | None:
    """What codegen "triton" generates for the piece of that body, why it is nothing, or None between regions. The one
    place that decides; what tells of kernels asks here."""
    kinds = kinds_cut_out(body)
    if not kinds:
        return None
    from v41.lowering.generated import generate_piece

    return generate_piece(body, "_".join(kinds), piece)


def kinds_cut_out(body: GraphModule) -> tuple[str, ...]:
    """The kinds of region in `body` that codegen "triton" generates a kernel for."""
    wanted = kernel_kinds(("triton",), sums=True)
    return tuple(dict.fromkeys(each.kind for each in map(region_of, regions(body)) if cuts(each, wanted)))


def kernel_kinds(order: Sequence[str], sums: bool = False) -> tuple[str, ...]:
    """The kinds of region that are pieces of their own. sums: over ranks are added up by kernels."""
    return (*CUT_AT, *HALVES, *ROW_KERNELS, *([REDUCED] * sums)) if "triton" in order else CUT_AT


def compiled_by_inductor(body: GraphModule, names: Sequence[str], tiers: Sequence[Mapping[str, int]]) -> Artifact | str:
    """What Inductor made of a piece, or what it raised."""
    from v41.lowering.inductor import compile_piece

    try:
        return compile_piece(body, names[0], tiers=tiers, beyond=eager_artifact(body) if tiers else None)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        return f"Inductor raised {type(error).__name__}: {first}"


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The accelerator that the inputs live on, or the CPU."""
    devices = [value.device for value in inputs if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
