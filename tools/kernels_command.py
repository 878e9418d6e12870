"""`v41 kernels`: the kernels generated for a program, as they would be on a GPU, which need not be here.

    kernel                regions            pieces  lines  rows  launch   grid       warps
    mhc_boundary_2e5db2   mhc_boundary seam  77        412     1  1 of 1   1 x 40         4
    index_scores_967736   index_scores       1         409     1  1 of 2 scores_1  1 x 8  4
    ...
    no kernel  norm_quantise, piece_13: ...                     a region that was to have one, and why it has none

    kernel  function  rows  PTX KB  cubin KB  registers  spilled B  shared KB      with --arch: compiled for that GPU
    ...

--show NAME prints a kernel's text, which says in its first lines what it reads, writes and rounds. A spill is bytes a
thread stores and loads for want of registers. Launches are those of --rows, on --arch or else on sm_90: a step that
decodes so many requests at 4096 tokens, or, of more than 256 rows, reads a prompt as long. A text may hold several
functions, as an indexer's does: scores, then the rounds of its selections; or that of a sum over ranks, of which the
first rank's launches are told: scatter, gather, and what reads the sum. Exit code 1: one does not compile for --arch,
as kernels that decode fp8 do not for sm_80.

--time: µs of each alone on the GPU at hand, on drawn numbers; `-` where these will not do, since it reads places.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from v41.errors import BenchNeedsGPU, InvalidOptionValue, UnknownKernel
from v41.tools.json_output import print_json
from v41.tools.kernel_times import Timed, timed
from v41.tools.kernels import ROWS, Compiled, KernelFacts, compiled
from v41.tools.nearest import choices
from v41.tools.pass_runs import console_of
from v41.tools.progress import progress
from v41.tools.run import Run
from v41.tools.sources import run_named
from v41.tools.tables import add, say, table

HOPPER = "sm_90"  # of which launches are told where no --arch is asked for


def kernels_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    check_rows(arguments.rows)
    if arguments.time and not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 kernels --time", found="torch sees no CUDA device")
    run = run_named(arguments)
    if arguments.show is not None:
        named = kernels_named(run.kernels, arguments.show)
        if arguments.json:
            print_json("kernels", {"source": run.source, "kernels": [asdict(kernel) for kernel in named]})
        else:
            print(named[0].source, end="")
        return 0
    made = [kernel for kernel in run.kernels if kernel.refusal is None]
    found = for_arch(made, arguments.arch, arguments.rows) if arguments.arch is not None else None
    times = timed_here(run, made, arguments.rows) if arguments.time else None
    if arguments.json:
        print_json("kernels", values(run, found, times))
    else:
        show(console, run.kernels, found, arguments.rows, arguments.arch or HOPPER)
        if times is not None:
            console.print()
            console.print(times_table(times))
    refused = len(made) < len(run.kernels)
    fails = any(each.facts is None for each in found or ())
    spills = any(each.facts is not None and each.facts.spill_bytes for each in found or ())
    return int(fails or (arguments.strict and (refused or spills)))


def check_rows(rows: Sequence[int]) -> None:
    """InvalidOptionValue for steps of which no launches are told."""
    strange = [str(count) for count in rows if count not in ROWS]
    if strange:
        raise InvalidOptionValue("v41 kernels", option="--rows", value=",".join(strange), allowed="some of 1, 64, 4096")


def kernels_named(kernels: Sequence[KernelFacts], name: str) -> list[KernelFacts]:
    """Those of one text, which several artifacts may run, by its name or the beginning of one. UnknownKernel lists
    those that there are."""
    made = [kernel for kernel in kernels if kernel.refusal is None]
    found = [kernel for kernel in made if kernel.name == name] or [k for k in made if k.name.startswith(name)]
    if len({kernel.name for kernel in found}) != 1:
        known = choices(name, [kernel.name for kernel in found or made]) or "there is none in this program"
        raise UnknownKernel("v41 kernels --show", name=name, known=known)
    return found


def for_arch(kernels: Sequence[KernelFacts], arch: str, rows: Sequence[int]) -> list[Compiled]:
    with progress() as bars:
        return list(compiled(kernels, arch, rows, bars.begin("compile", len(kernels))))


def timed_here(run: Run, kernels: Sequence[KernelFacts], rows: Sequence[int]) -> list[Timed]:
    with progress() as bars:
        return timed(run.plan, kernels, rows, torch.device("cuda"), bars.begin("time", len(kernels)))


def times_table(times: Sequence[Timed]) -> Table:
    made = table("kernel", "rows", "us")
    for each in times:
        add(made, each.kernel, each.rows, each.us)
    return made


def show(
    console: Console, kernels: Sequence[KernelFacts], found: Sequence[Compiled] | None, rows: Sequence[int], arch: str
) -> None:
    if not kernels:
        console.print("no region of this program gets a kernel of its own")
        return
    console.print(launches_table(kernels, rows, arch))
    for line in refusals(kernels):
        say(console, line, "yellow")
    if found is None:
        say(console, f"launches  are those on {arch}; --arch sm_90 compiles for it: registers, spills, bytes")
        return
    console.print()
    console.print(compiled_table(found))
    for each in found:
        if each.error is not None:
            say(console, f"fails     {each.kernel} does not compile for {arch}: {each.error}", "red")


def launches_table(kernels: Sequence[KernelFacts], rows: Sequence[int], arch: str = HOPPER) -> Table:
    made = table("kernel", "regions", "pieces", "lines", "rows", "launch", "grid", "warps", left=2)
    made.columns[0].no_wrap = True  # a name that can be copied
    for kernel in kernels:
        launches = [launch for launch in kernel.launches if launch.rows in rows and launch.arch == arch]
        facts: tuple[Any, ...] = (kernel.name, ", ".join(kernel.regions), len(kernel.pieces), kernel.source.count("\n"))
        for launch in launches:
            same = [each for each in launches if each.rows == launch.rows]
            grid = " x ".join(map(str, launch.grid))
            number = f"{same.index(launch) + 1} of {len(same)}"
            number += f" {own}" if (own := own_name(launch.function, kernel.name)) else ""
            add(made, *facts, launch.rows, number, grid, launch.options.get("num_warps"))
            facts = ("", "", "", "")
    return made


def own_name(function: str, kernel: str) -> str | None:
    """What a function of a kernel's text is called, without the kernel's name in front; None of the kernel itself."""
    return None if function == kernel else function.removeprefix(f"{kernel}_")


def compiled_table(found: Sequence[Compiled]) -> Table:
    made = table("kernel", "function", "rows", "PTX KB", "cubin KB", "registers", "spilled B", "shared KB", left=2)
    made.columns[0].no_wrap = True
    for each in found:
        facts, function = each.facts, own_name(each.function, each.kernel)
        if facts is None:
            add(made, each.kernel, function, *[None] * 6)
            continue
        add(made, each.kernel, function, each.rows, len(facts.ptx) / 1000, facts.cubin_bytes / 1000, facts.registers,
            facts.spill_bytes or None, facts.shared_bytes / 1000)  # fmt: skip
    return made


def refusals(kernels: Sequence[KernelFacts]) -> Iterator[str]:
    for kernel in kernels:
        if kernel.refusal is not None:
            yield f"no kernel {', '.join(kernel.regions)} in {', '.join(kernel.pieces)}: {kernel.refusal}"


def values(run: Run, found: Sequence[Compiled] | None, times: Sequence[Timed] | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"source": run.source, "kernels": [asdict(kernel) for kernel in run.kernels]}
    if found is not None:
        facts["compiled"] = [asdict(each) for each in found]
    if times is not None:
        facts["times"] = [asdict(each) for each in times]
    return facts
