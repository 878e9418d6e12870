"""bench alone: whether a row of a decode step has the same bits alone as among many, and what breaks it.

    logits    each of --rows requests decodes among the others, and alone: how many rows are equal bit by bit
    pieces    of the first rows, one after another: the pieces that do not give it the bits it has alone, and in these
              the calls of libraries (lockstep.py)

Steps run uncaptured; graphs replay the same kernels. A generated kernel must not be among what is told: its results do
not depend on the batch. Exits with 1 if one is, or if rows differ and nothing is told. The JSON holds all. --device cpu
runs the ATen nodes.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.report import collect
from v41.tools.bench import timing
from v41.tools.bench.contenders import values_of
from v41.tools.bench.models import config_of, device_of, facts_of, model_of
from v41.tools.bench.overlap_stress import copy_of
from v41.tools.bench.program_cases import Case, prepare
from v41.tools.lockstep import Broken, alike, lockstep, off
from v41.tools.planned_step import PlannedStep, step_of, step_on_gpu
from v41.tools.tables import add, table

TRIED = 3  # rows whose pieces are told: one row may be spared by chance
Record = dict[str, Any]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench alone` does."""
    started = time.perf_counter()
    device_of(arguments, "v41 bench alone", "runs the ATen nodes")
    config = config_of(arguments)
    model = model_of(config, arguments)
    result: Record = facts_of("alone", arguments, config) | {"rows": arguments.rows, "context": arguments.context}
    with torch.no_grad():
        (case,) = prepare(model, [arguments.rows], [], [arguments.context])
        step, result["compiled"] = compiled(model, case, arguments.codegen)
        result["logits"] = logits(step, config, case)
        found = [pieces(step, config, case, row) for row in range(min(TRIED, arguments.rows))]
    result["broken"] = [{"row": row, **asdict(each)} for row, broken in enumerate(found) for each in broken]
    result["calls"] = told(each for broken in found for each in broken)
    result["seconds"] = round(time.perf_counter() - started, 1)
    Console(width=160).print(overview(result["calls"]))
    print(line(result), f"\nwritten to {timing.save(result, arguments.out)}")
    return 0 if holds(result) else 1


def compiled(model: V41ForCausalLM, case: Case, codegen: str) -> tuple[PlannedStep, Record]:
    """The step of `case` as v41 runs it, on one stream, and what the compiler says of itself."""
    if case.cache.device.type == "cpu":
        step, report = step_of(model, case.batch, case.cache, [case.rows])
        return step, values_of(report)
    options: dict[str, Any] = {"codegen": codegen, "overlap": "off", "cache": False}
    with collect() as reports:
        step = step_on_gpu(torch.compile(model, backend="v41", fullgraph=True, options=options), case.batch, case.cache)
    return step, values_of(reports[-1])


def batch_of(config: V41Config, case: Case, chunks: Sequence[Chunk]) -> Batch:
    return build_batch(config, case.cache, chunks, buckets=Buckets())


def logits(step: PlannedStep, config: V41Config, case: Case) -> Record:
    """Rows of logits that are the same alone, and how far others are off."""
    run, chunks = step.on(step.plan), case.batch.host.chunks
    among = run(step.fed(case.batch, case.cache))[0]
    apart = [run(step.fed(batch_of(config, case, [chunk]), case.cache))[0] for chunk in chunks]
    pairs = [(among[row : row + 1], each) for row, each in enumerate(apart)]
    return {"rows": len(pairs), "equal": sum(alike(*pair) for pair in pairs), "off": max(off(*pair) for pair in pairs)}


def pieces(step: PlannedStep, config: V41Config, case: Case, row: int) -> list[Broken]:
    """The pieces that do not give request `row` the bits it has alone; it is put first, since rows are numbered."""
    chunks = case.batch.host.chunks
    turned = [*chunks[row:], *chunks[:row]]
    many, alone = (batch_of(config, case, each) for each in (turned, turned[:1]))
    among, apart = (step.fed(batch, copy_of(case.cache)) for batch in (many, alone))
    return lockstep(step.plan, step.artifacts, among, apart, slot=turned[0].slot)


def told(found: Iterable[Broken]) -> list[Record]:
    """A line for each call that breaks pieces, and for kernels of pieces' own: which pieces, where they begin, and how
    far the row is off at most."""
    lines: dict[tuple[str, str], Record] = {}
    for each in found:
        own = {f"kernels of its own ({each.runs})": max(each.values.values())} if each.values else {}
        for call, far in (each.calls | own).items():
            made = lines.setdefault((each.runs, call), {"runs": each.runs, "call": call, "pieces": [], "off": 0.0})
            where = f"{each.piece}: {each.begins}"
            made["pieces"] += [where] if where not in made["pieces"] else []
            made["off"] = max(made["off"], far)
    return list(lines.values())


def holds(result: Record) -> bool:
    """No generated kernel is told, and where logits differ something is."""
    generated = any(each["runs"] == "generated" for each in result["calls"])
    return not generated and (result["logits"]["equal"] == result["logits"]["rows"] or bool(result["calls"]))


def line(result: Record) -> str:
    found, calls = result["logits"], result["calls"]
    equal = f"{found['equal']} of {found['rows']} rows have the same bits alone; off by {found['off']:.1e} at most"
    if any(each["runs"] == "generated" for each in calls):
        return f"{equal}; a generated kernel is among what breaks it"
    return f"{equal}; {len(calls)} calls break it, none of a generated kernel"


def overview(calls: Sequence[Record]) -> Table:
    made = table("runs", "call", "pieces", "first of them", "off", left=2)
    for each in calls:
        add(made, each["runs"], each["call"], len(each["pieces"]), each["pieces"][0], f"{each['off']:.1e}")
    return made
