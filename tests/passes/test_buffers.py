"""buffers, sizes and rounding: whose memory a value is and for how long, what sizes are called, what rungs cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.test_borders import CACHE, SIZES, R, X, much, ragged, traced
from tests.passes.test_partition import with_seams
from tests.strategies.plans import plan as written
from tests.strategies.tracing import trace
from v41.errors import PlanUnreadable
from v41.passes.analysis.rounding import bytes_of_one_more, rounding_up
from v41.passes.check_plan import check_plan
from v41.passes.partition import partition
from v41.plan import Buffer, Plan


def step(x: Tensor, r: Tensor, cache: Tensor) -> Any:
    y = much(x)  # piece 1
    cache[:1].add_(y.sum())
    z = ragged(y, r)  # piece 2
    wide = much(z)  # piece 3
    return wide[:, :2], y


def plan_of_step() -> Plan:
    return partition(traced(step), along="rows")


def test_every_tensor_has_its_owner_life_and_bytes() -> None:
    plan = plan_of_step()
    by_spec = {(b.spec, b.owner): b for b in plan.buffers.values() if not b.views}
    sizes = {name: symbol for symbol, name in plan.sizes.items()}
    T, requests = sizes["rows"], sizes["requests"]
    x, r = by_spec[f"f32[{T}, 4]", "runtime"], by_spec[f"f32[{requests}, 4]", "runtime"]
    cache = by_spec["f32[8, 4]", "caller"]
    assert len(plan.pieces) == 4 and set(plan.buffers) == {n for n, spec in plan.values.items() if "[" in spec}
    assert [(b.born, b.dies, b.bytes) for b in (x, r, cache)] == [
        (-1, 1, f"16*{T}"), (-1, 2, f"16*{requests}"), (-1, 1, "128")]  # fmt: skip
    y, last = (plan.buffers[str(name)] for name in reversed(plan.outputs))
    assert (y.owner, y.born, y.dies, y.views) == ("piece_1", 1, 4, ())
    assert (last.owner, last.born, last.dies) == ("piece_3", 3, 4)


def test_views_across_borders_are_of_one_memory() -> None:
    def function(x: Tensor) -> Any:
        y = (x * 2).relu()
        return (y[:, :2] + 1).tanh(), (y.t().exp() + 1).tanh(), x[1:]

    gm = with_seams(function, X)
    plan = partition(gm, cut_at=["seam"])
    made = [buffer for buffer in plan.buffers.values() if buffer.views]
    owners = {buffer.name: {plan.buffers[base].owner for base in buffer.views} for buffer in made}
    assert made and all(owners[buffer.name] == {buffer.owner} for buffer in made)
    assert all(plan.buffers[base].dies == buffer.dies for buffer in made for base in buffer.views)


def test_an_input_of_a_changing_size_that_is_written_stays_the_callers() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 + y

    plan = partition(trace(function, X, R))
    assert sorted(plan.buffers[name].owner for name in plan.inputs if name in plan.buffers) == ["caller", "runtime"]


def test_sizes_have_the_names_they_were_marked_with() -> None:
    gm = trace(lambda x, r, w: (x @ r.T) @ (r @ w), X, R, static=(CACHE[:4],), sizes=SIZES)
    assert sorted(partition(gm).sizes.values()) == ["requests", "rows"]


def test_sizes_without_a_mark_are_called_by_the_first_input_that_has_them() -> None:
    gm = trace(lambda x: x * 2, X, backed=True)
    (tensor,) = (n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor))
    assert set(partition(gm).sizes.values()) == {f"{tensor.name}.0"}
    assert set(partition(gm, called={tensor.name: "tokens"}).sizes.values()) == {"tokens.0"}


def test_a_plan_comes_back_from_json() -> None:
    plan = replace(plan_of_step(), buckets={"rows": (1, 8)}, whole={"rows": 8})
    again = Plan.from_json(plan.to_json())
    check_plan(again)
    assert again == plan == plan.without_bodies() and again.to_json() == plan.to_json() and str(again) == str(plan)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pieces": [{"name": "a"}], "buckets": {}}', "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanUnreadable, match="the text holds no plan"):
        Plan.from_json(text)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted).map(tuple))
def test_rounding_is_what_counting_says(ladder: tuple[int, ...]) -> None:
    unit = 48
    buffers = {  # two live together at piece 1
        "a": Buffer("a", "f32[u0, 4]", "piece_0", 0, 1, "16*u0"),
        "b": Buffer("b", "f32[2*u0, 4]", "piece_1", 1, 2, "32*u0"),
        "c": Buffer("c", "f32[u0, 4]", "piece_2", 2, 2, "8*u0"),
        "view": Buffer("view", "f32[u0, 4]", "piece_0", 1, 1, "16*u0", views=("a",)),
        "both": Buffer("both", "f32[u0, u1]", "piece_1", 1, 1, "4*u0*u1"),
        "none": Buffer("none", "f32[8]", "caller", -1, 3, "32"),
    }
    pieces = written("x", "", "a: x ->, x", "b: ->", "c: ->").pieces
    plan = Plan((), (), {}, pieces, sizes={"u0": "rows", "u1": "requests"}, buckets={"rows": ladder}, buffers=buffers)
    found = list(rounding_up(plan))
    (untold,) = rounding_up(replace(plan, buckets={"requests": (3,)}))
    assert (untold.size, untold.added, untold.worst_bytes) == ("requests", 2, None)  # no buffer has it alone
    assert [rounding.rung for rounding in found] == list(ladder)
    for rounding in found:
        sizes = [n for n in range(1, rounding.rung + 1) if min(rung for rung in ladder if rung >= n) == rounding.rung]
        assert rounding.fewest == sizes[0] and rounding.added == rounding.rung - sizes[0]
        assert rounding.worst_share == pytest.approx(rounding.rung / sizes[0] - 1)
        assert rounding.mean_share == pytest.approx(rounding.rung * len(sizes) / sum(sizes) - 1)
        assert rounding.worst_bytes == unit * rounding.added
    assert bytes_of_one_more(plan, "requests") is None
