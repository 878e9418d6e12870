"""Every seeded bug is noticed, and the right pass is not; every pass has some, and none is left unshown."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from tests.invariants import check_fired_share
from tests.passes.careless import CARELESS
from tests.passes.mutants import ELSEWHERE, MUTANTS
from v41.passes.partition import partition
from v41.passes.pipeline import PIPELINE, Pass, copy_of, run_pipeline
from v41.passes.plan_passes import PLAN_PASSES
from v41.passes.same_values import RULE as VALUES
from v41.passes.synchronise import synchronise

# Over graphs, and over plans; partition decides nothing of a site.
EVERY = (*(each.name for each in PIPELINE), *PLAN_PASSES, synchronise.__name__)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.shows()
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.wrong)
    with pytest.raises(Exception):  # noqa: B017  (a pass that raises is undone: any error is a notice)
        mutant.shows()


@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_pass_is_undone_and_the_rule_it_broke_is_told(name: str) -> None:
    careless, program, rule = CARELESS[name]
    gm = program()
    before = str(gm.graph)
    _, (idle,) = run_pipeline(copy_of(gm), [Pass(lambda gm: [])], check="numeric")
    assert idle.failure is None and (idle.warning is None or rule != VALUES)
    gm, (run,) = run_pipeline(gm, [Pass(careless)], check="numeric")
    assert run.failure is not None and rule in run.failure
    assert str(gm.graph) == before


def cases_of(function: Any) -> list[str]:
    """What a parametrized test runs over."""
    return [case for mark in function.pytestmark if mark.name == "parametrize" for case in mark.args[1]]


def test_every_pass_has_seeded_bugs_and_each_is_shown() -> None:
    count = Counter(mutant.of.__name__ for mutant in MUTANTS.values())
    for name, (module, bugs) in ELSEWHERE.items():
        tests = import_module(module)
        (shown,) = (
            value for key, value in vars(tests).items() if key.startswith("test_a_") and key.endswith("_is_noticed")
        )
        assert cases_of(shown) == list(getattr(tests, bugs))
        count[name] += len(getattr(tests, bugs))
    assert [name for name in (*EVERY, partition.__name__) if not count[name]] == []
    assert count.total() + len(CARELESS) >= 20


def test_every_pass_has_a_test_that_holds_how_often_it_fires_to_both_sides() -> None:
    """In the file of its name a test function calls check_fired_share, on what it drew."""
    without = []
    for name in EVERY:
        tests = import_module(f"tests.passes.test_{name}")
        named = (value for key, value in vars(tests).items() if key.startswith("test_") and callable(value))
        if not any(check_fired_share.__name__ in called_in(each) for each in named):
            without.append(name)
    assert without == []


def called_in(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return code.co_names if code is not None else ()
