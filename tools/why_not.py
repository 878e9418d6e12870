"""`v41 why-not PASS [SITE]`: for each site that a pass refused, the rule that broke, the node at fault, and a hint.

    view_212 is refused by outline_mhc: "the carried pre comes from an earlier boundary"
      site       model_def/mhc.py:31  return (A * X).sum(1)
      broken by  one_hot  model_def/model.py:97  A = one_hot(0, S).expand(T, S)
      hint       collapse with the pre that the boundary before predicted

Sites that one rule refused at the same lines are told once, with their number and layers; --all tells each. Where a
pass judged no site at all, the place that comes nearest to one is named (likeness.py). With SITE, the name of a node in
that list or in the report, that site alone, and an applied one with its region. A site in a body that layers share is
BODY/NODE, one of the program itself NODE, or /NODE where bodies have one of that name, too (then they are listed).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from v41.errors import AmbiguousSite, UnknownSite
from v41.report import Decision, PassRun
from v41.tools.hints import hint
from v41.tools.json_output import print_json
from v41.tools.likeness import NearMiss, nearest_miss
from v41.tools.nearest import choices
from v41.tools.pass_runs import console_of, pass_named, told_of, troubled
from v41.tools.report_view import decision_values
from v41.tools.run import Run
from v41.tools.streams_view import cut_from
from v41.tools.tables import say

Layers = Mapping[tuple[str, str], Sequence[int | None]]  # body and node of a site -> the layers that it is in


def why_not_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    told = told_of(arguments, console)
    run = pass_named(told.runs, arguments.name)
    assert run is not None
    sites = judged(run, arguments.site)
    unseen = not run.decisions and run.failure is None and told.run is not None
    near = nearest_miss(run.name, told.run.nodes) if unseen and told.run is not None else None
    layers = layers_of(sites, told.run)
    if arguments.json:
        print_json("why-not", values(run, sites, near, layers))
    else:
        for line in (*lines(run, sites, layers, everything=arguments.all), *near_lines(near)):
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


def layers_of(sites: Sequence[Decision], run: Run | None) -> Layers:
    """Where the sites are, as far as a run tells: nodes, and pieces that were to be cut for a stream of their own."""
    found: dict[tuple[str, str], list[int | None]] = {(site.body, site.node): [] for site in sites}
    for view in run.layers if run is not None else ():
        for site in view.refused:
            if (site.body, site.node) in found:
                found[site.body, site.node].append(view.layer)
    for (_, node), layers in found.items():
        if run is not None and cut_from(node) in run.layer_of:
            layers.append(run.layer_of[cut_from(node)])
    return found


def lines(
    run: PassRun, sites: Sequence[Decision], layers: Layers | None = None, *, everything: bool = False
) -> Iterator[str]:
    """Alike ones once, unless `everything`."""
    if run.failure is not None:
        yield f"{run.name} is off: {run.failure}"
    elif not run.decisions:
        yield f"{run.name} judged no site{f': {run.warning}' if run.warning else ''}"
    elif not sites:
        count = len(run.decisions)
        yield f"{run.name} refused nothing: it applied {f'all of {count} sites' if count > 1 else 'its one site'}"
    for same in [[site] for site in sites] if everything else alike(sites):
        site, more = same[0], f" and {len(same) - 1} more are" if len(same) > 1 else " is"
        if site.applied:
            made = f", as a region {site.region.kind}" if site.region is not None else ""
            yield f"{site.name}{more} applied by {run.name}{made}"
            yield f"  site       {site.source}"
        else:
            yield f'{site.name}{more} refused by {run.name}: "{site.rule}"'
            yield f"  site       {site.source}"
        where = [layer for each in same for layer in (layers or {}).get((each.body, each.node), ())]
        if any(layer is not None for layer in where):
            told = dict.fromkeys("outside of layers" if layer is None else str(layer) for layer in where)
            yield f"  {'in layers' if len(told) > 1 else 'in layer':<9}  {', '.join(told)}"
        if not site.applied:
            yield f"  broken by  {site.culprit}  {site.culprit_source or 'unknown'}"
        yield from times_lines(same, all_rows=len(sites) == 1)
        if not site.applied:
            yield f"  hint       {hint(site)}"


def alike(sites: Sequence[Decision]) -> list[list[Decision]]:
    """Those together for which there is the same to say, but for names and times."""
    found: dict[object, list[Decision]] = {}
    for site in sites:
        kind = site.region.kind if site.region is not None else None
        found.setdefault((site.applied, kind, site.rule, site.source, site.culprit_source), []).append(site)
    return [*found.values()]


def times_lines(same: Sequence[Decision], *, all_rows: bool) -> Iterator[str]:
    """By what times sites were judged, at the fewest and at the most rows or at all that they were judged at; those of
    several from the least to the most."""
    known = [{name: each for name, each in (site.times or {}).items() if name != "gain"} for site in same]
    names = dict.fromkeys(name for times in known for name in times)  # but the gain, which is one of the others
    judged_at = sorted({rows for times in known for each in times.values() for rows in each})
    for rows in judged_at if all_rows else dict.fromkeys((*judged_at[:1], *judged_at[-1:])):
        at = {name: [times[name][rows] for times in known if rows in times.get(name, {})] for name in names}
        told = ", ".join(f"{name} {span(us)}" for name, us in at.items() if us)
        yield f"  {f'{rows} rows':<9}  {told} us"


def span(numbers: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{number:.1f}" for number in (min(numbers), max(numbers)))
    return " to ".join(ends)


def near_lines(near: NearMiss | None) -> Iterator[str]:
    if near is not None:
        yield f"nearest miss, by the order of operators alone: {near}"
        yield f"  from       {near.first.name}  {near.first.source}"
        yield f"  to         {near.last.name}  {near.last.source}"


def values(run: PassRun, sites: Sequence[Decision], near: NearMiss | None, layers: Layers) -> dict[str, Any]:
    """The same facts as values json can write, of each site by itself."""
    told = [
        decision_values(each)
        | {"hint": None if each.applied else hint(each), "layers": list(layers[each.body, each.node])}
        for each in sites
    ]
    nearest = near and {"found": near.found, "of": len(near.shape), "first": near.first.name, "last": near.last.name,
                        "source": near.first.source, "differences": list(near.differences)}  # fmt: skip
    return {"pass": run.name, "failure": run.failure, "warning": run.warning, "sites": told, "nearest": nearest}
