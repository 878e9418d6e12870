"""Any program of any sites, through the whole list of passes: every invariant holds, and what should fire fires."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from tests.invariants import (
    apply,
    check_commute,
    check_disturbed,
    check_fired_share,
    check_kept,
    check_meta_is_real,
    check_moves_only,
    check_one_compile,
    check_plan_holds,
    check_repeatable,
    check_same_values,
    check_settled,
    copy_program,
)
from tests.strategies import engrams, gates, norms
from tests.strategies.whole_programs import LEGAL, OF_SYMBOLS, Part, Program, whole_programs
from v41.passes.canonicalize import canonicalize
from v41.passes.pipeline import PIPELINE, run_pipeline
from v41.passes.same_values import random_inputs, run
from v41.passes.structure import structure_key
from v41.passes.verify import SHARED, WRITES, facts
from v41.report import Decision, PassRun

IN_ORDER = ("fold_sinkhorn", "outline_index_scores")  # the gate would look at the top-k of an indexer
QUICK = [kind for kind in LEGAL if kind not in OF_SYMBOLS]


def pipeline(gm: GraphModule) -> list[Decision]:
    """The whole list as one pass; what fails raises."""
    made, runs = run_pipeline(gm, strict=True)
    assert made is gm
    return [decision for run in runs for decision in run.decisions]


def check_program(program: Program, seed: int) -> list[bool]:
    """For each part whether it became its regions; it must, or name the rule of its flaw."""
    gm = program.traced()
    with enable_python_dispatcher():  # as around a backend; without it a pad of unknown sizes has no meta
        before, entered = copy_program(gm), facts(gm)
        rows = [count for count in ((0, 1, 5) if program.symbolic else (5,)) if runs_with(before, count)]
        assert rows[-1] == 5
        _, runs = run_pipeline(gm, check="numeric", strict=True)
        check_runs(program, runs)
        check_kept(entered, gm, but=(WRITES, SHARED))
        for count in rows if program.symbolic else ():  # of five rows alone the values were compared
            check_same_values(before, gm, count)
        check_meta_is_real(gm, rows[-1])
        check_repeatable(pipeline, before, gm, [decision for run in runs for decision in run.decisions])
        check_disturbed(pipeline, before, seed, rows[-1])
        check_plan_holds(gm, rows)
        check_steps(before, gm)
    return [part.rule is None for part in program.parts]


def runs_with(gm: GraphModule, rows: int) -> bool:
    """Whether a program takes so many: torch itself asks for some, say for as many entries as are picked."""
    try:
        run(gm, random_inputs(gm, rows))
    except (RuntimeError, IndexError):
        return False
    return True


def check_steps(entered: GraphModule, left: GraphModule) -> None:
    """Each pass settles what it does, what outlines only moves, and those that ask for nothing but order may swap."""
    swapped = [each.run for each in PIPELINE if each.needs == (canonicalize,) and each.name not in IN_ORDER]
    for each in PIPELINE:
        if each.run is swapped[0]:
            check_commute(swapped, entered)
        before = copy_program(entered)
        apply(each.run, entered)
        check_settled(each.run, entered)
        if each.name.startswith("outline_"):
            check_moves_only(before, entered)
    assert structure_key(entered) == structure_key(left)


def check_runs(program: Program, runs: list[PassRun]) -> None:
    told = any(run.decisions for each, run in zip(PIPELINE, runs, strict=True) if each.tells)
    missed = {f"no {each.expects} found" for each in PIPELINE if told and each.expects is not None}
    assert {run.warning for run in runs if run.warning} <= missed
    made = sum((Counter(run.made) for run in runs), Counter[str]())
    wanted = sum((part.found for part in program.parts), Counter[str]())
    norms = made.pop("norm_quantise", 0), wanted.pop("norm_quantise", 0)
    assert made == wanted, f"{made - wanted} too many, {wanted - made} missing"
    assert norms[0] >= norms[1]  # a norm inside of what is none of its kind's regions is a norm all the same
    broken = Counter(decision.rule for run in runs for decision in run.decisions)
    unnamed = Counter(part.rule for part in program.parts if part.rule) - broken
    assert all(rule.startswith("only") for rule in unnamed), unnamed  # who reads what leaks may leave no site to name


def check_drawn(kinds: list[str], share: int, longest: int) -> None:
    fired: list[bool] = []

    @settings(max_examples=max(1, settings.default.max_examples // share), phases=[Phase.generate])
    @given(whole_programs(kinds, longest), st.integers(0, 2**32))
    def draw(program: Program, seed: int) -> None:
        for part, tie in zip(program.parts, program.ties, strict=True):
            event(f"{type(part.site).__name__}, then {tie}")
        fired.extend(check_program(program, seed))

    draw()
    check_fired_share(fired)


def test_any_program_keeps_every_invariant() -> None:
    check_drawn(QUICK, share=8, longest=2)


@pytest.mark.slow
def test_one_program_serves_any_number_of_rows() -> None:
    norm, gate, streams = norms.Row(rope="the model's", format="fp8"), gates.Router(), engrams.Gate()
    parts = tuple(Part(site, Counter()) for site in (norm, gate, streams))
    program = Program(parts, ("in place", "a cache", "views"), (True, False, True), (False,) * 3)
    check_one_compile(*program.to_trace(), grid=(5, 0, 1, 2, 40))


@pytest.mark.slow
def test_longer_programs_keep_every_invariant() -> None:
    check_drawn(QUICK, share=10, longest=4)


@pytest.mark.slow
def test_programs_of_any_number_of_rows_keep_every_invariant() -> None:
    check_drawn(list(LEGAL), share=12, longest=3)
