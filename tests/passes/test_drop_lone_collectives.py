"""drop_lone_collectives takes collectives of one rank and leaves all others; canonicalize takes copies it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import (
    apply,
    check_fired_share,
    check_kept,
    check_repeatable,
    check_same_values,
    check_settled,
    copy_program,
)
from tests.strategies.norms import trace_as_is
from tests.strategies.ranks import ranks
from v41.passes import drop_lone_collectives as module
from v41.passes.analysis.effects import effect_of
from v41.passes.canonicalize import canonicalize
from v41.passes.drop_lone_collectives import RULES, drop_lone_collectives
from v41.passes.pipeline import PIPELINE, run_pipeline
from v41.passes.verify import CARRIED, EFFECTS, WRITES, facts
from v41.report import Decision

c10d = torch.ops._c10d_functional
(LONE,) = (each for each in PIPELINE if each.run is drop_lone_collectives)


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduced(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def collectives(gm: GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in gm.graph.nodes if effect_of(node) == "collective"]


def dropped(fn: Any, *tensors: Tensor) -> tuple[GraphModule, list[Decision]]:
    gm = trace_as_is(fn, tensors)
    before, entered = copy_program(gm), facts(gm)
    decisions = apply(drop_lone_collectives, gm)
    check_kept(entered, gm, but=[EFFECTS, CARRIED, WRITES])
    check_same_values(before, gm, 5)
    check_same_values(before, gm, 5, exact=True)
    check_repeatable(drop_lone_collectives, before, gm, decisions)
    check_settled(drop_lone_collectives, gm)
    return gm, decisions


def of_all_kinds(alone: str) -> Any:
    """Sums, gathers and scatters over a group of one, by position and by name, waited for late or read twice."""

    def run(x: Tensor) -> list[Tensor]:
        begun = c10d.all_reduce(x + 1, reduce_op="avg", group_name=alone)
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, alone))
        scattered = c10d.wait_tensor(c10d.reduce_scatter_tensor(x * 2, "sum", 1, alone))
        total = c10d.wait_tensor(begun)
        return [total.sin(), total.cos(), gathered @ scattered.T, all_reduced(x, alone)]

    return run


def test_collectives_of_one_rank_go() -> None:
    with alone():
        gm, decisions = dropped(of_all_kinds(dist.group.WORLD.group_name), torch.randn(5, 8))
        assert [d.applied for d in decisions] == [True] * 4 and collectives(gm) == []
        apply(canonicalize, gm)
        copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        assert len(copies) == 1 and list(copies[0].users) == [gm.graph.output_node()]  # of an input that is returned


def of_three(x: Tensor) -> list[Tensor]:
    return [all_reduced(x, "0"), all_reduced(x, dist.new_group([0]).group_name)]


def test_collectives_of_several_ranks_stay() -> None:
    with ranks(3):
        gm, decisions = dropped(of_three, torch.randn(5, 8))
        assert [d.rule for d in decisions] == [None]
        assert collectives(gm) == ["all_reduce", "wait_tensor"]


def scaled(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "premul_sum", "0"))


def test_what_might_scale_stays() -> None:
    with alone():
        gm = trace_as_is(scaled, [torch.randn(5, 8)])
        (decision,) = apply(drop_lone_collectives, gm)
        assert decision.rule == "one number reduced is that number" and len(collectives(gm)) == 2


def test_every_rule_is_broken_above() -> None:
    assert dict(RULES).keys() == {"one number reduced is that number"}


SPOKEN = {  # what a step says to its group, on [5, 8]; all of it keeps values as they are where the group is of one
    "sum": lambda x, group: all_reduced(x, group),
    "average": lambda x, group: all_reduced(x, group, "avg"),
    "gather": lambda x, group: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, group))[: x.shape[0]],
    "scatter": lambda x, group: c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 1, group)),
    "scaled": lambda x, group: all_reduced(x, group, "premul_sum"),
}


def spoken(steps: Sequence[tuple[str, int]], groups: Mapping[int, str]) -> list[Decision]:
    """What was decided of a program that says these, each to a group of so many ranks."""

    def run(x: Tensor) -> Tensor:
        for name, count in steps:
            x = SPOKEN[name](x, groups[count]).tanh()
        return x

    gm = trace_as_is(run, [torch.randn(5, 8)])
    said = collectives(gm)
    program, (dropped,) = run_pipeline(gm, [LONE], check=True, strict=True)
    assert said.count("wait_tensor") - collectives(program).count("wait_tensor") == dropped.applied
    return dropped.decisions


def test_of_any_collectives_those_of_one_rank_go_and_no_other() -> None:
    fired: list[bool] = []

    @given(st.lists(st.tuples(st.sampled_from(sorted(SPOKEN)), st.sampled_from([1, 1, 3])), min_size=1, max_size=4))
    def draw(steps: list[tuple[str, int]]) -> None:
        decisions = spoken(steps, groups)
        assert [each.applied for each in decisions] == [name != "scaled" for name, count in steps if count == 1]
        fired.extend(name != "scaled" and count == 1 for name, count in steps)

    with ranks(3):
        groups = {3: "0", 1: dist.new_group([0]).group_name}
        draw()
    check_fired_share(fired)


@given(st.lists(st.sampled_from(sorted(SPOKEN)), min_size=1, max_size=4))
def test_nothing_is_decided_of_several_ranks(names: list[str]) -> None:
    with ranks(3):
        assert spoken([(name, 3) for name in names], {3: "0"}) == []


WRONG: dict[str, tuple[Any, str, Any]] = {
    "sums of several ranks go": (module, "ranks_of", lambda group: 1),
    "scaled sums go": (module, "RULES", ()),
    "the group of a scatter is its size": (module, "GROUP_AT", dict.fromkeys(module.GROUP_AT, 2)),
    "an input that is returned is not copied": (module, "_dropped", lambda begin: drop_without_copy(begin)),
}


def drop_without_copy(begin: Any) -> Any:
    for user in [begin, *begin.users]:
        user.replace_all_uses_with(begin.args[0])
    return begin


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises(Exception):  # noqa: B017  (any of the three notices)
        test_collectives_of_one_rank_go()
        test_collectives_of_several_ranks_stay()
        test_what_might_scale_stays()
