"""What keeps a value from being computed of kept rows is named by its rule, with the node at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from tests.passes.test_row_rules import Writer
from tests.passes.test_trim_replay import kept_of
from tests.strategies.rows import WINDOW, build
from v41.errors import InvariantBroken
from v41.passes.pipeline import PIPELINE
from v41.passes.replay_rows import CUT, KNOWN, SIZED
from v41.passes.trim_replay import FUNCTIONAL, trim, trim_replay
from v41.passes.verify import CARRIED, facts, verify
from v41.report import Decision

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Late = Callable[[Writer, Node], Node]  # x -> what rows of logits are taken from


def program(late: Late) -> tuple[GraphModule, dict[str, Node]]:
    """A gelu, then what stands in `late`, of which the rows of logits are returned."""
    write = Writer()
    x = late(write, write(aten.gelu.default, write.inputs["x"]))
    return write.finish(write(aten.index.Tensor, x, [write.inputs["logit_rows"]])), write.inputs


def of_unfinished_sum(write: Writer, x: Node) -> Node:
    """One reader of a sum over ranks needs all rows, the other its own: of what has only begun no rows can be taken."""
    begun = write(c10d.all_reduce.default, x, "sum", "0")
    everywhere, x = (write(c10d.wait_tensor.default, begun) for _ in range(2))
    total = write(aten.sum.dim_IntList, everywhere, [0])
    return write(aten.add.Tensor, x, total)


def of_finished_sum(write: Writer, x: Node) -> Node:
    return write(aten.gelu.default, write(c10d.wait_tensor.default, write(c10d.all_reduce.default, x, "sum", "0")))


def of_size_without_node(write: Writer, x: Node) -> Node:
    rows = x.meta["val"].shape[0]
    return write(aten.view.default, write(aten.view.default, x, [rows, 2, 4]), [-1, 8])


def of_all_rows(write: Writer, x: Node) -> Node:
    return write(aten.add.Tensor, x, write(aten.sum.dim_IntList, x, [0]))


FLAWS: dict[str, tuple[str, Late, Any]] = {  # -> the rule, who breaks it, and the operator at fault
    "a sum that is under way": (CUT, of_unfinished_sum, c10d.all_reduce.default),
    "a size without a node": (SIZED, of_size_without_node, aten.view.default),
    "all rows": (KNOWN, of_all_rows, aten.sum.dim_IntList),
}


def refusals(gm: GraphModule, inputs: dict[str, Node]) -> list[Decision]:
    return [each for each in trim(gm, kept_of(inputs, WINDOW)) if not each.applied]


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_rule_that_is_broken_is_named(flaw: str) -> None:
    rule, late, op = FLAWS[flaw]
    gm, inputs = program(late)
    at_fault = {node.name for node in gm.graph.nodes if node.target is op}
    found = refusals(gm, inputs)
    assert (rule, True) in {(each.rule, each.culprit in at_fault) for each in found}, found


def test_without_a_flaw_nothing_is_refused() -> None:
    assert refusals(*program(lambda write, x: write(aten.view.default, x, [-1, 8]))) == []


def test_ranks_add_up_the_rows_that_are_left_and_else_all_is_kept() -> None:
    """As its place in the pipeline says: the pass may change how many rows a collective carries, and no other rule."""
    gm, inputs = program(of_finished_sum)
    known = facts(gm)
    assert all(each.applied for each in trim(gm, kept_of(inputs, WINDOW)))
    (trimming,) = (each for each in PIPELINE if each.run is trim_replay)
    verify(gm, known, name="trim_replay", but=trimming.breaks)
    with pytest.raises(InvariantBroken) as caught:
        verify(gm, known, name="trim_replay")
    assert caught.value.facts["rule"] == CARRIED


def test_a_write_that_what_follows_may_see_is_named() -> None:
    gm, inputs = build(["ring", "gelu"])
    (write,) = (node for node in gm.graph.nodes if node.target is aten.copy_.default)
    before = [str(node) for node in gm.graph.nodes]
    (decision,) = trim(gm, kept_of(inputs, WINDOW))
    assert (decision.applied, decision.rule, decision.culprit) == (False, FUNCTIONAL, write.name)
    assert [str(node) for node in gm.graph.nodes] == before
