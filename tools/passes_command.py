"""`v41 passes`: per pass its sites, what it applied and refused, and what it made of nodes, regions, launches and time.

    pass           sites  applied  refused         nodes    regions  launches a step    ms
    fold_sinkhorn     12       12        0  2162 -> 2546   0 -> 12     1493 -> 1493    235
    refused  outline_mhc, 1 site: "the carried pre comes from an earlier boundary"; first at view_212, ...
    expected mhc_boundary seam: 10 found, 11 by the config

A launch is a node that computes, or a region that gets a kernel of its own; on a device other fusion makes them fewer.
The last line, between passes, is what counting, checking and keeping changes took.
"""

from __future__ import annotations

from argparse import Namespace

from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of, told_of
from v41.tools.report_view import between, pass_values, passes_table, remarks
from v41.tools.tables import say


def passes_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    told = told_of(arguments, console)
    if arguments.json:
        facts = {"passes": [pass_values(run) for run in told.runs], "expected": told.differences}
        rest = None if told.seconds is None else between(told.runs, told.seconds)
        print_json("passes", facts | {"milliseconds_between": rest})
    else:
        console.print(passes_table(told.runs, sizes=True, seconds=told.seconds))
        for line in (*remarks(told.runs), *(f"expected {line}" for line in told.differences)):
            say(console, line)
    return int(arguments.strict and told.troubled)
