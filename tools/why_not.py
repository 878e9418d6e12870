"""`v41 why-not PASS [SITE]`: for each site that a pass refused, the rule that broke, the node at fault, and a hint.

    view_212 is refused by outline_mhc: "the carried pre comes from an earlier boundary"
      site       model_def/mhc.py:31  return (A * X).sum(1)
      broken by  one_hot  model_def/model.py:97  A = one_hot(0, S).expand(T, S)
      hint       collapse with the pre that the boundary before predicted

Where a pass judged no site at all, the place that comes nearest to one is named (likeness.py). With SITE, the name of a
node in that list or in the report, that site alone, and an applied one with its region. A site in a body that layers
share is BODY/NODE, one of the program itself NODE, or /NODE where bodies have one of that name, too (then they are
listed).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from v41.errors import AmbiguousSite, UnknownSite
from v41.report import Decision, PassRun
from v41.tools.hints import hint
from v41.tools.json_output import print_json
from v41.tools.likeness import NearMiss, nearest_miss
from v41.tools.nearest import choices
from v41.tools.pass_runs import console_of, pass_named, told_of, troubled
from v41.tools.report_view import decision_values
from v41.tools.tables import say


def why_not_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    told = told_of(arguments, console)
    run = pass_named(told.runs, arguments.name)
    assert run is not None
    sites = judged(run, arguments.site)
    unseen = not run.decisions and run.failure is None and told.run is not None
    near = nearest_miss(run.name, told.run.nodes) if unseen and told.run is not None else None
    if arguments.json:
        print_json("why-not", values(run, sites, near))
    else:
        for line in (*lines(run, sites), *near_lines(near)):
            say(console, line)
    return int(arguments.strict and troubled(run))


def judged(run: PassRun, site: str | None) -> list[Decision]:
    """The refused sites, or that of this name (a pass may have come by a node twice). UnknownSite where there is none,
    AmbiguousSite where several programs have one."""
    if site is None:
        return [decision for decision in run.decisions if not decision.applied]
    body, slash, node = site.rpartition("/")
    named = [decision for decision in run.decisions if decision.node == node]
    found = [decision for decision in named if not slash or decision.body == body]
    where, several = f"v41 why-not {run.name}", {decision.body: decision for decision in found}
    if not found:
        names = [*dict.fromkeys(decision.name for decision in named or run.decisions)]
        known = choices(site, names) if names else "no site was judged"
        raise UnknownSite(where, run=run.name, site=site, known=known)
    if len(several) > 1:
        told = candidates([*several.values()])
        raise AmbiguousSite(where, run=run.name, site=site, count=len(several), candidates=told)
    return found


def candidates(sites: Sequence[Decision]) -> str:
    """A line each: what it is called and no other is, and where it comes from."""
    names = [site.name if site.body else f"/{site.node}" for site in sites]
    width = max(map(len, names))
    return "\n".join(f"       {name:{width}}  {site.source}" for name, site in zip(names, sites, strict=True))


def lines(run: PassRun, sites: Sequence[Decision]) -> Iterator[str]:
    if run.failure is not None:
        yield f"{run.name} is off: {run.failure}"
    elif not run.decisions:
        yield f"{run.name} judged no site{f': {run.warning}' if run.warning else ''}"
    elif not sites:
        yield f"{run.name} refused nothing: it applied all of {len(run.decisions)} sites"
    for decision in sites:
        if decision.applied:
            made = f", as a region {decision.region.kind}" if decision.region is not None else ""
            yield f"{decision.name} is applied by {run.name}{made}"
            yield f"  site       {decision.source}"
            yield from times_lines(decision, all_rows=len(sites) == 1)
            continue
        yield f'{decision.name} is refused by {run.name}: "{decision.rule}"'
        yield f"  site       {decision.source}"
        yield f"  broken by  {decision.culprit}  {decision.culprit_source or 'unknown'}"
        yield from times_lines(decision, all_rows=len(sites) == 1)
        yield f"  hint       {hint(decision)}"


def times_lines(decision: Decision, *, all_rows: bool) -> Iterator[str]:
    """By what times a site was judged, at the fewest and at the most rows or at all that it was judged at."""
    known = decision.times or {}
    times = {name: known[name] for name in known if name != "gain"}  # which is one of the others
    judged_at = sorted({rows for each in times.values() for rows in each})
    for rows in judged_at if all_rows else dict.fromkeys((*judged_at[:1], *judged_at[-1:])):
        told = ", ".join(f"{name} {each[rows]:.1f}" for name, each in times.items() if rows in each)
        yield f"  {f'{rows} rows':<9}  {told} us"


def near_lines(near: NearMiss | None) -> Iterator[str]:
    if near is not None:
        yield f"nearest miss, by the order of operators alone: {near}"
        yield f"  from       {near.first.name}  {near.first.source}"
        yield f"  to         {near.last.name}  {near.last.source}"


def values(run: PassRun, sites: Sequence[Decision], near: NearMiss | None) -> dict[str, Any]:
    """The same facts as values json can write."""
    told = [decision_values(each) | {"hint": None if each.applied else hint(each)} for each in sites]
    nearest = near and {"found": near.found, "of": len(near.shape), "first": near.first.name, "last": near.last.name,
                        "source": near.first.source, "differences": list(near.differences)}  # fmt: skip
    return {"pass": run.name, "failure": run.failure, "warning": run.warning, "sites": told, "nearest": nearest}
