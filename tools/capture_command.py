"""`v41 capture MODEL -o RUN`: what the compiler makes of a model, kept in a folder that all other commands read.

    captured preset flash: 469 pieces, 53 artifacts, 426 regions, 25 kernels in 97 s
    kept in  run  24.3 MiB, no weights
    look     v41 inspect run    v41 cost run --tokens 1,128,4096    v41 explain NODE -m run

A later capture into the same folder takes its place at once; one that is broken off leaves it as it was.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, told_by
from v41.tools.progress import progress
from v41.tools.run import Run
from v41.tools.run_folder import check_place, save
from v41.tools.sources import captured
from v41.tools.tables import counted, say


def capture_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    folder = Path(arguments.out)
    check_place(folder)  # now, and not after minutes
    run = captured(arguments, changes=True)
    with progress() as bars:
        bars.begin("generate kernels, write")
        save(run, folder)
    told = values(run, folder)
    if arguments.json:
        print_json("capture", told)
    else:
        for line in lines(told):
            say(console, line)
    return int(arguments.strict and told_by(run).troubled)


def values(run: Run, folder: Path) -> dict[str, Any]:
    return {
        "source": run.source,
        "folder": str(folder),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "pieces": len(run.plan.pieces),
        "artifacts": len(run.plan.keys),
        "regions": run.report.passes[-1].regions_after,
        "kernels": sum(kernel.refusal is None for kernel in run.kernels),
        "seconds": run.seconds["total"],
    }


def lines(told: dict[str, Any]) -> Iterator[str]:
    folder, names = told["folder"], ("piece", "artifact", "region", "kernel")
    counts = ", ".join(counted(told[f"{name}s"], name) for name in names)
    yield f"captured {told['source']}: {counts} in {told['seconds']:.0f} s"
    yield f"kept in  {folder}  {told['bytes'] / 2**20:.1f} MiB, no weights"
    yield f"look     v41 inspect {folder}    v41 cost {folder} --tokens 1,128,4096    v41 explain NODE -m {folder}"
