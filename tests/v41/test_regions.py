"""outline moves nodes into a region and back without changing a bit; what cannot be a region is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import check_same_values, copy_program
from tests.strategies.tracing import trace
from v41.passes.structure import structure_key
from v41.passes.verify import facts, verify
from v41.regions import (
    NotOutlinable,
    Region,
    body_of,
    flatten,
    inline,
    invoke_subgraph,
    is_region,
    outline,
    region_of,
    regions,
)

aten = torch.ops.aten


def program() -> GraphModule:
    def chain(x: Tensor) -> Any:
        a = x * 2
        b = a.relu()
        c = a + b
        d = c.exp()
        return d - b, c.sum()

    return trace(chain, torch.randn(3, 4))


def named(gm: GraphModule, *names: str) -> list[Node]:
    """The nodes of these operators, each of which occurs once."""
    found = {str(node.target).removeprefix("aten.").split(".")[0]: node for node in gm.graph.nodes}
    return [found[name] for name in names]


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]


def test_a_region_keeps_its_nodes_as_body_and_says_what_it_is() -> None:
    gm = program()
    mul, relu, add = named(gm, "mul", "relu", "add")
    call = outline(gm, [mul, relu, add], kind="head", steps=3)
    assert region_of(call) == Region("head", {"steps": 3})
    assert [str(n.target) for n in body_of(call).graph.nodes if n.op == "call_function"] == [
        "aten.mul.Tensor",
        "aten.relu.default",
        "aten.add.Tensor",
    ]
    assert [tuple(value.shape[1:]) for value in call.meta["val"]] == [(4,), (4,)]  # relu and add are read outside
    assert is_region(call, "head") and not is_region(call, "tail") and list(regions(gm)) == [call]


def test_a_kind_that_says_its_form_says_it_once() -> None:
    forms = {"mhc_exit": "exit", "mhc_boundary": "seam"}
    names = [Region(kind, {"form": form}).name for kind, form in forms.items()]
    assert [*names, Region("sinkhorn", {}).name] == ["mhc_exit", "mhc_boundary seam", "sinkhorn"]


CONVEX = st.integers(0, 4).flatmap(lambda first: st.tuples(st.just(first), st.integers(first + 1, 5)))


@given(CONVEX, st.booleans())
def test_outline_and_inline_change_no_bit(bounds: tuple[int, int], nested: bool) -> None:
    gm = program()
    before, key, known = copy_program(gm), structure_key(gm), facts(gm)
    call = outline(gm, calls(gm)[slice(*bounds)], kind="part")
    if nested:
        call = outline(gm, [call], kind="outer")
        assert [node.name for node in regions(gm)] == [call.name]
    verify(gm, known, name="outline")
    gm.recompile()
    check_same_values(before, flatten(gm), 3)
    while found := list(regions(gm)):
        inline(gm, found[0])
    gm.recompile()
    verify(gm, known, name="outline")
    assert structure_key(gm) == key and not list(gm.children())


def test_readers_in_between_move_behind_the_region() -> None:
    gm = program()
    before = copy_program(gm)
    mul, relu, add = named(gm, "mul", "relu", "add")
    relu_reader = gm.graph.call_function(aten.neg.default, (mul,))
    relu_reader.meta["val"] = -mul.meta["val"]
    mul.append(relu_reader)
    call = outline(gm, [mul, relu, add], kind="head")
    gm.graph.lint()
    order = list(gm.graph.nodes)
    assert order.index(relu_reader) > order.index(call)
    gm.graph.erase_node(relu_reader)
    gm.recompile()
    check_same_values(before, flatten(gm), 3)


def test_what_is_not_convex_is_refused() -> None:
    gm = program()
    mul, add = named(gm, "mul", "add")
    with pytest.raises(NotOutlinable, match="not convex"):
        outline(gm, [mul, add], kind="hole")


def test_a_placeholder_or_a_dead_end_is_refused() -> None:
    gm = program()
    with pytest.raises(NotOutlinable, match="cannot move"):
        outline(gm, [next(iter(gm.graph.nodes))], kind="input")
    (mul,) = named(gm, "mul")
    dead = gm.graph.call_function(aten.neg.default, (mul,))
    mul.append(dead)
    with pytest.raises(NotOutlinable, match="nothing outside reads"):
        outline(gm, [dead], kind="dead")


def test_a_copy_without_subgraph_calls() -> None:
    gm = program()
    call = outline(gm, calls(gm)[:3], kind="part")
    outline(gm, [call], kind="outer")
    text = str(gm.graph)
    flat = flatten(gm)
    assert not any(node.target is invoke_subgraph for node in flat.graph.nodes)
    assert str(gm.graph) == text
