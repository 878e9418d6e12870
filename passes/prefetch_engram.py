"""prefetch_engram: what the host looks up by token ids alone is looked up before the layers, not between them.

    before   step -> layer 0 -> [ids to the host, rows of the table, back] -> layer 1 ...     the host waits for layer 0
    after    step -> [ids to the host, rows of the table, back] -> layer 0 -> layer 1 ...     and for nothing here

Tables of 188 GiB lie in the host's memory. Their look-up is a piece that no CUDA graph holds, and to hand it the rows
the host waits for all that was issued before; in its place in the model that is a layer, and the device idles until the
host has launched the next. Site: a piece that no graph can hold. Legal when all RULES hold. Exact because a piece that
only computes gives the same wherever its inputs are there, and nothing that is written is among them. The pieces that
it parted lie side by side now, so one graph may hold them.

Tables on the device are assign_streams' business: their look-up, and the projection behind it, is an early cone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Node

from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.buffers import buffers_again
from v41.passes.side_work import Cone, Finder, with_early
from v41.passes.synchronise import synchronise
from v41.plan import Piece, Plan
from v41.report import Decision, source_of


@dataclass(frozen=True)
class Site:
    """A piece of the host's at position `at`. cone: all of it, where all of it might begin earlier."""

    at: int
    piece: Piece
    cone: Cone | None

    @property
    def anchor(self) -> Node:
        """The last of its nodes, which names it."""
        nodes = list(self.piece.body.graph.nodes)
        return nodes[-2]


def has_an_effect(site: Site) -> Node | None:
    return next((node for node in site.piece.body.graph.nodes if effect_of(node)), None)


def waits_for_a_layer(site: Site) -> Node | None:
    return site.anchor if site.cone is None else None


RULES: tuple[tuple[str, Callable[[Site], Node | None]], ...] = (
    ("only computes", has_an_effect),
    ("hangs on values that are there before the device works in front of it, and are not written", waits_for_a_layer),
)


def prefetch_engram(plan: Plan) -> tuple[Plan, list[Decision]]:
    """`plan` with the host's pieces as early as their inputs allow, and a decision for each of them."""
    facts = PlanFacts(plan)
    finder = Finder(facts)
    moved: dict[int, list[Piece]] = {}  # behind this position
    decisions = []
    for at, piece in facts.bodies():
        if piece.uncapturable is None:
            continue
        site = Site(at, piece, next((cone for cone in finder.early(at, piece) if _spares(plan, cone)), None))
        broken = next(((rule, node) for rule, find in RULES if (node := find(site)) is not None), None)
        decisions.append(_decision(site, broken))
        if broken is None and site.cone is not None:
            moved.setdefault(site.cone.ready, []).append(piece)
    if not moved:
        return plan, decisions
    gone = {piece.name for pieces in moved.values() for piece in pieces}
    kept: dict[int, list[Piece]] = {at: [] for at, piece in enumerate(plan.pieces) if piece.name in gone}
    pieces = with_early(plan, kept, moved)
    made = replace(plan, pieces=tuple(pieces))
    return synchronise(replace(made, buffers=buffers_again(made))), decisions


def _spares(plan: Plan, cone: Cone) -> bool:
    """Whether all of a piece can begin before what the device does in front of it. In front of the host's own pieces
    it would only change places with them, at every run of this pass."""
    between = plan.pieces[cone.ready + 1 : cone.at]
    return not cone.rest and any(each.uncapturable is None and (each.returns or each.writes) for each in between)


def _decision(site: Site, broken: tuple[str, Node] | None) -> Decision:
    if broken is None:
        return Decision(True, site.piece.name, source_of(site.anchor))
    rule, node = broken
    return Decision(False, site.piece.name, source_of(site.anchor), rule, node.name, culprit_source=source_of(node))
