"""probe: nodes run in fp64 as if they were never rounded, and two runs that are told alike are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, ops
from torch.fx import GraphModule, Node

from tests.strategies.small import calls_of, fakes, graph_of, inputs_of
from v41.passes.analysis.probe import LIMIT, ROWS, evaluate, integers, numbers, shape_drawn, spelling

BF16 = torch.bfloat16


def built(run: Callable[..., Any], *sizes: int, dtype: torch.dtype = BF16, device: str = "cpu") -> GraphModule:
    """run(x [T, 8], y [T, 8]), or of x with other sizes behind T."""
    with fakes() as new:
        rows = new.size()
        return graph_of(run, *(new(rows, *(sizes or (8,)), dtype=dtype, device=device) for _ in range(2)))


def result_of(gm: GraphModule) -> Node:
    (result,) = gm.graph.output_node().all_input_nodes
    return result


def value(gm: GraphModule, *given: Tensor, keep_types: bool = False) -> Tensor:
    known = dict(zip(inputs_of(gm), given, strict=True))
    return evaluate(calls_of(gm), known, result_of(gm), keep_types=keep_types)


def test_casts_among_float_types_are_left_out_unless_types_are_kept() -> None:
    gm = built(lambda x, y: (x.float() * 0.999).bfloat16() + y)
    x, y = (torch.arange(24.0, dtype=torch.float64).reshape(ROWS, 8) + 1 for _ in range(2))
    found = value(gm, x, y)
    assert found.dtype is torch.float64 and torch.equal(found, x * 0.999 + y)
    kept = value(gm, x.bfloat16(), y.bfloat16(), keep_types=True)
    assert kept.dtype is torch.bfloat16 and torch.equal(kept, (x.float() * 0.999).bfloat16() + y.bfloat16())


def test_integers_stay_integers() -> None:
    gm = built(lambda x, y: (x.to(torch.int32) // 2).to(torch.int64) * y, dtype=torch.int64)
    x = torch.arange(24).reshape(ROWS, 8)
    assert torch.equal(value(gm, x, x), x // 2 * x) and value(gm, x, x).dtype is torch.int64


def test_what_was_made_on_a_device_is_made_on_the_cpu_with_as_many_rows_as_are_drawn() -> None:
    gm = built(lambda x, y: torch.zeros(x.shape[0], device=x.device).unsqueeze(1) + x, device="cuda")
    x = torch.rand(ROWS, 8, dtype=torch.float64)
    assert torch.equal(value(gm, x, x), x)


def test_a_view_in_another_order_of_memory_than_the_graphs() -> None:
    gm = built(lambda x, y: x.view(-1, 4))
    x = torch.rand(8, ROWS, dtype=torch.float64).t()
    assert ops.aten.view.default in [node.target for node in calls_of(gm)]
    assert torch.equal(value(gm, x, x), x.reshape(-1, 4))


def test_draws_have_the_shape_of_a_node_and_hang_on_the_seed_alone() -> None:
    gm = built(lambda x, y: x + y, 5, 40)
    (total,) = calls_of(gm)
    assert shape_drawn(total) == [ROWS, 5, 40]
    for draw in integers, numbers:
        assert draw(total, 3).shape == (ROWS, 5, 40) and draw(total, 3).dtype is torch.float64
        assert torch.equal(draw(total, 3), draw(total, 3)) and not torch.equal(draw(total, 3), draw(total, 4))
    assert set(integers(total, 0).unique().tolist()) == set(range(-LIMIT, LIMIT + 1))
    assert abs(numbers(total, 0).mean()) < 0.2 and 0.8 < numbers(total, 0).std() < 1.2


# ---- spellings


def told(gm: GraphModule, result: Node | None = None, given: slice = slice(None)) -> str:
    return spelling(calls_of(gm), inputs_of(gm)[given], result or result_of(gm))


def test_names_are_not_told_and_nothing_else_is_left_out() -> None:
    def first(x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * 2

    one, same = built(first), built(first)
    for node in same.graph.nodes:
        node._rename(f"other_{node.name}") if node.op == "call_function" else None
    assert told(one) == told(same)
    others = {
        "wiring": built(lambda x, y: (y + x) * 2),
        "a number": built(lambda x, y: (x + y) * 3),
        "an operator": built(lambda x, y: (x - y) * 2),
        "a type": built(first, dtype=torch.float32),
        "a shape": built(first, 4),
    }
    digests = [told(one), *map(told, others.values()), told(one, result=calls_of(one)[0])]
    assert len({*digests}) == len(digests)


def test_sizes_are_numbers_wherever_they_were_computed() -> None:
    """They may be left out of the nodes that are run, or told."""
    made = {}
    for times in (1, 2):

        def run(x: Tensor, y: Tensor) -> Tensor:
            return torch.zeros(x.shape[0] * times) + 1  # noqa: B023  (it is traced at once)

        gm = built(run)
        full = result_of(gm).all_input_nodes[0]
        assert evaluate([full], {}, full).shape == (ROWS * times,)
        made[times] = spelling([full], [], full)
    assert made[1] != made[2]


@pytest.mark.parametrize("where", ["given", "not given"])
def test_a_size_is_told_as_a_number_and_a_tensor_that_is_not_given_by_nothing(where: str) -> None:
    gm = built(lambda x, y: x.view(x.shape[0], 2, 4) + y.view(-1, 2, 4))
    given = slice(None) if where == "given" else slice(1)
    again = built(lambda x, y: x.view(x.shape[0], 2, 4) + y.view(-1, 2, 4))
    assert told(gm, given=given) == told(again, given=given)
    assert told(gm) != told(gm, given=slice(1))
