"""assign_streams by measurement: what steps gained with a site decides, site by site and rung by rung, and is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.test_assign_streams import EARLY, LATE, RUNGS, TWICE, check_streams, compiled, streams_of
from tests.strategies import side_work
from tests.strategies.side_work import by_nodes, planned, program
from v41.passes.assign_streams import Site, assign_streams, sites_of
from v41.passes.structure import structure_key

LOST = "it gains where it was measured on this GPU"


def alike(body: GraphModule, rows: int) -> float:
    """A Measure for which nothing is spared by what is hidden."""
    return 5.0


def test_what_whole_steps_gained_counts_before_all_else() -> None:
    """By its pieces alone the first site pays at both; in steps of 4 rows it lost, so there it is off."""
    gm, plan = compiled(*TWICE)
    first, *others = sites_of(plan)
    asked: list[tuple[str, int]] = []

    def gained(site: str, rows: int) -> float | None:
        asked.append((site, rows))
        return {1: 0.5, 4: -2.0}[rows] if site == first.key else None

    made, decisions = assign_streams(plan, RUNGS, by_nodes, gained)
    assert set(asked) == {(site.key, rows) for site in (first, *others) for rows in RUNGS}
    whole, fewer = made, made.overlapped
    assert fewer is not None and (whole.pays_at, fewer.pays_at) == ((1,), (4,))
    assert {*streams_of(whole)} - {*streams_of(fewer)} == {"piece_0_side@1"} and streams_of(fewer)
    told = decisions[0].times
    assert told is not None and told["measured gain"] == told["gain"] == {1: 0.5, 4: -2.0}
    assert decisions[0].applied and told["predicted gain"].keys() == told["own"].keys() == told["slack"].keys() == {
        1,
        4,
    }
    check_streams(gm, plan, made)


def test_what_whole_steps_gained_may_turn_a_site_on() -> None:
    """By prediction it costs more than it spares; at the rung where steps got shorter it is on all the same."""
    gm, plan = compiled(*LATE)
    (site,) = sites_of(plan)
    made, (decision,) = assign_streams(plan, RUNGS, alike, lambda key, rows: 0.5 if rows == 4 else None)
    assert made.pays_at == (4,) and decision.applied and decision.times is not None
    assert decision.times["gain"][1] < 0 < decision.times["gain"][4] and site.key
    check_streams(gm, plan, made)


def test_a_sites_key_tells_its_work_and_what_runs_beside_it() -> None:
    """Of equal programs the keys are equal; with more beside it, or another cone, a site has another."""
    keys = {name: [site.key for site in sites_of(planned(program(steps)))] for name, steps in {
        "as it is": LATE,
        "again": LATE,
        "more beside it": [*LATE[:3], "seam", *LATE[3:]],
        "more behind it": [*LATE, "seam"],
        "early": EARLY,
    }.items()}  # fmt: skip
    assert all(len(each) == 1 for each in keys.values())
    assert keys["as it is"] == keys["again"] == keys["more behind it"]
    assert len({keys[name][0] for name in ("as it is", "more beside it", "early")}) == 3


def test_a_site_of_which_a_part_cannot_run_alone_is_judged_by_prediction() -> None:
    """The cone's piece has no time of its own, all else has."""
    _, plan = compiled(*LATE)
    (site,) = sites_of(plan)
    cone = structure_key(site.side.body)
    partly = lambda body, rows: None if structure_key(body) == cone else by_nodes(body, rows)
    (decision,) = assign_streams(plan, RUNGS, partly)[1]
    assert decision.times is not None and decision.times["measured gain"] == {}
    assert decision.times["gain"] == decision.times["predicted gain"]


def test_what_cannot_be_captured_is_never_measured() -> None:
    """Measuring replays a graph. The host's look-up beside a site is predicted."""
    _, plan = compiled(*LATE)
    host, asked = plan.pieces[1], list[GraphModule]()
    pieces = [replace(piece, uncapturable="it asks the host") if piece is host else piece for piece in plan.pieces]

    def measure(body: GraphModule, rows: int) -> float:
        asked.append(body)
        return by_nodes(body, rows)

    (decision,) = assign_streams(replace(plan, pieces=tuple(pieces)), RUNGS, measure)[1]
    assert decision.times is not None and plan.pieces[2].body in asked and host.body not in asked


def test_two_cones_of_one_piece_have_keys_of_their_own() -> None:
    (site,) = sites_of(planned(program(LATE)))
    fewer = Site(replace(site.cone, nodes=site.cone.nodes[:-1]), site.plan)
    early = Site(replace(site.cone, kind="early"), site.plan)
    assert len({site.key, fewer.key, early.key}) == 3


def test_at_rungs_where_it_outlasts_its_slack_a_site_is_off_whatever_it_gained() -> None:
    _, plan = compiled(*LATE)

    def slow(body: GraphModule, rows: int) -> float:
        works = any("mm" in str(node.target) for node in body.graph.nodes)
        return 1000.0 if rows == 4 and works else by_nodes(body, rows)

    made, (decision,) = assign_streams(plan, RUNGS, slow, lambda site, rows: 5.0)
    assert made.pays_at == (1,) and decision.applied and decision.times is not None
    assert decision.times["gain"] == {1: 5.0, 4: 5.0} and decision.times["own"][4] > decision.times["slack"][4]


def test_a_sites_key_is_the_same_beside_a_larger_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured serves a server that holds more requests."""
    steps = ["keep", "seam", "write", "seam", "gather", "seam", "use", "seam"]
    (small,) = [site for site in sites_of(planned(program(steps))) if site.cone.kind == "late"]
    monkeypatch.setattr(side_work, "CACHE", torch.zeros(50, 4))
    (large,) = [site for site in sites_of(planned(program(steps))) if site.cone.kind == "late"]
    assert small.key == large.key and [each.key for each in small.beside] != [each.key for each in large.beside]


def test_a_site_that_lost_in_steps_of_all_sizes_is_refused_for_that_reason() -> None:
    _, plan = compiled(*LATE)
    made, (decision,) = assign_streams(plan, RUNGS, by_nodes, lambda site, rows: -0.1)
    assert made is plan and (decision.applied, decision.rule) == (False, LOST)
    assert decision.times is not None and decision.times["measured gain"] == {1: -0.1, 4: -0.1}
    assert assign_streams(plan, RUNGS, by_nodes, lambda site, rows: 0.0)[1][0].rule == LOST


def test_a_site_whose_pieces_lose_alone_is_refused_for_that_reason_where_prediction_hoped() -> None:
    """Two products are predicted to be worth it; the split piece is measured to take no less."""
    _, plan = compiled("keep", "keep", "seam", "seam", "seam", "seam", "use", "use", "seam")
    (hoped,) = assign_streams(plan, RUNGS)[1]
    assert hoped.applied and hoped.times is not None and all(us > 0 for us in hoped.times["predicted gain"].values())
    (decision,) = assign_streams(plan, RUNGS, alike)[1]
    assert (decision.applied, decision.rule) == (False, LOST)


def test_a_site_that_lost_at_some_rungs_and_cannot_gain_at_others_is_refused_as_measured() -> None:
    _, plan = compiled(*LATE)
    lost = lambda site, rows: -1.0 if rows == 4 else None
    (decision,) = assign_streams(plan, RUNGS, lambda body, rows: by_nodes(body, rows) if rows == 4 else 5.0, lost)[1]
    assert decision.rule == LOST


def thin(body: GraphModule, rows: int) -> float:
    """A Measure for which half a µs is spared."""
    works = any("mm" in str(node.target) for node in body.graph.nodes)
    goes_on = any("mul" in str(node.target) for node in body.graph.nodes)
    return {(True, True): 9.5, (True, False): 5.0, (False, True): 6.0}.get((works, goes_on), 9.0)


def test_half_a_microsecond_is_something_to_lose() -> None:
    _, plan = compiled(*LATE)
    (gains,) = assign_streams(plan, RUNGS, thin)[1]
    assert gains.applied and gains.times is not None and gains.times["gain"] == {1: 0.5, 4: 0.5}
    assert assign_streams(plan, RUNGS, thin, lambda site, rows: -1.0)[1][0].rule == LOST


def test_what_nothing_ever_said_to_gain_is_not_refused_as_measured() -> None:
    """Neither where steps were longer with it, nor where it gains at rungs alone at which nothing hides it."""
    _, plan = compiled(*LATE[:3], "seam", *LATE[3:])
    worthless = "it spares more than fork and join cost"

    def hidden_at_1(body: GraphModule, rows: int) -> float:
        if rows == 1:
            return 5.0
        return 1000.0 + by_nodes(body, rows) if any("mm" in str(node.target) for node in body.graph.nodes) else 9.0

    for measure in (None, alike):
        (decision,) = assign_streams(plan, RUNGS, measure, lambda site, rows: -1.0)[1]
        assert decision.rule == worthless, measure
    (decision,) = assign_streams(plan, RUNGS, hidden_at_1)[1]
    assert decision.rule == worthless and decision.times is not None
    assert decision.times["gain"][1] < 0 < decision.times["gain"][4]
