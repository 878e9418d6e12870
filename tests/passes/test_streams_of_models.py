"""Side streams of whole models: where they are, that every event of theirs is needed, and what checking them costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.strategies.side_work import check_sides
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.analysis.happens_before import races
from v41.passes.analysis.plan_facts import PlanFacts
from v41.passes.assign_streams import STREAMS, assign_streams
from v41.passes.check_plan import check_plan
from v41.plan import Event, Plan
from v41.regions import region_of, regions
from v41.tools.inspect import capture_call, first_layers, step_of

MODELS = {("tiny", 2): 1, ("bench", None): 2, ("flash", None): 2}  # and layers (None: all) -> look-ups off the path


def planned(preset: str, layers: int | None) -> Plan:
    """As a GPU gets it: regions with kernels are pieces of their own."""
    config = V41Config.preset(preset)
    config = first_layers(config, layers) if layers else config
    return capture_call(lambda: step_of(lambda: V41ForCausalLM(config)), codegen="triton").plan


def least_ms(call: Callable[[], object]) -> float:
    """Processor time, which a busy machine does not stretch."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        call()
        times.append((time.process_time() - begin) * 1e3)
    return min(times)


def raced(plan: Plan, gone: Callable[[Event], bool]) -> bool:
    """Whether a race is found once these events are gone."""
    fewer = replace(plan, events=tuple(event for event in plan.events if not gone(event)))
    return bool(races(PlanFacts(fewer)))


@pytest.mark.parametrize(
    ("preset", "layers"), [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] != "tiny")) for each in MODELS]
)
def test_every_event_of_a_model_is_needed(
    preset: str, layers: int | None, record_property: Callable[[str, object], None]
) -> None:
    plan = planned(preset, layers)
    begin = time.process_time()
    made, decisions = assign_streams(plan, (1, 16, 256))
    record_property("assign_streams", f"{time.process_time() - begin:.1f} s of the processor, {len(decisions)} sites")
    check_sides(made)
    kinds = Counter(
        (piece.stream, region_of(call).kind) for piece in made.pieces if piece.stream for call in regions(piece.body)
    )
    found = Counter(region_of(call).kind for piece in plan.pieces for call in regions(piece.body))
    moved = kinds[STREAMS["late"], "mhc_coefficients"]
    assert moved > 0 and found["mhc_boundary"] - moved in (0, 1)  # one may be read by the very next piece
    record_property("boundaries", f"the coefficients of {moved} of {found['mhc_boundary']} leave the path")
    assert kinds[STREAMS["early"], "engram_lookup"] == MODELS[preset, layers]

    checked, order = (least_ms(check) for check in (lambda: check_plan(made), lambda: races(PlanFacts(made))))
    record_property("check", f"{checked:.0f} ms, order alone {order:.0f} ms")
    waits = [event for event in made.events if not raced(made, lambda each, gone=event: each is gone)]
    marks = dict.fromkeys(event.after for event in made.events)
    records = [mark for mark in marks if not raced(made, lambda each, gone=mark: each.after == gone)]
    assert made.events and (waits, records) == ([], [])
    record_property("events", f"{len(made.events)} events, {len(marks)} marks, each of them needed")
