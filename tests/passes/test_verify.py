"""verify: a sound program passes; a damage per rule is found, and the error names pass, rule and node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.strategies.tracing import trace
from v41.errors import InvariantBroken
from v41.passes.verify import RULES, facts, verify
from v41.regions import body_of, outline, regions

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def program() -> GraphModule:
    """A write, random numbers that ranks add up, an output that is a view of another, and a region."""

    def step(x: Tensor, slots: Tensor, cache: Tensor) -> Any:
        y = (x * 2).relu()
        old = cache.view(-1).neg()
        cache[slots] = y
        noise = torch.rand(4) + y.sum(0)
        pair = y.repeat(2, 1)
        return noise, pair, pair.view(-1), cache[slots] + 1, old

    gm = trace(step, torch.randn(3, 4), torch.tensor([0, 1, 2]), static=(torch.zeros(5, 4),))
    outline(gm, [only(gm, aten.mul.Tensor), only(gm, aten.relu.default)], kind="twice")
    results = gm.graph.output_node().args[0]
    noise = results[0]  # type: ignore[index]
    with gm.graph.inserting_after(noise):  # type: ignore[arg-type]
        begun = gm.graph.call_function(c10d.all_reduce.default, (noise, "sum", "0"))
    with gm.graph.inserting_after(begun):
        total = gm.graph.call_function(c10d.wait_tensor.default, (begun,))
    begun.meta, total.meta = dict(noise.meta), dict(noise.meta)  # type: ignore[union-attr]
    gm.graph.output_node().args = ((total, *results[1:]),)  # type: ignore[index]
    return gm


def only(gm: GraphModule, target: object) -> Node:
    (node,) = (node for node in gm.graph.nodes if node.target is target)
    return node


def read_too_early(gm: GraphModule) -> None:
    only(gm, aten.index_put.default).append(next(regions(gm)))


def make_a_region_not_convex(gm: GraphModule) -> None:
    """It reads what is computed from its result: a path leaves it and comes back."""
    call = next(regions(gm))
    call.args = (*call.args[:-1], only(gm, aten.index_put.default))


def lose_a_body(gm: GraphModule) -> None:
    delattr(gm, str(next(regions(gm)).args[0].target))  # type: ignore[union-attr]


def forget_an_operand(gm: GraphModule) -> None:
    call = next(regions(gm))
    call.args = call.args[:-1]


def put_an_effect_into_a_region(gm: GraphModule) -> None:
    graph = body_of(next(regions(gm))).graph
    (entry, *_) = graph.nodes
    with graph.inserting_after(entry):
        graph.call_function(aten.neg_.default, (entry,)).meta["val"] = entry.meta["val"]


def lie_about_a_dtype(gm: GraphModule) -> None:
    node = only(gm, aten.repeat.default) if has(gm, aten.repeat.default) else only(gm, aten.sum.dim_IntList)
    node.meta["val"] = node.meta["val"].double()


def lie_about_a_stride(gm: GraphModule) -> None:
    node = only(gm, aten.index.Tensor)
    node.meta["val"] = torch.empty_strided(node.meta["val"].shape, (1, 7), device="meta")


def lie_inside_a_region(gm: GraphModule) -> None:
    node = only(body_of(next(regions(gm))), aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].double()


def forget_meta(gm: GraphModule) -> None:
    del only(gm, aten.index.Tensor).meta["val"]


def pass_what_cannot_run(gm: GraphModule) -> None:
    node = only(gm, aten.sum.dim_IntList)
    node.args = (node.args[0], [7])


def rename_an_input(gm: GraphModule) -> None:
    node = next(iter(gm.graph.nodes))
    node._rename("renamed")


def swap_outputs(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    (results,) = output.args
    output.args = (tuple(results)[::-1],)  # type: ignore[arg-type]


def lose_a_write(gm: GraphModule) -> None:
    gm.graph.erase_node(only(gm, aten.copy_.default))


def draw_twice(gm: GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if "rand" in str(node.target))
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node)


def add_up_half(gm: GraphModule) -> None:
    """Over ranks; so there is a program of the same outputs."""
    begun, total = only(gm, c10d.all_reduce.default), only(gm, c10d.wait_tensor.default)
    noise, half = begun.args[0], begun.meta["val"][:2]
    with gm.graph.inserting_before(begun):
        part = gm.graph.call_function(aten.slice.Tensor, (noise, 0, 0, 2))
    part.meta["val"] = half
    begun.update_arg(0, part)
    with gm.graph.inserting_after(total):
        twice = gm.graph.call_function(aten.repeat.default, (total, [2]))
    twice.meta["val"] = begun.meta["val"]
    total.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    begun.meta["val"] = total.meta["val"] = half.clone()


def write_another_way(gm: GraphModule) -> None:
    copy = only(gm, aten.copy_.default)
    with gm.graph.inserting_before(copy):
        extra = gm.graph.call_function(aten.zero_.default, (copy.args[0],))
        extra.meta["val"] = copy.args[0].meta["val"]  # type: ignore[union-attr]


def read_behind_a_write(gm: GraphModule) -> None:
    """Of the cache, through a view, which itself may stand anywhere."""
    only(gm, aten.copy_.default).append(only(gm, aten.neg.default))


def copy_a_returned_view(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    noise, pair, view, *rest = output.args[0]  # type: ignore[misc]
    with gm.graph.inserting_before(output):
        fresh = gm.graph.call_function(aten.clone.default, (view,))
        fresh.meta["val"] = view.meta["val"]  # type: ignore[union-attr]
    output.args = ((noise, pair, fresh, *rest),)


def has(gm: GraphModule, target: object) -> bool:
    return any(node.target is target for node in gm.graph.nodes)


DAMAGES: dict[Callable[[GraphModule], None], str] = {
    read_too_early: "reads nothing before it is made",
    make_a_region_not_convex: "reads nothing before it is made",
    lose_a_body: "reads nothing before it is made",
    forget_an_operand: "holds well-formed regions",
    put_an_effect_into_a_region: "holds well-formed regions",
    lie_about_a_dtype: "has the meta that a fresh propagation finds",
    lie_about_a_stride: "has the meta that a fresh propagation finds",
    lie_inside_a_region: "has the meta that a fresh propagation finds",
    forget_meta: "has the meta that a fresh propagation finds",
    pass_what_cannot_run: "has the meta that a fresh propagation finds",
    rename_an_input: "keeps its inputs",
    swap_outputs: "keeps its outputs",
    lose_a_write: "writes the same inputs",
    draw_twice: "keeps collectives, random numbers and assertions in order",
    add_up_half: "keeps the sizes of what collectives carry",
    write_another_way: "keeps writes and their order",
    read_behind_a_write: "keeps writes and their order",
    copy_a_returned_view: "keeps which inputs and outputs share memory",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damage_is_found_and_named(damage: Callable[[GraphModule], None]) -> None:
    gm = program()
    known = facts(gm)
    verify(gm, known, name="nothing")
    damage(gm)
    with pytest.raises(InvariantBroken) as caught:
        verify(gm, known, name="careless")
    assert caught.value.facts["rule"] == DAMAGES[damage]
    assert caught.value.facts["run"] == "careless"
    assert caught.value.facts["node"] in {node.name for node in gm.graph.nodes}


def test_a_rule_that_is_a_passs_business_is_not_held_against_it() -> None:
    gm = program()
    known = facts(gm)
    write_another_way(gm)
    with pytest.raises(InvariantBroken):
        verify(gm, known, name="writer")
    verify(gm, known, name="writer", but=["keeps writes and their order"])


def test_how_far_apart_the_parts_of_an_axis_of_one_lie_is_nobodys_business() -> None:
    gm = trace(lambda x: x.unsqueeze(0) + 1, torch.randn(5, 4))
    known, node = facts(gm), only(gm, aten.add.Tensor)
    value = node.meta["val"]
    node.meta["val"] = value.new_empty_strided(value.shape, (7, *value.stride()[1:]))
    verify(gm, known, name="nothing")
    node.meta["val"] = value.new_empty_strided(value.shape, (*value.stride()[:2], 7))
    with pytest.raises(InvariantBroken):
        verify(gm, known, name="careless")


def test_every_rule_has_a_damage() -> None:
    assert set(DAMAGES.values()) == dict(RULES).keys()


def test_the_error_says_what_where_and_what_to_do() -> None:
    gm = program()
    known = facts(gm)
    lie_about_a_stride(gm)
    with pytest.raises(InvariantBroken) as caught:
        verify(gm, known, name="careless")
    found, at, fix = str(caught.value).splitlines()
    assert found.startswith("pass careless left a program in which a rule is broken: it has the meta that")
    assert "strides (1, 7), its value f32[u" in found
    assert at.startswith("  at   passes/test_verify.py:") and fix.startswith("  fix  ")


@pytest.mark.parametrize(("damage", "detail"), [
    (draw_twice, "torch.float32 of 1 axes and is random aten.rand.default f32[4]"),
    (lose_a_write, "number 0 was arg2_1 and is nothing"),
])  # fmt: skip
def test_the_error_tells_what_was_and_what_is(damage: Callable[[GraphModule], None], detail: str) -> None:
    gm = program()
    known = facts(gm)
    damage(gm)
    with pytest.raises(InvariantBroken) as caught:
        verify(gm, known, name="careless")
    assert str(caught.value.facts["detail"]).endswith(detail)
