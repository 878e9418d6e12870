"""times: each part of a prediction is there, on a machine whose figures tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.strategies.small import calls_of, fakes, graph_of, inputs_of
from tests.strategies.tracing import trace
from v41.passes.analysis.times import Machine, Times, base_of, is_elementwise
from v41.passes.partition import partition
from v41.regions import outline

LAUNCH, STAGE, PRODUCT = 1e9, 1e12, 1e15  # µs; a byte takes one
MACHINE = Machine(bytes_us=1, launch_us=LAUNCH, stage_us=STAGE, product_us=PRODUCT)
T, D = 16, 8
ROW = 4 * D  # bytes


def graph(run: Callable[..., Any]) -> tuple[GraphModule, dict[str, str]]:
    """run(x [T, D], y [R, D], w [D, D]), and what T and R are called."""
    with fakes() as new:
        rows, others = new.size(), new.size()
        gm = graph_of(run, new(rows, D), new(others, D), new(D, D))
    return gm, {str(rows): "rows", str(others): "requests"}


def us(run: Callable[..., Any], rows: int = T, sizes: dict[str, str] | None = None, region: str = "") -> float:
    """region: the calls from the first with this name on are one."""
    gm, named = graph(run)
    if region:
        calls = calls_of(gm)
        outline(gm, calls[calls.index(calls_of(gm, region)[0]) :], kind="probe")
    return Times(named if sizes is None else sizes, MACHINE).work(gm.graph.nodes).us(rows)


ELEMENTWISE: dict[str, tuple[Callable[..., Any], int]] = {  # -> rows of memory that are moved
    "one": (lambda x, y, w: x + 1, 2),
    "several in a row are one": (lambda x, y, w: (x + 1).relu() * 3, 2),
    "two that are read": (lambda x, y, w: (x + 1) * 2 + x, 2),
    "a view of what is read": (lambda x, y, w: x.view(-1, 2, 4).exp() + 1, 2),
    "what is read outside is written": (lambda x, y, w: ((x + 1).relu(), x * 2), 3),
    "casts": (lambda x, y, w: x.double().float(), 2),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_work_is_one_kernel_that_moves_what_comes_in_and_goes_out(name: str) -> None:
    run, moved = ELEMENTWISE[name]
    assert us(run) == LAUNCH + moved * T * ROW
    assert us(run, rows=1) == LAUNCH + moved * ROW


def test_other_work_is_a_kernel_a_node_and_its_depth_is_its_launch() -> None:
    assert us(lambda x, y, w: x @ w) == LAUNCH + 2 * T * ROW + 4 * D * D
    assert us(lambda x, y, w: (x @ w) @ w) == 2 * (LAUNCH + 2 * T * ROW + 4 * D * D)
    assert us(lambda x, y, w: (x + 1) @ w) == 2 * LAUNCH + 4 * T * ROW + 4 * D * D
    assert us(lambda x, y, w: x.sum(1)) == LAUNCH + T * ROW + 4 * T
    assert us(lambda x, y, w: x.view(-1, 4)) == 0


def test_a_region_is_one_kernel_as_deep_as_what_waits_inside() -> None:
    def inside(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (x.sin() @ w @ w).softmax(-1).sum(-1, keepdim=True) + 1

    moved = T * ROW + 4 * D * D + 4 * T
    depth = us(inside, region="sin") - LAUNCH - moved
    assert depth // PRODUCT == 2 and (depth % PRODUCT) // STAGE == 3 and depth % STAGE == 0  # softmax: a most and a sum
    assert us(inside) // LAUNCH > us(inside, region="sin") % STAGE // LAUNCH == 1


def test_a_region_in_a_region_is_as_deep_as_its_nodes() -> None:
    gm, named = graph(lambda x, y, w: (x.sin() @ w).sum(-1))
    inner = outline(gm, calls_of(gm, "mm"), kind="probe")
    outline(gm, [node for node in calls_of(gm) if node is not inner] + [inner], kind="probe")
    found = Times(named, MACHINE).work(gm.graph.nodes).us(T)
    assert found == LAUNCH + T * ROW + 4 * D * D + 4 * T + PRODUCT + STAGE


def test_sizes_that_are_none_of_a_row_count_as_one() -> None:
    def run(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return y + 1

    for name in ("rows", "requests", "logits"):
        gm, named = graph(run)
        renamed = {symbol: name if of == "requests" else of for symbol, of in named.items()}
        assert Times(renamed, MACHINE).work(gm.graph.nodes).us(T) == LAUNCH + 2 * T * ROW
    gm, named = graph(run)
    other = {symbol: "entries" for symbol in named}
    assert Times(other, MACHINE).work(gm.graph.nodes).us(T) == Times({}, MACHINE).work(gm.graph.nodes).us(T)
    assert Times(other, MACHINE).work(gm.graph.nodes).us(T) == LAUNCH + 2 * ROW


def test_the_work_of_bodies_that_layers_share_is_that_of_the_program() -> None:
    layer = torch.compiler.nested_compile_region(lambda x, w: x @ w)
    plain = trace(lambda x, w: x @ w, torch.rand(5, D), static=(torch.rand(D, D),))
    shared = trace(lambda x, w: layer(layer(x, w), w), torch.rand(5, D), static=(torch.rand(D, D),))
    one, two = (Times({}, MACHINE).work(gm.graph.nodes).us(T) for gm in (plain, shared))
    assert two == 2 * one > 2 * LAUNCH


def test_pieces_of_one_key_take_the_same_time_and_are_looked_at_once() -> None:
    plan = partition(trace(lambda x: (x + 1).relu().sum(1), torch.rand(5, D)))
    times = Times(plan.sizes, MACHINE)
    (piece,) = (piece for piece in plan.pieces if piece.body.graph.find_nodes(op="call_function", target=ADD))
    assert times.piece(piece) is times.piece(piece)
    assert times.piece(piece).us(T) == times.work(piece.body.graph.nodes).us(T) > LAUNCH


ADD = torch.ops.aten.add.Tensor


def test_a_machine_of_ones_own_and_that_of_the_design() -> None:
    gm, named = graph(lambda x, y, w: x + 1)
    machine = Machine()
    assert Times(named).work(gm.graph.nodes).us(T) == machine.launch_us + 2 * T * ROW / machine.bytes_us


def test_a_view_is_what_it_views() -> None:
    gm, _ = graph(lambda x, y, w: (x.view(-1, 4).t() + 0, x.softmax(-1)[0]))
    x = inputs_of(gm)[0]

    def base(name: str) -> Node:
        return base_of(calls_of(gm, name)[0])

    assert base("view") is x and base("permute" if calls_of(gm, "permute") else "aten.t") is x and base_of(x) is x
    softmax = calls_of(gm, "div" if calls_of(gm, "div") else "softmax")[-1]
    assert base("select") is softmax and base_of(softmax) is softmax
    elementwise = {str(node.target): is_elementwise(node) for node in calls_of(gm)}
    assert elementwise["aten.add.Tensor"] and not elementwise["aten.view.default"]
    assert not elementwise["aten.select.int"]
