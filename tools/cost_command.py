"""`v41 cost --tokens 1,128,4096`: bytes, operations and launches of a step, by kind of region, and the least time they
take on a GPU.

    decode of 16 at 4096 tokens: rows = 16, requests = 16, longest = 1, ...; on H200
    part               launches     MB  GFLOP  flop/B  us, least     by  MB apart  apart
    mhc_boundary seam        77    177   1.42    8.02       36.9  bytes      2090  12012
    products                241  18400    588    31.9       3835  bytes     18400    241
    all                    1312    ...
    estimated from shapes, not measured: ...

Each operand is read once and each result written once. A region counts as one kernel, also where the backend generates
none for it (~: v41 kernels says why). Apart: bytes and launches of the same work with a kernel for each node, as in
eager.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from v41.formulas import evaluate
from v41.tools.gpus import GPU, gpu_named
from v41.tools.json_output import print_json
from v41.tools.nodes import OTHERS, PRODUCTS, WorkFacts
from v41.tools.pass_runs import console_of, told_by
from v41.tools.run import Run
from v41.tools.sources import run_named
from v41.tools.steps import Step, alike, heading, steps_of
from v41.tools.tables import add, say, table


@dataclass
class Total:
    """Of all work of one kind in one step. Bytes, operations, seconds."""

    part: str
    count: int = 0
    launches: int = 0
    read: int = 0
    written: int = 0
    flops: int = 0
    seconds: float = 0.0  # the least
    apart_bytes: int = 0
    apart_launches: int = 0
    kernels: int = 0  # of `count`: what runs a kernel generated for it

    @property
    def moved(self) -> int:
        return self.read + self.written

    def add(self, work: WorkFacts, symbols: dict[str, int], gpu: GPU) -> None:
        read, written = evaluate(work.read, symbols), evaluate(work.written, symbols)
        flops = evaluate(work.flops, symbols) if work.flops is not None else 0
        self.count += work.count
        self.kernels += work.count * work.kernel
        self.launches += work.count * work.launches
        self.read += work.count * read
        self.written += work.count * written
        self.flops += work.count * flops
        self.seconds += work.count * gpu.seconds(read + written, flops)
        self.apart_bytes += work.count * evaluate(work.apart, symbols)
        self.apart_launches += work.count * work.parts


def cost_command(arguments: Namespace) -> int:
    console, gpu = console_of(arguments), gpu_named(arguments.gpu)
    run = run_named(arguments)
    steps = steps_of(run.plan, run.config, arguments.tokens, arguments.context, dict(arguments.size))
    if arguments.json:
        print_json("cost", values(run, steps, gpu))
    else:
        show(console, run, steps, gpu)
    return int(arguments.strict and (told_by(run).troubled or bool(unknown(run.work))))


def totals(work: Sequence[WorkFacts], step: Step, gpu: GPU) -> list[Total]:
    """One a kind, the regions in order and the rest behind them; then all together."""
    kinds = dict.fromkeys(each.kind for each in work)
    order = [kind for kind in kinds if kind not in (PRODUCTS, OTHERS)]
    order += [kind for kind in (PRODUCTS, OTHERS) if kind in kinds]
    found, everything = {kind: Total(kind) for kind in order}, Total("all")
    for each in work:
        for into in (found[each.kind], everything):
            into.add(each, step.symbols, gpu)
    return [*found.values(), everything]


def unknown(work: Sequence[WorkFacts]) -> tuple[str, ...]:
    """Operators whose operations nobody counts."""
    return tuple(dict.fromkeys(name for each in work for name in each.unknown))


def show(console: Console, run: Run, steps: Sequence[Step], gpu: GPU) -> None:
    found = [(heading(same), totals(run.work, same[0], gpu)) for same in alike(steps)]  # all, before a line is printed
    for head, parts in found:
        say(console, f"{head}; on {gpu.name}", "bold")
        console.print(costs_table(parts, gpu))
        console.print()
    for line in remarks(run, gpu):
        say(console, line)


def costs_table(found: Sequence[Total], gpu: GPU) -> Table:
    made = table("part", "launches", "MB", "GFLOP", "flop/B", "us, least", "by", "MB apart", "apart")
    for total in found:
        name = total.part if fused(total) else f"{total.part} ~"
        rate = total.flops / total.moved if total.moved else None
        add(made, name, total.launches, total.moved / 1e6, total.flops / 1e9, rate, total.seconds * 1e6,
            gpu.bound(total.moved, total.flops), total.apart_bytes / 1e6, total.apart_launches)  # fmt: skip
    return made


def fused(total: Total) -> bool:
    """Whether a part is what it is counted as: regions each of which has a generated kernel, or no regions."""
    return total.part in (PRODUCTS, OTHERS, "all") or total.kernels == total.count


def remarks(run: Run, gpu: GPU) -> Iterator[str]:
    yield "estimated from shapes, not measured: each operand read once, each result written once, at full rate"
    yield "whole     what a region decodes before it picks from it counts whole, save weights of experts without rows"
    yield "~         counted as one kernel, which is not generated for all of them: Inductor fuses what it can"
    yield "apart     bytes and launches of the same work with a kernel for each node"
    yield f"{gpu.name:9} {gpu.bytes_per_s / 1e12:.3g} TB/s, {gpu.flops_per_s / 1e12:.0f} TFLOP/s bf16: {gpu.source}"
    if names := unknown(run.work):
        yield f"unknown   operations left out, for nobody counts them: {', '.join(names)}"


def values(run: Run, steps: Sequence[Step], gpu: GPU) -> dict[str, Any]:
    """The same facts as values json can write, in bytes, operations and seconds."""
    return {
        "source": run.source,
        "estimate": True,
        "gpu": asdict(gpu),
        "unknown": list(unknown(run.work)),
        "steps": [
            {
                "label": step.label,
                "sizes": step.sizes,
                "parts": [
                    asdict(total) | {"bound": gpu.bound(total.moved, total.flops)}
                    for total in totals(run.work, step, gpu)
                ],
            }
            for step in steps
        ],
    }
