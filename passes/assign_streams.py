"""assign_streams: work with slack leaves the critical path for a side stream.

    before   stream 0   boundary ............... sublayer ... boundary'            boundary -> X', x, pre', post', comb'
    after    stream 0   critical -> sublayer ............ critical'                critical -> X', x
             stream 1        \\__ coefficients ____________/                        X' -> pre', post', comb'

Site: a cone of side_work.py: of a piece's work what is read late (the mHC coefficients, beside attention or experts;
projections, beside index scores) or ready early (Engram's look-up and projection, which hang on token ids alone).
Legal when all RULES hold. Exact because a cone keeps its nodes and its inputs; that the streams cannot race is proven
of the result by happens_before. Late cones take stream 1, early ones, which run for long, stream 2, so that none waits
for another kind.

Whether it pays hangs on the number of rows: a hidden kernel costs its bytes all the same. So it is judged site by site
and rung by rung: by what whole steps `gained` with it, else by what `measure` says of its pieces alone, else by
prediction. The latter two know nothing of neighbours, so where rows alone would fill half of the multiprocessors with a
program each, the cone is taken to hold up what is beside it by all its time. At a rung a plan has the sites that gain
there, and no other. Rungs with the same sites share a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import GraphModule, Node

from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.analysis.times import Machine, Times
from v41.passes.buffers import buffers_again
from v41.passes.side_work import Cone, find_cones, with_early
from v41.passes.split_piece import Part, split_piece
from v41.passes.synchronise import synchronise
from v41.plan import Piece, Plan
from v41.regions import Gained, Measure, region_of, regions
from v41.report import Decision, source_of

STREAMS = {"late": 1, "early": 2}


@dataclass(eq=False)
class Site:
    """A cone of `plan`, and its times by rows in µs. own: of the cone; slack: of what runs beside it. The others say by
    how much the caller's stream gets shorter: predicted; alone: by what its pieces take alone, measured where they can;
    in_steps: as whole steps were measured."""

    cone: Cone
    plan: Plan = field(repr=False)
    own: dict[int, float] = field(default_factory=dict)
    slack: dict[int, float] = field(default_factory=dict)
    predicted: dict[int, float] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    in_steps: dict[int, float] = field(default_factory=dict)

    @cached_property
    def split(self) -> tuple[Piece, Piece | None, dict[str, str]]:
        """The cone's piece on its stream, the rest's if there is one, and the specs of what passes between them."""
        cone = self.cone
        late, stream = cone.kind == "late", STREAMS[cone.kind]
        if not cone.rest:
            return replace(cone.piece, stream=stream), None, {}
        beside = f"read late: side work of {cone.piece.name}" if late else f"ready early: for {cone.piece.name}"
        parts = [
            Part(cone.piece.name, cone.piece.border, cone.rest),
            Part(f"{cone.piece.name}_side", beside, cone.nodes),
        ]
        pieces, specs = split_piece(cone.piece, cone.body, parts if late else parts[::-1], self.plan.sizes)
        rest, side = pieces if late else pieces[::-1]
        return replace(side, stream=stream), rest, specs

    @property
    def side(self) -> Piece:
        return self.split[0]

    @property
    def rest(self) -> Piece | None:
        return self.split[1]

    @property
    def beside(self) -> Sequence[Piece]:
        """What runs while it may."""
        return self.plan.pieces[self.cone.ready + 1 : self.cone.reader]

    @property
    def parts(self) -> Sequence[Piece]:
        """Whose times say what it spares: the cone's piece, the whole, and what is left of that."""
        return [self.side, self.cone.piece, *([self.rest] if self.rest else [])]

    @cached_property
    def key(self) -> str:
        """The same in every process for equal work of equal pieces, beside pieces of as many nodes with such regions.
        How large a cache is beside it does not matter."""
        cone = self.cone
        place = {node: at for at, node in enumerate(cone.body.graph.nodes)}
        moved = [place[node] for node in cone.nodes]
        beside = [(piece.nodes, [region_of(call).name for call in regions(piece.body)]) for piece in self.beside]
        told = f"{cone.kind} {cone.piece.key} {moved} {beside}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def measured(self) -> dict[int, float]:
        return self.alone | self.in_steps

    @property
    def gain(self) -> dict[int, float]:
        """By rows, what it is judged by: a measurement is better."""
        return self.predicted | self.measured

    def pays_at(self, rows: int) -> bool:
        return self.gain[rows] > 0 and self.own[rows] <= self.slack[rows]

    def disappoints_at(self, rows: int) -> bool:
        """Whether a measurement says that it loses where less was known that says it gains."""
        return max(self.predicted[rows], self.alone.get(rows, 0.0)) > 0 >= self.gain[rows]


def is_not_capturable(site: Site) -> Node | None:
    return site.cone.anchor if site.cone.piece.uncapturable is not None else None


def outlasts_its_slack(site: Site) -> Node | None:
    return site.cone.anchor if all(own > site.slack[rows] for rows, own in site.own.items()) else None


def is_measured_to_lose(site: Site) -> Node | None:
    lost = any(map(site.disappoints_at, site.gain)) and not any(map(site.pays_at, site.gain))
    return site.cone.anchor if lost else None


def gains_nothing(site: Site) -> Node | None:
    return site.cone.anchor if not any(map(site.pays_at, site.gain)) else None


RULES: tuple[tuple[str, Callable[[Site], Node | None]], ...] = (  # in order: each may rely on those above
    ("its piece can be captured", is_not_capturable),
    ("what runs beside it takes longer than it does", outlasts_its_slack),
    ("it gains where it was measured on this GPU", is_measured_to_lose),
    ("it spares more than fork and join cost", gains_nothing),
)


def assign_streams(
    plan: Plan,
    rungs: Sequence[int],
    measure: Measure | None = None,
    gained: Gained | None = None,
    machine: Machine | None = None,
    expect: Callable[[Sequence[GraphModule]], None] = lambda bodies: None,
) -> tuple[Plan, list[Decision]]:
    """`plan` with its legal cones on side streams, and a decision for each cone. No cone, and it is `plan` itself.

    rungs: numbers of rows that a captured step may have. machine: the GPU to predict for. expect: hears first of which
    bodies `measure` will be asked, so that they can be made ready together. The plan that comes out says at which of
    the rungs it pays; one for rungs where other cones pay is its `overlapped`, and so on.
    """
    times = Times(plan.sizes, machine)
    legal, decisions, sites = list[Site](), list[Decision](), sites_of(plan)
    if measure is not None:
        expect([piece.body for site in sites for piece in [*site.parts, *site.beside]])
    for site in sites:
        _time(site, rungs, times, measure, gained)
        broken = next(((rule, node) for rule, find in RULES if (node := find(site)) is not None), None)
        decisions.append(_decision(site, broken))
        legal += [site] if broken is None else []
    rungs_of: dict[tuple[Site, ...], list[int]] = {}
    for rows in rungs:
        if chosen := _chosen(legal, rows):
            rungs_of.setdefault(chosen, []).append(rows)
    made: Plan | None = None
    for chosen, pays in reversed(rungs_of.items()):
        made = replace(with_sides(plan, chosen), pays_at=tuple(pays), overlapped=made)
    return made or plan, decisions


def sites_of(plan: Plan) -> list[Site]:
    """All cones of `plan`, not judged."""
    return [Site(cone, plan) for cone in find_cones(PlanFacts(plan))]


def _chosen(sites: Sequence[Site], rows: int) -> tuple[Site, ...]:
    """Of each piece the site that gains most with so many rows, where one does."""
    kept: dict[int, Site] = {}
    for site in sites:
        if site.pays_at(rows):
            at = site.cone.at
            kept[at] = max(kept.get(at, site), site, key=lambda each: each.gain[rows])
    return tuple(kept.values())


def _time(site: Site, rungs: Sequence[int], times: Times, measure: Measure | None, gained: Gained | None) -> None:
    """Fills in the times of `site`: measured where that is possible, the cone's with those of what it comes from."""
    cone = site.cone
    of_cone, of_piece, of_rest = times.work(cone.nodes), times.piece(cone.piece), times.work(cone.rest)
    for rows in rungs:
        site.slack[rows] = sum(_us(piece, rows, times, measure) for piece in site.beside)
        site.own[rows] = of_cone.us(rows)
        crowded = 2 * rows > times.machine.multiprocessors
        spared = of_piece.us(rows) - of_rest.us(rows) - times.machine.join_us
        site.predicted[rows] = spared - crowded * site.own[rows]
        if measured := _measured(site.parts, rows, measure):
            site.own[rows], before, *after = measured
            site.alone[rows] = before - sum(after) - times.machine.join_us - crowded * site.own[rows]
        if gained is not None and (us := gained(site.key, rows)) is not None:
            site.in_steps[rows] = us


def _measured(pieces: Sequence[Piece], rows: int, measure: Measure | None) -> list[float]:
    """Times of all of `pieces`; none where one cannot be measured."""
    found = [measure(piece.body, rows) if measure is not None else None for piece in pieces]
    times = [us for us in found if us is not None]
    return times if len(times) == len(found) else []


def _us(piece: Piece, rows: int, times: Times, measure: Measure | None) -> float:
    measured = measure(piece.body, rows) if measure is not None and piece.uncapturable is None else None
    return times.piece(piece).us(rows) if measured is None else measured


def _decision(site: Site, broken: tuple[str, Node] | None) -> Decision:
    name, source = (
        f"{site.cone.piece.name}_side" if site.cone.rest else site.cone.piece.name,
        source_of(site.cone.anchor),
    )
    gains = {"gain": site.gain, "predicted gain": site.predicted, "measured gain": site.measured}
    told = {"slack": site.slack, "own": site.own, **gains}
    if broken is None:
        return Decision(True, name, source, times=told)
    rule, node = broken
    return Decision(False, name, source, rule, node.name, culprit_source=source_of(node), times=told)


def with_sides(plan: Plan, sites: Sequence[Site]) -> Plan:
    """`plan` with `sites`, of each piece one at most, on their streams."""
    early: dict[int, list[Piece]] = {}
    kept: dict[int, list[Piece]] = {}
    for site in sites:
        at = site.cone.at
        kept[at] = [site.rest] if site.rest else []
        if site.cone.kind == "early":
            early.setdefault(site.cone.ready, []).append(site.side)
        else:
            kept[at].append(site.side)
    pieces = with_early(plan, kept, early)
    specs = {name: told for site in sites for name, told in site.split[2].items()}
    made = replace(plan, pieces=tuple(pieces), values=plan.values | specs, events=())
    return synchronise(replace(made, buffers=buffers_again(made)))
