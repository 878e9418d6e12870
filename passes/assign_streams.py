"""assign_streams: work with slack leaves the critical path for a side stream.

    before   stream 0   boundary ............... sublayer ... boundary'            boundary -> X', x, pre', post', comb'
    after    stream 0   critical -> sublayer ............ critical'                critical -> X', x
             stream 1        \\__ coefficients ____________/                        X' -> pre', post', comb'

Site: a cone of side_work.py: of a piece's work what is read late (the mHC coefficients, beside attention or experts;
projections, beside index scores) or ready early (Engram's look-up and projection, which hang on token ids alone).
Legal when all RULES hold. Exact because a cone keeps its nodes and its inputs; that the streams cannot race is proven
of the result by happens_before. Late cones take stream 1, early ones, which run for long, stream 2, so that none waits
for another kind.

Whether it pays hangs on the number of rows: a hidden kernel costs its bytes all the same. The plan that comes out is
used at the rungs where its sites gain together, each by what `measure` says, or by prediction where nothing measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.analysis.times import Times
from v41.passes.buffers import buffers_again
from v41.passes.side_work import Cone, find_cones, with_early
from v41.passes.split_piece import Part, split_piece
from v41.passes.synchronise import synchronise
from v41.plan import Piece, Plan
from v41.regions import Measure
from v41.report import Decision, source_of

STREAMS = {"late": 1, "early": 2}


@dataclass
class Site:
    """A cone, and its times by rows in µs. own: of the cone; slack: of what runs beside it; gain: by how much the
    caller's stream gets shorter."""

    cone: Cone
    sizes: dict[str, str]
    own: dict[int, float] = field(default_factory=dict)
    slack: dict[int, float] = field(default_factory=dict)
    gain: dict[int, float] = field(default_factory=dict)

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
        pieces, specs = split_piece(cone.piece, cone.body, parts if late else parts[::-1], self.sizes)
        rest, side = pieces if late else pieces[::-1]
        return replace(side, stream=stream), rest, specs

    @property
    def side(self) -> Piece:
        return self.split[0]

    @property
    def rest(self) -> Piece | None:
        return self.split[1]

    @property
    def pays_at(self) -> list[int]:
        """Numbers of rows."""
        return [rows for rows, gain in self.gain.items() if gain > 0 and self.own[rows] <= self.slack[rows]]


def is_not_capturable(site: Site) -> Node | None:
    return site.cone.anchor if site.cone.piece.uncapturable is not None else None


def outlasts_its_slack(site: Site) -> Node | None:
    return site.cone.anchor if all(own > site.slack[rows] for rows, own in site.own.items()) else None


def gains_nothing(site: Site) -> Node | None:
    return site.cone.anchor if not site.pays_at else None


RULES: tuple[tuple[str, Callable[[Site], Node | None]], ...] = (  # in order: each may rely on those above
    ("its piece can be captured", is_not_capturable),
    ("what runs beside it takes longer than it does", outlasts_its_slack),
    ("it spares more than fork and join cost", gains_nothing),
)


def assign_streams(plan: Plan, rungs: Sequence[int], measure: Measure | None = None) -> tuple[Plan, list[Decision]]:
    """`plan` with its legal cones on side streams, and a decision for each cone. No cone, and it is `plan` itself.

    rungs: numbers of rows that a captured step may have. The plan that comes out says at which of them it pays.
    """
    times = Times(plan.sizes)
    sites = [Site(cone, plan.sizes) for cone in find_cones(PlanFacts(plan))]
    kept: dict[int, Site] = {}  # position of the piece -> its site, the one that gains most
    decisions = []
    for site in sites:
        _time(site, plan, rungs, times, measure)
        broken = next(((rule, node) for rule, find in RULES if (node := find(site)) is not None), None)
        decisions.append(_decision(site, broken))
        if broken is None:
            at = site.cone.at
            kept[at] = max(site, kept.get(at, site), key=lambda each: sum(each.gain.values()))
    if not kept:
        return plan, decisions
    gains = {rows: sum(site.gain[rows] for site in kept.values()) for rows in rungs}
    made = replace(_with_sides(plan, kept), pays_at=tuple(rows for rows in rungs if gains[rows] > 0))
    return made, decisions


def _time(site: Site, plan: Plan, rungs: Sequence[int], times: Times, measure: Measure | None) -> None:
    """Fills in the times of `site`: measured where that is possible, the cone's with those of what it comes from."""
    cone = site.cone
    beside = plan.pieces[cone.ready + 1 : cone.reader]
    for rows in rungs:
        site.slack[rows] = sum(_us(piece, rows, times, measure) for piece in beside)
        measured = _measured([site.side, cone.piece, *([site.rest] if site.rest else [])], rows, measure)
        own, before, *after = measured or [times.work(cone.nodes).us(rows), times.piece(cone.piece).us(rows),
                                           times.work(cone.rest).us(rows)]  # fmt: skip
        site.own[rows], site.gain[rows] = own, before - sum(after) - times.machine.join_us


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
    told = {"slack": site.slack, "own": site.own, "gain": site.gain}
    if broken is None:
        return Decision(True, name, source, times=told)
    rule, node = broken
    return Decision(False, name, source, rule, node.name, culprit_source=source_of(node), times=told)


def _with_sides(plan: Plan, sites: dict[int, Site]) -> Plan:
    """`plan` with `sites`, by the position of their pieces, on their streams."""
    early: dict[int, list[Piece]] = {}
    kept: dict[int, list[Piece]] = {}
    for at, site in sites.items():
        kept[at] = [site.rest] if site.rest else []
        if site.cone.kind == "early":
            early.setdefault(site.cone.ready, []).append(site.side)
        else:
            kept[at].append(site.side)
    pieces = with_early(plan, kept, early)
    specs = {name: told for site in sites.values() for name, told in site.split[2].items()}
    made = replace(plan, pieces=tuple(pieces), values=plan.values | specs, events=())
    return synchronise(replace(made, buffers=buffers_again(made)))
