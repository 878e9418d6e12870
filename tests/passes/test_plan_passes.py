"""The driver of passes over plans: one that fails is undone and named, as one over a graph is, and a build goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import v41
from tests.strategies.plans import plan
from v41 import backend, overlap
from v41.errors import PassFailed, PlanBroken, V41Error
from v41.passes.pipeline import SWITCHED_OFF
from v41.passes.plan_passes import PLAN_PASSES, run_plan_pass
from v41.passes.synchronise import synchronise
from v41.plan import Plan
from v41.report import CompileReport, Decision

TWO = synchronise(plan("x", "z", "a: x -> y,", "b: y -> z,"))
DONE = Decision(True, "a", "unknown")


def rename(given: Plan) -> tuple[Plan, list[Decision]]:
    """A second plan that holds."""
    return replace(given, whole={"rows": 8}), [DONE]


def lose(given: Plan) -> tuple[Plan, list[Decision]]:
    """Nobody makes what is returned."""
    return replace(given, pieces=given.pieces[:-1]), [DONE]


def stumble(given: Plan) -> tuple[Plan, list[Decision]]:
    raise KeyError("missing")


def test_what_a_pass_did_is_told() -> None:
    made, run = run_plan_pass("rename", rename, TWO)
    assert made == rename(TWO)[0] and run.milliseconds > 0
    assert (run.name, run.decisions, run.failure) == ("rename", [DONE], None)
    assert run.nodes_before == run.nodes_after == sum(piece.nodes for piece in TWO.pieces)


@pytest.mark.parametrize(("broken", "says"), [(lose, "PlanBroken"), (stumble, "KeyError")])
def test_one_that_fails_is_undone_and_named(broken: object, says: str) -> None:
    made, run = run_plan_pass("broken", broken, TWO)  # type: ignore[arg-type]
    assert made is TWO and run.decisions == []
    assert run.failure is not None and run.failure.startswith(says)


@pytest.mark.parametrize(("broken", "error"), [(lose, PlanBroken), (stumble, PassFailed)])
def test_strictly_it_raises(broken: object, error: type[V41Error]) -> None:
    with pytest.raises(error):
        run_plan_pass("broken", broken, TWO, strict=True)  # type: ignore[arg-type]


def test_torch_switches_it_off_by_its_name() -> None:
    with torch._inductor.config.patch(disabled_passes="rename"):
        made, run = run_plan_pass("rename", rename, TWO)
    assert made is TWO and run.failure == SWITCHED_OFF


# ---- through torch.compile


def step(x: Tensor) -> Tensor:
    return (x * 2).relu()


def compiled(strict: bool = False) -> CompileReport:
    torch.compiler.reset()
    x = torch.randn(3, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0, shape_id="rows")
    options = {"codegen": "eager", "overlap": "on", "strict": strict, "cache": False}
    with torch.no_grad(), v41.collect() as reports:
        assert torch.equal(torch.compile(step, backend="v41", options=options)(x), step(x))
    return reports[0]


@pytest.fixture
def with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has streams, as far as whoever writes the plan can tell."""
    monkeypatch.setattr(overlap, "lanes_of", lambda device: lambda plan: None)


@pytest.mark.parametrize("name", PLAN_PASSES)
@pytest.mark.usefixtures("with_streams")
def test_a_program_compiles_without_a_pass_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = backend if hasattr(backend, name) else overlap
    for broken, says in ((lose, "PlanBroken"), (stumble, "KeyError")):
        monkeypatch.setattr(owner, name, lambda given, *rest, broken=broken: broken(given))
        report = compiled()
        (run,) = (run for run in report.passes if run.name == name)
        assert run.failure is not None and run.failure.startswith(says)
        assert report.plan is not None and report.plan.pieces and report.plan.overlapped is None
        with pytest.raises(Exception, match="a plan breaks a rule" if broken is lose else "raised KeyError"):
            compiled(strict=True)
