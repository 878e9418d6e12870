"""`v41 diff PASS`: what a pass changed in the graph, and nothing else.

    outline_mhc   2546 -> 1876 nodes, 12 -> 26 regions
    > 67 nodes into mhc_boundary_0  from view_3 to add_41
    + invoke_subgraph_12 = region mhc_boundary_0(arg0, arg4) -> [add_41, mul_7]   model_def/mhc.py:31  ...
    ~ add_50 = aten.add.Tensor(view_9, 1)
           -> aten.add.Tensor(mul_7, 1)
    - view_9 = aten.view.default(mul_7, [u0, 16])                        and 11 more like it

`+` is new, `-` is gone, `~` reads something else, `>` moved into a body. Changes of one kind, to the same operators at
one line of the model, are shown once: layers share their lines. --all shows each.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from v41.errors import NoChangesKept, PassEditsPlan
from v41.passes.changes import operator_of
from v41.passes.plan_passes import PLAN_PASSES
from v41.report import Change, PassRun
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, pass_named, told_of, troubled
from v41.tools.tables import counted, say

SIGNS = {"added": "+", "removed": "-", "rewired": "~", "moved": ">"}
STYLES = {"added": "green", "removed": "red", "rewired": "yellow", "moved": "cyan"}


def diff_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    if arguments.name in PLAN_PASSES:
        raise PassEditsPlan("v41 diff", name=arguments.name)
    run = pass_named(told_of(arguments, console, changes=True).runs, arguments.name)
    assert run is not None
    if run.changes is None:
        raise NoChangesKept(str(arguments.model))
    if arguments.json:
        print_json("diff", {"pass": run.name, "changes": [asdict(change) for change in run.changes]})
    else:
        say(console, head(run), "bold")
        for kind, line in lines(run.changes, everything=arguments.all):
            say(console, line, STYLES[kind])
    return int(arguments.strict and troubled(run))


def head(run: PassRun) -> str:
    if run.failure is not None:
        return f"{run.name} is off: {run.failure}"
    nodes = f"{run.nodes_before} -> {counted(run.nodes_after, 'node')}"
    regions = f"{run.regions_before} -> {counted(run.regions_after, 'region')}"
    return f"{run.name}   {nodes}, {regions}{'' if run.changes else '; nothing changed'}"


def lines(changes: Sequence[Change], *, everything: bool) -> Iterator[tuple[str, str]]:
    """(kind, line); what one body takes in is one line, and alike ones are told once, unless `everything`."""
    if everything:
        yield from ((change.kind, line) for change in changes for line in spelled(change))
        return
    alike: dict[object, list[list[Change]]] = {}
    for unit in units(changes):
        alike.setdefault(tuple(map(likeness, unit)), []).append(unit)
    for same in alike.values():
        (first, *rest), more = same[0], f"   and {len(same) - 1} more like it" if len(same) > 1 else ""
        if rest:
            yield first.kind, f"> {1 + len(rest)} nodes into {first.body}  from {first.node} to {rest[-1].node}{more}"
        else:
            yield from ((first.kind, line) for line in spelled(first, more))


def units(changes: Sequence[Change]) -> list[list[Change]]:
    """What moved into one body together, and every other change by itself."""
    found: dict[object, list[Change]] = {}
    for index, change in enumerate(changes):
        found.setdefault(change.body if change.kind == "moved" else index, []).append(change)
    return list(found.values())


def spelled(change: Change, more: str = "") -> Iterator[str]:
    """One change, as one line, or as two where it reads something else."""
    where = f" in {change.body}" if change.body and change.kind != "moved" else ""
    into = f" into {change.body}" if change.kind == "moved" else ""
    start, tail = f"{SIGNS[change.kind]} {change.node}", f"{into}{where}  {change.source}{more}"
    if change.kind == "rewired":
        yield f"{start} = {change.before}"
        yield f"{'->':>{len(start) + 2}} {change.after}{tail}"
    else:
        yield f"{start} = {change.before if change.after is None else change.after}{tail}"


def likeness(change: Change) -> tuple[str, ...]:
    """Equal for changes of one kind, of the same operators, at one line of the model."""
    called = [stem(operator_of(text)) for text in (change.before, change.after) if text is not None]
    return (change.kind, change.source, stem(change.body), *called)


def stem(name: str) -> str:
    """A body's name without its number."""
    return re.sub(r"_\d+$", "", name)
