"""Whole passes as careless people write them, each with a program it damages and the rule that the driver tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, ops
from torch.fx import GraphModule, Node

from tests.strategies.tracing import trace
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.passes.same_values import RULE as VALUES
from v41.passes.verify import SHARED, WRITES
from v41.report import Decision

aten, c10d = ops.aten, ops._c10d_functional
Careless = Callable[[GraphModule], list[Decision]]
ORDER = "keeps collectives, random numbers and assertions in order"


def calls(gm: GraphModule, target: object) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def meets_others() -> GraphModule:
    """Two sums over ranks, each waited for."""
    gm = trace(lambda x: (x.relu(), x.tanh()), torch.randn(5, 4))
    for node in calls(gm, aten.relu.default) + calls(gm, aten.tanh.default):
        for target, rest in ((c10d.all_reduce.default, ("sum", "0")), (c10d.wait_tensor.default, ())):
            with gm.graph.inserting_after(node):
                after = gm.graph.call_function(target, (node, *rest))
            after.meta = dict(node.meta)
            node.replace_all_uses_with(after, delete_user_cb=lambda user, after=after: user is not after)
            node = after
    return gm


def swaps_collectives(gm: GraphModule) -> list[Decision]:
    first, second = calls(gm, c10d.all_reduce.default)
    first.prepend(second.args[0])  # type: ignore[arg-type]
    first.prepend(second)
    return []


def drops_a_wait(gm: GraphModule) -> list[Decision]:
    wait = calls(gm, c10d.wait_tensor.default)[0]
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(wait)
    return []


def merges_equal_nodes(gm: GraphModule) -> list[Decision]:
    """Common subexpressions, draws of random numbers among them."""
    seen: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            same = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)
                gm.graph.erase_node(node)
    return []


def written_twice() -> GraphModule:
    """In place: a write, a read, a write."""

    def step(x: Tensor, cache: Tensor) -> Tensor:
        cache[0] = x.sum(0)
        middle = cache.sum(0) * 2
        cache[0] = middle
        return middle

    gm = trace(step, torch.randn(5, 4), static=(torch.zeros(3, 4),))
    assert all(decision.applied for decision in reinplace_cache_writes(gm))
    gm.recompile()
    return gm


def loses_the_last_write(gm: GraphModule) -> list[Decision]:
    gm.graph.erase_node(calls(gm, aten.copy_.default)[-1])
    return []


def reads_before_the_write(gm: GraphModule) -> list[Decision]:
    """Moves the read of the memory itself in front of all writes, where its input is at hand."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], Tensor)]
    (read,) = (node for node in calls(gm, aten.sum.dim_IntList) if node.args[0] is inputs[-1])
    next(node for node in gm.graph.nodes if node.op == "call_function").prepend(read)
    return []


def copies_a_result_that_is_an_input(gm: GraphModule) -> list[Decision]:
    output = gm.graph.output_node()
    (view,) = output.args[0]  # type: ignore[misc]
    with gm.graph.inserting_before(output):
        fresh = gm.graph.call_function(aten.clone.default, (view,))
    fresh.meta = dict(view.meta)  # type: ignore[union-attr]
    output.args = ((fresh,),)
    return []


def edit(target: object, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Careless:
    """A pass that takes another argument than was written."""

    def careless(gm: GraphModule) -> list[Decision]:
        for node in calls(gm, target):
            node.args = change(node.args)
        return []

    return careless


def takes_the_row_before(gm: GraphModule) -> list[Decision]:
    """Off by one: the rows before the wanted ones."""
    for node in calls(gm, aten.index.Tensor):
        ((index,),) = node.args[1:]  # type: ignore[misc]
        with gm.graph.inserting_before(node):
            earlier = gm.graph.call_function(aten.sub.Tensor, (index, 1))
        earlier.meta = dict(index.meta)  # type: ignore[union-attr]
        node.args = (node.args[0], [earlier])
    return []


def sorts_up_and_turns_around(gm: GraphModule) -> list[Decision]:
    """The best first, and of equals the last."""
    for node in calls(gm, aten.sort.stable):
        node.kwargs = {**node.kwargs, "descending": False}
        for result in list(node.users):
            with gm.graph.inserting_after(result):
                turned = gm.graph.call_function(aten.flip.default, (result, [-1]))
            turned.meta = dict(result.meta)
            result.replace_all_uses_with(turned, delete_user_cb=lambda user, turned=turned: user is not turned)
    return []


def drops_a_cast(gm: GraphModule) -> list[Decision]:
    """A rounding to bf16 that is widened at once looks like nothing."""
    for wide in calls(gm, aten._to_copy.default) + calls(gm, ops.prims.convert_element_type.default):
        narrow = wide.args[0]
        if isinstance(narrow, Node) and narrow.args and narrow.target is wide.target:
            wide.replace_all_uses_with(narrow.args[0])  # type: ignore[arg-type]
    return []


def draws() -> GraphModule:
    return trace(lambda x: x + torch.rand(4) - torch.rand(4), torch.randn(5, 4))


def normed_rows() -> GraphModule:
    return trace(lambda m: m / (m.sum(-1) + 1e-2).unsqueeze(-1), torch.rand(5, 4, 4))


CARELESS: dict[str, tuple[Careless, Callable[[], GraphModule], str]] = {
    "two collectives change places": (swaps_collectives, meets_others, ORDER),
    "a collective is not waited for": (drops_a_wait, meets_others, ORDER),
    "two draws become one": (merges_equal_nodes, draws, ORDER),
    "a write of a cache is lost": (loses_the_last_write, written_twice, WRITES),
    "a read moves in front of a write": (reads_before_the_write, written_twice, WRITES),
    "a returned view becomes a copy": (
        copies_a_result_that_is_an_input,
        lambda: trace(lambda x: x.view(-1), static=(torch.randn(3, 4),)),
        SHARED,
    ),
    "rows are normed along columns": (
        edit(aten.sum.dim_IntList, lambda args: (args[0], [-2], *args[2:])),
        normed_rows,
        VALUES,
    ),
    "another eps is taken": (edit(aten.add.Tensor, lambda args: (args[0], 1e-8)), normed_rows, VALUES),
    "the row before is taken": (
        takes_the_row_before,
        lambda: trace(lambda x, last: x[last], torch.randn(5, 4), torch.zeros(5, dtype=torch.long)),
        VALUES,
    ),
    "of equals the last is taken": (
        sorts_up_and_turns_around,
        lambda: trace(lambda x: x.sign().sort(dim=-1, descending=True, stable=True).indices, torch.randn(5, 8)),
        VALUES,
    ),
    "a rounding point goes": (
        drops_a_cast,
        lambda: trace(lambda x: x.bfloat16().float() + 1, torch.randn(5, 4)),
        VALUES,
    ),
}
