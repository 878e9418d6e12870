"""overlap: the plan of a program with side work on streams of its own, and the numbers of rows for which it is used.

    plan            pieces on the caller's stream                    more rows, uncaptured steps, prefill
    plan.sides      the same work on several, with events            decode steps that are captured, where it pays

Whether it pays is measured here where there is a GPU: each kind of piece alone, whole and without its side work, at
powers of two of rows. Between those the upper one counts. What cannot be run alone (its inputs are places in caches) is
judged by prediction. What whole steps gained (gains.py), where `v41 bench overlap --sites` has run, counts before both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat import outside_of_tracing
from v41.gains import gained_on
from v41.lowering.measure import microseconds
from v41.model_def.buckets import Buckets, round_up
from v41.options import Options
from v41.passes.analysis.collectives import spoken
from v41.passes.analysis.sizes import symbols_in
from v41.passes.analysis.times import Machine
from v41.passes.assign_streams import assign_streams
from v41.passes.plan_passes import run_plan_pass
from v41.passes.same_values import random_like
from v41.passes.structure import structure_key
from v41.plan import Plan
from v41.regions import Measure
from v41.report import PassRun
from v41.runtime.executor import Artifact, LanesOf, events_of
from v41.runtime.streams import CudaLanes

ROWS = "rows"
RUNGS = tuple(1 << k for k in range(Buckets().whole[ROWS].bit_length()))  # rows for which side streams are judged
Compile = Callable[[GraphModule, str], Artifact]  # of the body of a piece with this key


def wanted(options: Options, device: torch.device, plan: Plan) -> tuple[bool, str]:
    """Whether the program gets a plan with side streams, and who decided."""
    if options.overlap == "off":
        return False, "options"
    if ROWS not in plan.sizes.values():
        return False, f"{options.overlap}: the program has no size called {ROWS}"
    if lanes_of(device) is None:
        return False, f"{options.overlap}: no streams on {device.type}"
    if options.overlap == "auto" and options.capture == "off":
        return False, 'auto: nothing is captured; overlap="on" takes uncaptured steps too'
    return True, options.overlap if options.overlap == "auto" else "options"


def lanes_of(device: torch.device) -> LanesOf | None:
    """What makes the side streams of a plan on `device`."""
    if device.type != "cuda":
        return None
    return lambda plan: CudaLanes(device, max(piece.stream for piece in plan.pieces), events_of(plan))


def overlapped(
    plan: Plan, device: torch.device, compiled: Compile, codegen: str, *, strict: bool
) -> tuple[Plan, PassRun]:
    """`plan`, which has buckets, with others beside it that have side streams, where that pays at all; and what
    assign_streams did.

    codegen: how pieces run. strict: where assign_streams fails its error is raised, else the report has it."""
    most = Buckets().whole[ROWS]
    ladder = [rows for rows in plan.buckets.get(ROWS, ()) if rows <= most]
    measure = measure_of(plan.sizes, device, compiled) if device.type == "cuda" else None
    gained = gained_on(device, codegen)
    expect = ready(plan.sizes, device, compiled)
    made, run = run_plan_pass(
        "assign_streams",
        lambda plan: assign_streams(plan, RUNGS, measure, gained, machine_of(device), expect),
        plan,
        strict=strict,
    )
    sides: Plan | None = None
    for each in reversed((made, *made.sides)):
        pays = tuple(rows for rows in ladder if round_up(rows, RUNGS) in each.pays_at)
        if pays:
            sides = replace(each, pays_at=pays, overlapped=sides)
            for piece in each.pieces:
                compiled(piece.body, piece.key)
    return replace(plan, overlapped=sides), run


def machine_of(device: torch.device) -> Machine:
    """What is predicted for: the GPU that is known best, with the multiprocessors of `device`."""
    if device.type != "cuda":
        return Machine()
    return Machine(multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)


def measure_of(sizes: Mapping[str, str], device: torch.device, compiled: Compile) -> Measure:
    """Times pieces on `device` as CUDA graphs replay them: those whose inputs are floats, of one size, rows."""
    keys: dict[GraphModule, str] = {}
    known: dict[tuple[str, int], float | None] = {}

    def measure(body: GraphModule, rows: int) -> float | None:
        if body not in keys:
            keys[body] = structure_key(body)
        if (keys[body], rows) not in known:
            known[keys[body], rows] = timed(body, rows) if runs_alone(body, sizes) else None
        return known[keys[body], rows]

    def timed(body: GraphModule, rows: int) -> float:
        run = compiled(body, keys[body])
        generator = torch.Generator(device).manual_seed(0)  # a host would take seconds for the largest weights
        values = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
        with outside_of_tracing():
            sets = [tuple(random_like(value, rows, generator, False) for value in values) for _ in range(2)]
            return microseconds(run, sets)

    return measure


def ready(
    sizes: Mapping[str, str], device: torch.device, compiled: Compile
) -> Callable[[Sequence[GraphModule]], None]:
    """Compiles what bodies launch when they are measured, side by side."""

    def expect(bodies: Sequence[GraphModule]) -> None:
        from v41.lowering.ahead import compile_ahead  # loaded where kernels are generated

        jobs = list[tuple[Artifact, list[object], dict[str, int]]]()
        for key, body in {structure_key(body): body for body in bodies if runs_alone(body, sizes)}.items():
            values = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
            jobs += [(compiled(body, key), values, dict.fromkeys(sizes, rows)) for rows in RUNGS]
        compile_ahead(jobs, device)

    return expect


def runs_alone(body: GraphModule, sizes: Mapping[str, str]) -> bool:
    """Whether any numbers will do as the inputs of a piece, and no other rank has to run it, too."""
    if spoken(body)[1]:
        return False
    values = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
    floats = all(value.dtype.is_floating_point for value in values if isinstance(value, Tensor))
    return floats and {sizes.get(symbol) for value in values for symbol in symbols_in(value)} <= {ROWS}


def sites_told(run: PassRun, plan: Plan) -> str:
    """What became of the sites of assign_streams, in the report's line on side streams."""
    if run.failure is not None:
        return f"assign_streams failed: {run.failure.splitlines()[0]}"
    measured = sum(bool(each.times and each.times["measured gain"]) for each in run.decisions)
    how = f"{measured} measured, else as predicted for {Machine().name}"
    return f"{run.applied} of {len(run.decisions)} sites ({how}), at {pays_told(plan)} rows"


def pays_told(plan: Plan) -> str:
    """At which numbers of rows side streams are used, as runs of rungs: "1 to 8, 24"; "no" where at none."""
    ladder, pays = plan.buckets.get(ROWS, ()), {rows for each in plan.sides for rows in each.pays_at}
    runs = [tuple(run) for used, run in groupby(ladder, key=pays.__contains__) if used]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "no"
