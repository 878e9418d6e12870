"""capturable: each kind of node that no CUDA graph can hold is told with its reason, and what looks like one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import SymInt, Tensor, ops
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from tests.strategies.small import calls_of, fakes, graph_of, inputs_of
from v41.passes.analysis.capturable import Obstacles
from v41.passes.analysis.sizes import NodeSizes
from v41.regions import outline

CUDA = torch.device("cuda")
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]  # x [T, 8] and on the device as well: a number [], a mask
# [T], rows [T]; on the CPU: a number []


def traced(run: Run) -> GraphModule:
    with fakes() as new:
        rows = new.size()
        x, number = new(rows, 8, device="cuda"), new(device="cuda")
        mask, index = new(rows, dtype=torch.bool, device="cuda"), new(rows, dtype=torch.int64, device="cuda")
        return graph_of(run, x, number, mask, index, new())


def why(gm: GraphModule, device: torch.device = CUDA) -> list[str]:
    """The obstacles of all nodes, in order."""
    told = Obstacles(device, NodeSizes())
    return [reason for reason in map(told.of, gm.graph.nodes) if reason is not None]


GOES: dict[str, Run] = {
    "work": lambda x, number, mask, index, host: (x * 2 + number).softmax(-1) + x.sum(0),
    "a size of an argument": lambda x, number, mask, index, host: torch.arange(x.shape[0], device=x.device) + index,
    "a write by number": lambda x, number, mask, index, host: x.index_put((index,), x),
    "a mask that is no index": lambda x, number, mask, index, host: torch.where(mask.unsqueeze(1), x, 0),
    "a constant number of the host": lambda x, number, mask, index, host: x * (torch.tensor(2.0) + 1),
}
ASKS: dict[str, tuple[Run, str]] = {
    "a write by a mask": (
        lambda x, number, mask, index, host: x.index_put((mask,), number),
        "aten.index_put counts the rows of a mask",
    ),
    "a write by a mask of bytes": (
        lambda x, number, mask, index, host: ops.aten.index_put.default(x, [mask.to(torch.uint8)], number),
        "aten.index_put counts the rows of a mask",
    ),
    "a copy to the host": (lambda x, number, mask, index, host: x.cpu(), "cpu"),
    "a number of the host": (lambda x, number, mask, index, host: x * host, "aten.mul.Tensor uses a tensor on cpu"),
    "a number made of one of the host": (
        lambda x, number, mask, index, host: x * (host + 1),
        "aten.add.Tensor uses a tensor on cpu",
    ),
    "constants of the host": (
        lambda x, number, mask, index, host: x * torch.ones(8).to(x.device),
        "uses a tensor on cpu",
    ),
}


@pytest.mark.parametrize("name", GOES)
def test_launches_are_captured(name: str) -> None:
    assert why(traced(GOES[name])) == []


@pytest.mark.parametrize("name", ASKS)
def test_what_asks_the_host_is_told_why(name: str) -> None:
    run, reason = ASKS[name]
    told = why(traced(run))
    assert told and reason in told[0]


def test_on_the_host_itself_its_tensors_are_no_obstacle() -> None:
    with fakes() as new:
        gm = graph_of(lambda x, number: x * number + torch.ones(8), new(new.size(), 8), new())
    assert why(gm, torch.device("cpu")) == [] and len(why(gm)) >= 2


# ---- what has a body


def called(op: Any, args: Any, like: Tensor | SymInt, **inputs: Tensor) -> GraphModule:
    """A program of one call, with the names of inputs among its arguments, and `like` for its result."""
    graph, given = Graph(), dict[str, Node]()
    for name, value in inputs.items():
        given[name] = graph.placeholder(name)
        given[name].meta["val"] = value
    node = graph.call_function(op, map_aggregate(args, lambda arg: given[arg] if isinstance(arg, str) else arg))
    node.meta["val"] = like
    graph.output((node,))
    return GraphModule({}, graph)


def test_a_branch_is_taken_by_data_and_a_functional_call_is_none() -> None:
    with fakes() as new:
        x = new(4, device="cuda")
    assert why(called(ops.higher_order.cond, ("x",), x, x=x)) == ["cond may take a branch by data"]
    assert why(called(ops.higher_order.auto_functionalized, ("x",), x, x=x)) == []
    assert why(called(ops.higher_order.auto_functionalized_v2, ("x",), x, x=x)) == []


def test_sizes_and_numbers_out_of_data() -> None:
    with fakes() as new:
        rows, found = new.size(), new.size()
        x, few = new(rows, device="cuda"), new(found, device="cuda")
        nonzero = called(ops.aten.nonzero.default, ("x",), few, x=x)
        again = called(ops.aten.relu.default, ("x",), few, x=few)
        number = called(ops.aten._local_scalar_dense.default, ("x",), found, x=new(device="cuda"))
    assert why(nonzero) == [f"aten.nonzero makes the size {found} out of data"]
    assert why(again) == []
    assert why(number) == ["aten._local_scalar_dense hands a number to the host"]


@pytest.mark.parametrize("op", [ops.aten.index_put.default, ops.aten.index_put_.default])
def test_one_mask_among_indices_is_counted(op: Any) -> None:
    name = str(op).removesuffix(".default")
    with fakes() as new:
        x, number = new(4, 8, device="cuda"), new(device="cuda")
        mask, index = new(8, dtype=torch.bool, device="cuda"), new(8, dtype=torch.int64, device="cuda")
    of = {"x": x, "mask": mask, "index": index, "number": number}
    for indices in (["index", "mask"], ["mask", "index"], [None, "mask"]):
        assert why(called(op, ("x", indices, "number"), x, **of)) == [f"{name} counts the rows of a mask"]
    assert why(called(op, ("x", [None, "index"], "number"), x, **of)) == []
    assert why(called(ops.aten.index.Tensor, ("x", [None, "index"]), x, **of)) == []


def test_a_region_is_told_by_what_is_inside() -> None:
    def inside(name: str) -> Node:
        run = ASKS[name][0] if name in ASKS else GOES[name]
        gm = traced(run)
        return outline(gm, calls_of(gm)[-1:], kind="probe")

    told = Obstacles(CUDA, NodeSizes())
    for _ in range(2):  # the second time as remembered
        assert told.of(asks := inside("a write by a mask")) == told.of(asks) == ASKS["a write by a mask"][1]
        assert told.of(goes := inside("a write by number")) is None and told.of(goes) is None


def test_inputs_and_results_are_no_obstacle() -> None:
    gm = traced(ASKS["a number of the host"][0])
    told = Obstacles(CUDA, NodeSizes())
    assert [told.of(node) for node in (*inputs_of(gm), gm.graph.output_node())] == [None] * 6
