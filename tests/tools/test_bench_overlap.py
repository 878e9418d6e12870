"""bench overlap: graphs are counted, bits compared; its verdict needs every bit, and no step slower where it is on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.plans import plan
from v41.errors import BenchNeedsGPU
from v41.tools.bench.overlap import bits, copied, holds, lanes_for, overview, same, shape_of
from v41.tools.cli import main, parser

DOT = """digraph dot {
subgraph cluster_1 {
"graph_1_node_0"[style="bold" shape="octagon" label="0 critical"];
"graph_1_node_1"[label="1 coefficients"];
"graph_1_node_2"[label="2 attention"];
"graph_1_node_3"[label="3 critical"];
"graph_1_node_0" -> "graph_1_node_1";
"graph_1_node_0" -> "graph_1_node_2" [headlabel=0];
"graph_1_node_1" -> "graph_1_node_3";
"graph_1_node_2" -> "graph_1_node_3";
}
}"""


def test_a_graph_is_counted() -> None:
    assert shape_of(DOT) == {"nodes": 4, "edges": 4, "forks": 1, "joins": 1}
    assert shape_of('digraph { "graph_1_node_0"[label="alone"]; }') == {"nodes": 1, "edges": 0, "forks": 0, "joins": 0}


@pytest.mark.parametrize("value", [torch.tensor([0.0, float("nan")]), torch.tensor([1, 2]), torch.ones(2, 2).t()])
def test_bits_are_compared(value: Tensor) -> None:
    kept = copied([value, 3])
    assert same(kept, [value.clone(), 4]) and bits(value).dtype == torch.uint8
    flipped = value.clone()
    flipped[-1] += 1
    assert same(kept, [flipped, 3]) is bool(value.isnan().any() if value.is_floating_point() else False)
    assert not same([torch.tensor([0.0])], [torch.tensor([-0.0])])


def record(**changes: Any) -> dict[str, Any]:
    graph = {"nodes": 4, "edges": 4, "forks": 1, "joins": 1}
    times = {f"{where}_{way}_us": 100.0 for where in ("captured", "uncaptured") for way in ("one", "side")}
    made = {"rows": 4, "on": True, "boundaries": 2, "same_bits": True, "gain_us": 0.0, "gain_us_a_boundary": 0.0}
    return made | times | {"side_graph": graph} | changes


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"captured_side_us": 102.0}, False),
        ({"captured_side_us": 102.0, "on": False}, True),
        ({"same_bits": False}, False),
    ],
)
def test_the_verdict(changes: dict[str, Any], good: bool) -> None:
    calm = {"uncaptured": 0, "captured": 0, "caches_same": True}
    assert holds({"records": [record(**changes)], "stress": [calm]}) is good
    assert not holds({"records": [record()], "stress": [calm | {"captured": 1}]})
    assert not holds({"records": [record()], "stress": [calm | {"caches_same": False}]})
    assert not holds({"records": [], "stress": []})
    assert overview([record(**changes)]).row_count == 1


def test_lanes_have_as_many_streams_and_events_as_the_plan() -> None:
    seen: list[Any] = []
    made = plan("x", "y", "a: x -> y,", "b@2: x -> z,", events=["start b", "b end"])
    lanes_for(lambda *facts: seen.append(facts), torch.device("cpu"), "drawn")(made)  # type: ignore[arg-type]
    assert seen == [(torch.device("cpu"), 2, 2, "drawn")]


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parser().parse_args(["bench", "overlap", "--cut", "--rows", "1", "16", "--stress", "100"])
    assert (arguments.cut, arguments.rows, arguments.stress) == (True, [1, 16], 100)
    if not torch.cuda.is_available():
        assert main(["bench", "overlap"]) == 2
        assert BenchNeedsGPU.fix[:20] in capsys.readouterr().err
