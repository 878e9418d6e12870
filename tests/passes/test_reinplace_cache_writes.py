"""reinplace_cache_writes: legal writes happen in place with the same results, a flaw per rule is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import check_fired_share
from tests.strategies.tracing import trace
from v41.passes.pipeline import copy_of
from v41.passes.reinplace_cache_writes import IN_PLACE, PART, RULES, reinplace_cache_writes
from v41.passes.same_values import random_inputs, same_bits
from v41.passes.structure import structure_key
from v41.passes.verify import SHARED, WRITES, facts, verify
from v41.report import Decision

aten = torch.ops.aten
CACHE, SLOTS, ROWS = torch.zeros(6, 2, 4), torch.tensor([1, 3, 4]), torch.randn(3, 4)


def as_it_is(gm: GraphModule) -> None:
    pass


def reinplaced(
    function: Callable[..., Any], edit: Callable[[GraphModule], None] = as_it_is
) -> tuple[GraphModule, list[Decision]]:
    """function(slots, rows, cache), traced, edited, reinplaced, and shown to do what it did, for several row counts."""
    gm = trace(function, SLOTS, ROWS, static=(CACHE,))
    edit(gm)
    gm.recompile()
    before, known = copy_of(gm), facts(gm)
    decisions = reinplace_cache_writes(gm)
    gm.graph.lint()
    gm.recompile()
    verify(gm, known, name="reinplace_cache_writes", but=(WRITES, SHARED))
    for rows in (0, 1, 3):
        inputs, twins = (random_inputs(gm, rows) for _ in range(2))
        expected, results = before(*twins), gm(*inputs)
        assert all(map(same_bits, [*tensors(inputs), *results], [*tensors(twins), *expected]))
    return gm, decisions


def tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def ops(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def write(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache[slots, 0] = rows
    return rows + 1


def write_whole_rows(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache[slots] = rows[:, None]
    return rows


def write_rows_as_records(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache.view(-1, 4).index_copy_(0, slots, rows)
    return cache.view(-1, 4)[slots] * 2


def write_then_read_then_write(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    old = cache[slots, 0]
    cache[slots, 0] = rows
    middle = cache[slots].sum(1)
    cache[slots, 1] = middle
    return old + middle + cache[slots].sum(1)


def write_parts(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache[0:2, 1] = 5.0
    cache[2].mul_(3)
    cache[1:].view(-1, 4)[slots] = rows
    cache[3:5][:, 0].copy_(rows.sum(0))
    return rows


@pytest.mark.parametrize("function", [write, write_rows_as_records, write_then_read_then_write, write_parts])
def test_a_legal_write_happens_in_place(function: Callable[..., Any]) -> None:
    gm, (decision,) = reinplaced(function)
    assert decision.applied and decision.region is None
    functional = {str(target) for target in (*IN_PLACE, *PART)}
    assert not functional & set(ops(gm))


def test_the_written_input_may_be_returned() -> None:
    gm = trace(write, SLOTS, ROWS, static=(CACHE,))
    gm.graph.output_node().args = ((only(gm, aten.copy_.default),),)  # as AOTAutograd spells it
    (decision,) = reinplace_cache_writes(gm)
    gm.graph.lint()
    (result,) = gm.graph.output_node().all_input_nodes
    assert decision.applied and result.op == "placeholder"
    assert "aten.copy_.default" not in ops(gm)


def test_one_record_costs_one_write_and_no_copy() -> None:
    gm, _ = reinplaced(write)
    assert [name for name in ops(gm) if "put" in name or "copy" in name] == ["aten.index_put_.default"]


STEPS = st.lists(st.sampled_from(["row", "part", "record", "double", "read"]), min_size=1, max_size=6)


def steps_of(steps: list[str], slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    total = rows
    for step in steps:
        match step:
            case "row":
                cache[slots, 0] = total
            case "part":
                cache[1:3, 1] = 2.0
            case "record":
                cache.view(-1, 4)[slots + 1] = total + 1
            case "double":
                cache[2].mul_(2)
            case "read":
                total = total + cache[slots].sum(1)
    return total


@given(STEPS)
def test_any_chain_of_writes_and_reads(steps: list[str]) -> None:
    _, decisions = reinplaced(lambda slots, rows, cache: steps_of(steps, slots, rows, cache))
    assert all(decision.applied for decision in decisions)
    assert len(decisions) == any(step != "read" for step in steps)


def test_chains_fire_unless_one_step_is_none_of_its_writes() -> None:
    fired: list[bool] = []

    @given(STEPS.filter(lambda steps: set(steps) != {"read"}), st.sampled_from([None, None, doubles_all, shifts]))
    def draw(steps: list[str], flaw: Callable[..., Any] | None) -> None:
        def chain(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
            total = steps_of(steps, slots, rows, cache)
            return total if flaw is None else total + flaw(slots, rows, cache)

        _, decisions = reinplaced(chain)
        assert [decision.applied for decision in decisions] == [flaw is None]
        fired.append(flaw is None)

    draw()
    check_fired_share(fired)


def doubles_all(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache.mul_(2)
    return rows


def shifts(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    cache[1:3].copy_(cache[0:2])
    return rows


def write_after_reading(slots: Tensor, rows: Tensor, cache: Tensor) -> Tensor:
    old = cache.sum()
    cache[slots, 0] = rows
    return old


def read_late(gm: GraphModule) -> None:
    only(gm, aten.index_put.default).append(only(gm, aten.sum.default))


def return_the_version(gm: GraphModule) -> None:
    gm.graph.output_node().args = ((only(gm, aten.index_put.default),),)


def read_the_compacted_part(gm: GraphModule) -> None:
    part = only(gm, aten.index_put.default)
    with gm.graph.inserting_after(part):
        gm.graph.call_function(aten.sum.default, (part,)).meta["val"] = part.meta["val"].sum()


def write_otherwise(gm: GraphModule) -> None:
    (cache, _), first = only(gm, aten.copy_.default).args, next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(first):
        gm.graph.call_function(aten.zero_.default, (cache,)).meta["val"] = cache.meta["val"]


FLAWS = {  # rule -> a function, an edit of its graph that breaks this rule and none above
    "ends a chain of known views and writes of the input": (doubles_all, as_it_is),
    "is not read in a state that a write has overwritten": (write_after_reading, read_late),
    "takes no values from the memory it writes": (shifts, as_it_is),
    "is neither written nor aliased by other operators": (write, write_otherwise),
    "keeps the strides that views of its result rely on": (write, read_the_compacted_part),
    "is not returned as a value of its own": (write_whole_rows, return_the_version),
}


def only(gm: GraphModule, target: object) -> Node:
    (node,) = (node for node in gm.graph.nodes if node.target is target)
    return node


@pytest.mark.parametrize("rule", FLAWS)
def test_a_flaw_is_refused_by_its_rule_and_nothing_is_edited(rule: str) -> None:
    function, edit = FLAWS[rule]
    gm = trace(function, SLOTS, ROWS, static=(CACHE,))
    edit(gm)
    key = structure_key(gm)
    (decision,) = reinplace_cache_writes(gm)
    assert (decision.applied, decision.rule) == (False, rule)
    assert structure_key(gm) == key


def test_every_rule_has_a_flaw() -> None:
    assert FLAWS.keys() == dict(RULES).keys()
