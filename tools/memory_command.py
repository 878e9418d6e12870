"""`v41 memory --tokens 16`: what lives between the pieces of a step, at its fullest, and what graphs of a bucket need.

    decode of 16 at 4096 tokens: rows = 16, ...
    ▁▂▂▃▅▇█▇▅▃▂▁  at most 3.05 MiB, while piece_16 runs      a column a few pieces
    value    spec                born     dies     MiB        what lives there, the largest first

    step                    read only MiB  written MiB  inputs copied MiB  values at most MiB

    captured rows  values MiB  inputs copied MiB  pool MiB    --all: for each rung of rows

As far as the plan knows: values between pieces. What a piece holds while it runs, and how an allocator rounds and
splits, come on top. Weights and caches are as large as captured: `v41 capture` takes the smallest cache that does.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from v41.formulas import evaluate
from v41.model_def.buckets import Buckets
from v41.plan import Buffer, Plan
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, told_by
from v41.tools.run import Run
from v41.tools.sources import run_named
from v41.tools.steps import Step, alike, heading, step_of_rows, steps_of
from v41.tools.tables import add, say, short, table

MIB, WIDTH, LISTED = 2**20, 72, 8
BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"  # the second where the first cannot be printed


@dataclass(frozen=True)
class Memory:
    """Bytes of one step. `curve`: of values of pieces that are held while each piece runs, in order."""

    step: Step
    read_only: int  # of the caller: weights, tables
    written: int  # of the caller: caches
    copied: int  # inputs of a changing size, in static buffers of the runtime
    curve: tuple[int, ...]
    fullest: tuple[tuple[Buffer, int], ...]  # what lives at the peak, the largest first

    @property
    def peak(self) -> int:
        return max(self.curve, default=0)

    @property
    def at(self) -> int:
        """Position of the piece at which it is."""
        return self.curve.index(self.peak) if self.curve else 0


def memory_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    run = run_named(arguments)
    given = dict(arguments.size)
    steps = steps_of(run.plan, run.config, arguments.tokens, arguments.context, given)
    found = [memory_of(run.plan, step) for step in steps]
    pools = pools_of(run, arguments.context, given)
    if arguments.json:
        print_json("memory", values(run, found, pools))
    else:
        show(console, run, found, pools, everything=arguments.all)
    return int(arguments.strict and told_by(run).troubled)


def memory_of(plan: Plan, step: Step) -> Memory:
    own = [buffer for buffer in plan.buffers.values() if not buffer.views]
    sizes = {buffer.name: evaluate(buffer.bytes, step.symbols) for buffer in own}
    written = {name for piece in plan.pieces for name in piece.writes}
    totals = dict.fromkeys(("read only", "written", "copied"), 0)
    held: list[list[Buffer]] = [[] for _ in plan.pieces]
    for buffer in own:
        if buffer.owner == "runtime":
            totals["copied"] += sizes[buffer.name]
        elif buffer.owner == "caller":
            totals["written" if buffer.name in written else "read only"] += sizes[buffer.name]
        else:
            for at in range(max(buffer.born, 0), min(buffer.dies, len(held) - 1) + 1):
                held[at].append(buffer)
    curve = tuple(sum(sizes[buffer.name] for buffer in each) for each in held)
    full = held[curve.index(max(curve))] if curve else []
    full = sorted(full, key=lambda buffer: -sizes[buffer.name])
    return Memory(step, totals["read only"], totals["written"], totals["copied"], curve,
                  tuple((buffer, sizes[buffer.name]) for buffer in full))  # fmt: skip


def pools_of(run: Run, context: int | None, given: dict[str, int]) -> list[Memory]:
    """For each rung of rows up to which a step is captured whole."""
    most = run.plan.whole.get("rows", 0)
    rungs = [rung for rung in run.plan.buckets.get("rows", ()) if rung <= most] if run.config is not None else []
    steps = [step_of_rows(run.plan, run.config, rung, context, given, Buckets()) for rung in rungs]
    return [memory_of(run.plan, step) for step in steps]


def show(
    console: Console, run: Run, found: Sequence[Memory], pools: Sequence[Memory], *, everything: bool = False
) -> None:
    by_step, groups = {id(each.step): each for each in found}, alike([each.step for each in found])
    found = [by_step[id(same[0])] for same in groups]
    for memory, same in zip(found, groups, strict=True):
        say(console, heading(same), "bold")
        for line in curve_lines(run.plan, memory, bars_in(console.encoding)):
            say(console, line)
        console.print(fullest_table(run.plan, memory, None if everything else LISTED))
        console.print()
    console.print(totals_table(found))
    if pools:
        console.print()
        shown = pools if everything else fewer(pools)
        console.print(pools_table(shown, pools))
        if len(shown) < len(pools):
            say(console, f"and {len(pools) - len(shown)} more numbers of rows between these: --all")
    say(console, "between pieces alone: what a piece holds while it runs comes on top; caches are as captured")


def bars_in(encoding: str) -> str:
    """Eight letters, from low to high, that can be written so."""
    try:
        BARS.encode(encoding)
    except UnicodeEncodeError:
        return PLAIN
    return BARS


def curve_lines(plan: Plan, memory: Memory, bars: str = BARS) -> Iterator[str]:
    if memory.peak:
        name = plan.pieces[memory.at].name
        yield f"{sparkline(memory.curve, bars=bars)}  at most {short(memory.peak / MIB)} MiB, while {name} runs"


def sparkline(curve: Sequence[int], width: int = WIDTH, bars: str = BARS) -> str:
    """One bar for each piece, or, of more than `width`, for each run of them: the fullest of it."""
    run = -(-len(curve) // width) or 1
    columns, top = [max(curve[i : i + run]) for i in range(0, len(curve), run)], max(curve, default=0)
    return "".join(bars[(len(bars) - 1) * value // top if top else 0] for value in columns)


def fullest_table(plan: Plan, memory: Memory, most: int | None = LISTED) -> Table:
    made = table("value", "spec", "born", "dies", "MiB", left=4)
    most = len(memory.fullest) if most is None else most
    for buffer, size in memory.fullest[:most]:
        dies = plan.pieces[buffer.dies].name if buffer.dies < len(plan.pieces) else "returned"
        add(made, buffer.name, buffer.spec, buffer.owner, dies, size / MIB)
    rest = memory.fullest[most:]
    if rest:
        add(made, f"and {len(rest)} more", None, None, None, sum(size for _, size in rest) / MIB)
    return made


def totals_table(found: Sequence[Memory]) -> Table:
    made = table("step", "read only MiB", "written MiB", "inputs copied MiB", "values at most MiB")
    for each in found:
        add(made, each.step.label, each.read_only / MIB, each.written / MIB, each.copied / MIB, each.peak / MIB)
    return made


def fewer(pools: Sequence[Memory]) -> list[Memory]:
    """The smallest, those of four times as many rows each, and the largest."""
    kept: list[Memory] = []
    for each in pools:
        if not kept or each.step.sizes["rows"] >= 4 * kept[-1].step.sizes["rows"] or each is pools[-1]:
            kept.append(each)
    return kept


def pools_table(shown: Sequence[Memory], pools: Sequence[Memory]) -> Table:
    """Each graph finds the pool empty, so all up to a number of rows take what the largest of them does."""
    made = table("captured rows", "values MiB", "inputs copied MiB", "pool MiB")
    for each in shown:
        largest = max(one.peak for one in pools if one.step.sizes["rows"] <= each.step.sizes["rows"])
        add(made, each.step.sizes["rows"], each.peak / MIB, each.copied / MIB, largest / MIB)
    return made


def values(run: Run, found: Sequence[Memory], pools: Sequence[Memory]) -> dict[str, Any]:
    return {
        "source": run.source,
        "steps": [_values(each) | {"fullest": [asdict(buffer) | {"size": size} for buffer, size in each.fullest]}
                  for each in found],
        "pools": [_values(each) for each in pools],
    }  # fmt: skip


def _values(memory: Memory) -> dict[str, Any]:
    return {
        "label": memory.step.label,
        "sizes": memory.step.sizes,
        "read_only": memory.read_only,
        "written": memory.written,
        "copied": memory.copied,
        "peak": memory.peak,
        "at": memory.at,
        "curve": list(memory.curve),
    }
