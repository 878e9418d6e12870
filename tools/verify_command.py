"""`v41 verify MODEL`: after each pass, is the program as sound as before, and does it compute the same bits?

    pass           rules   values  applied  nodes
    fold_sinkhorn  hold    equal        12   2687
    outline_mhc    BROKEN  BROKEN        0   2687
    outline_mhc: InvariantBroken: ... it computes the same values; div_7: value 3 ... differs with 2 rows
    outline_mhc: at   model_def/mhc.py:66  m = m / (m.sum(-1, keepdim=True) + eps)
    18 passes: 17 hold all rules, of 17 the values were compared and are equal

Rules are those of passes/verify.py. Values: the program before and after the pass, on the same random inputs, also in
fp64; the node named is the first whose value is another (passes/same_values.py). A pass that breaks something is
undone, so those behind it are judged on what it was given. It runs the graphs, which no saved run holds: it takes a
model, and of a run it says which.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from v41.options import NUMERIC
from v41.report import PassRun
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of
from v41.tools.sources import CODEGEN, inspected, is_run, model_of, needs_model
from v41.tools.tables import add, say, table


def verify_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    if is_run(arguments.model):
        told = "verify runs it before and after each pass, on random inputs"
        raise needs_model(arguments.model, told, "v41 verify {}")
    model = model_of(arguments)
    runs = inspected(model, arguments.codegen or CODEGEN, verify=NUMERIC).report.passes
    if arguments.json:
        print_json("verify", {"source": model.name, "holds": holds(runs), "passes": [values(run) for run in runs]})
    else:
        show(console, runs)
    return int(not holds(runs) or (arguments.strict and any(verdict(run) is None for run in runs)))


def holds(runs: Sequence[PassRun]) -> bool:
    return all(run.failure is None for run in runs)


def show(console: Console, runs: Sequence[PassRun]) -> None:
    console.print(verdicts_table(runs))
    for run in runs:
        for line in (run.failure or run.warning or "").splitlines():
            say(console, f"{run.name}: {line.strip()}", "red" if run.failure else "yellow")
    good = sum(run.failure is None for run in runs)
    compared = sum(verdict(run) == "equal" for run in runs)
    console.print(f"{len(runs)} passes: {good} hold all rules, of {compared} the values were compared and are equal")


def verdicts_table(runs: Sequence[PassRun]) -> Table:
    made = table("pass", "rules", "values", "applied", "nodes", left=3)
    for run in runs:
        rules = "hold" if run.failure is None else "BROKEN"
        add(made, run.name, rules, verdict(run), run.applied, run.nodes_after)
    return made


def verdict(run: PassRun) -> str | None:
    """Whether values are equal; None where nothing was compared."""
    if run.failure is not None:
        return "BROKEN" if "computes the same values" in run.failure else None
    return None if run.warning is not None and "values not compared" in run.warning else "equal"


def values(run: PassRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "rules": run.failure is None,
        "values": verdict(run),
        "failure": run.failure,
        "warning": run.warning,
        "applied": run.applied,
        "nodes": run.nodes_after,
    }
