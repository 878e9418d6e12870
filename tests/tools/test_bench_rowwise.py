"""`v41 bench rowwise` without a GPU: which schedules are tried, what is drawn, what is made of the times."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import pytest
import torch

from v41.lowering.rowwise import Schedule
from v41.lowering.rowwise.held import launch as held_launch
from v41.lowering.rowwise.held.launch import Spread
from v41.tools.bench import tuning
from v41.tools.bench.rowwise_cases import CASES, cases, seams
from v41.tools.bench.tuning import candidates, drawn_pairs, in_turn, table, verdicts
from v41.tools.cli import parser

CPU = torch.device("cpu")
SMALL = cases(20) | seams(80)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of narrow rows, which are made quickly."""
    monkeypatch.setattr(tuning, "CASES", SMALL)
    monkeypatch.setattr(tuning, "kernel_of", small_kernel_of)


small_kernel_of = cache(tuning.kernel_of.__wrapped__)


def test_the_command_knows_every_case() -> None:
    asked = parser().parse_args(["bench", "rowwise", "pairs", "--seed", "3"])
    assert asked.cases == list(CASES) and (asked.mode, asked.seed) == ("pairs", 3)


@pytest.mark.slow
def test_a_seed_draws_ten_pairs_that_have_a_choice() -> None:
    pairs = drawn_pairs(3)
    assert pairs == drawn_pairs(3) != drawn_pairs(4) and len(pairs) == 10
    assert all(len(candidates(name, rows, CPU)) > 1 and 1 <= rows <= tuning.MOST_ROWS for name, rows in pairs)
    assert {name for seed in range(20) for name, _ in drawn_pairs(seed)} >= {"router", "boundary", "layer_norm"}


def test_the_reckoned_schedule_comes_first_and_once() -> None:
    for name, rows in (("router", 1), ("router", 4096), ("boundary", 16), ("norm", 5)):
        found = candidates(name, rows, CPU)
        assert [each.reckoned for each in found] == [True] + [False] * (len(found) - 1)
        assert found[0].schedule == small_kernel_of(name).schedule_for(rows, CPU)
    assert isinstance(candidates("boundary", 16, CPU)[1].schedule, Schedule)


def test_a_schedule_is_too_slow_above_one_and_a_half_times_the_fastest() -> None:
    def record(case: str, us: float | None, reckoned: bool) -> tuning.Record:
        return {"case": case, "rows": 4, "schedule": f"at {us}", "reckoned": reckoned} | ({"us": us} if us else {})

    records = [record("a", 3.0, True), record("a", 2.0, False), record("a", None, False), record("b", 3.1, True),
               record("b", 2.0, False), record("c", None, True), record("c", 2.0, False)]  # fmt: skip
    found = {each["case"]: (each["ratio"], each["within"], each["best"], each["tried"]) for each in verdicts(records)}
    assert found == {"a": (1.5, True, "at 2.0", 2), "b": (1.55, False, "at 2.0", 2), "c": (None, False, "at 2.0", 1)}
    assert [line.split()[:2] for line in table(records).splitlines()[1:]] == [["a", "4"], ["b", "4"], ["c", "4"]]


def test_launches_in_turn_are_ordinary_ones() -> None:
    inputs, kernel = SMALL["router"].inputs(3, "cpu"), small_kernel_of("router")
    with patch.object(held_launch, "comes_up_early", lambda device: True):
        call = kernel.prepare(inputs, Spread(1, 4, split=True))
    plain = in_turn(call)
    assert [constants["PDL"] for _, constants, _ in call.steps()] == [1, 1]
    assert [constants["PDL"] for _, constants, _ in plain.steps()] == [0, 0]
    assert "launch_pdl" in call.steps()[1][2] and "launch_pdl" not in plain.steps()[1][2]
    assert plain.steps()[1][2]["num_warps"] == call.steps()[1][2]["num_warps"]


def test_pairs_take_turns_and_share_what_is_compiled() -> None:
    def made(case: str, rows: int, *schedules: int) -> list[tuning.Candidate]:
        return [tuning.Candidate(case, rows, schedule, schedule == schedules[0]) for schedule in schedules]

    todo = [*made("a", 1, 1, 2, 3), *made("a", 9, 2, 1, 4), *made("b", 4, 1, 2)]
    found = [(each.case, each.rows, each.schedule) for each in tuning.in_turns(todo)]
    assert found == [("a", 1, 1), ("a", 9, 2), ("b", 4, 1), ("b", 4, 2), ("a", 1, 3), ("a", 9, 4)]
