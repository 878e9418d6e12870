"""Costs: torch's own count of flops, bytes worked out by hand, and what one kernel saves against its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

from tests.counted import calls_of
from tests.invariants import copy_program
from tests.lowering.test_packed_products import outlined
from tests.passes.test_trim_replay import trimmed
from tests.strategies.rows import build, fakes, step
from tests.strategies.tracing import trace
from v41.passes.analysis import cost
from v41.passes.analysis.cost import Cost, Costs, decoding
from v41.passes.analysis.counts import computes
from v41.passes.matching import shape
from v41.regions import body_of, outline, regions

ROWS, REQUESTS, LONGEST, LOGITS, KEPT = (str(fakes()[i].shape[0]) for i in (0, 8, 9, 10, 11))
CHUNKS = [(0, 4), (3, 5), (1, 1)]  # 10 rows, 3 requests, 3 rows of logits


def numbers(of: Cost) -> Cost:
    return of.at(**{ROWS: 10, REQUESTS: 3, LONGEST: 5, LOGITS: 3})


def nodes_of(gm: GraphModule, name: str) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and name in str(node.target)]


BY_HAND = [  # step, operator, bytes read, written, flops; 10 rows of 8 channels in fp32, numbers of rows in int64
    ("product", "aten.mm", 4 * (10 * 8 + 64), 4 * 10 * 8, 2 * 10 * 8 * 8),
    ("stacked", "aten.add", 4 * 10 * 8, 4 * 10 * 8, 10 * 8),  # a number is no operand
    ("stacked", "aten.cat", 2 * 4 * 10 * 8, 2 * 4 * 10 * 8, 0),
    ("stacked", "aten.sum", 2 * 4 * 10 * 8, 4 * 10 * 8, 2 * 10 * 8),
    ("stacked", "aten.view", 0, 0, 0),
    ("table", "aten.index.Tensor", 4 * 10 * 8 + 2 * 8 * 10, 4 * 10 * 8, 0),  # of the cache what is taken, and indices
    ("cache", "aten.index_put", 4 * (5 * 48 * 8 + 10 * 8) + 2 * 8 * 10, 4 * 5 * 48 * 8, 0),  # functional: a copy
    ("grouped experts", "_grouped_mm", 2 * (20 * 8 + 5 * 64) + 4 * 5, 2 * 20 * 8, 2 * 20 * 8 * 8),  # all 5 experts
    ("grouped experts", "searchsorted", 8 * 20 + 8 * 5, 4 * 5, 0),
]


@pytest.mark.parametrize(("program", "operator", "read", "written", "flops"), BY_HAND)
def test_an_operator_moves_what_it_must(program: str, operator: str, read: int, written: int, flops: int) -> None:
    gm, _ = build([program])
    found = numbers(Costs().node(nodes_of(gm, operator)[0]))
    assert found == Cost(read, written, flops, int(read > 0))


def test_few_rows_read_few_experts() -> None:
    gm, _ = build(["grouped experts"])
    node = nodes_of(gm, "_grouped_mm")[0]
    one, two = (Costs().node(node).at(**{ROWS: rows}).read for rows in (1, 2))
    assert (one, two) == (2 * (2 * 8 + 2 * 64) + 4 * 5, 2 * (4 * 8 + 4 * 64) + 4 * 5)  # two picks a row


def test_packed_experts_that_no_row_meets_are_neither_read_nor_decoded() -> None:
    """Four experts of 64 by 64, 5 rows with 2 picks each in the trace, so both numbers of rows meet all or few."""
    (call,) = regions(outlined(), "experts")
    found = Costs().node(call)
    (rows,) = (str(symbol) for symbol in found.read.free_symbols)
    few, all_of_them, more = (found.at(**{rows: count}) for count in (1, 2, 3))
    each = 3 * (64 * 32 + 64 * 2)  # bytes of an expert: codes and scales of three products
    a_row = (all_of_them.read - few.read) - 2 * each
    assert more.read - all_of_them.read == a_row and few.read == 2 * each + a_row
    decoded = Costs().parts(body_of(call)).at(**{rows: 1}).flops - few.flops
    whole = sum(Costs().node(node).flops or 0 for node in decoding(body_of(call)) if computes(node))
    assert decoded == whole / 2 > 0


def test_what_others_read_too_is_decoded_whole() -> None:
    (call,) = regions(copy_program(outlined()), "experts")
    body = body_of(call)
    (first, *_) = body.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    before = len(decoding(body))
    results = body.graph.output_node().args[0]
    body.graph.output_node().args = ((*results, first.args[1]),)  # type: ignore[misc]
    assert 0 < len(decoding(body)) < before


def test_a_write_in_place_leaves_the_rest_of_the_cache() -> None:
    gm, inputs = build(["cache"])
    (put,) = nodes_of(gm, "index_put")
    put.target = torch.ops.aten.index_put_.default
    found = numbers(Costs().node(put))
    assert (found.read, found.written) == (4 * 10 * 8 + 2 * 8 * 10, 4 * 10 * 8)
    assert inputs["cache"] in put.all_input_nodes


@pytest.mark.parametrize("program", ["product", "einsum in groups", "heads", "transposed product"])
def test_products_cost_what_torch_counts(program: str) -> None:
    gm, _ = build([program])
    gm.recompile()
    with FlopCounterMode(display=False) as counter:
        gm(*step(CHUNKS))
    products = [node for name in ("aten.mm", "aten.bmm") for node in nodes_of(gm, name)]
    assert products
    assert sum(numbers(Costs().node(node)).flops for node in products) == counter.get_total_flops() > 0


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
def test_numbers_among_the_operands_of_a_product_are_left_as_they_are(name: str) -> None:
    """A convolution has steps, pads and no bias beside its tensors, and a flag that says which way round it is."""
    x, w, convolve = torch.randn(10, 4, 8), torch.randn(4, 4, 3), getattr(torch.nn.functional, name)
    gm = trace(lambda x, w: convolve(x, w, stride=2, padding=1), x, static=[w])
    (node,) = nodes_of(gm, "convolution")
    with FlopCounterMode(display=False) as counter:
        convolve(x, w, stride=2, padding=1)
    (rows,) = (str(symbol) for symbol in Costs().node(node).read.free_symbols)
    assert Costs().node(node).at(**{rows: 10}).flops == counter.get_total_flops() > 0


def test_what_is_trimmed_costs_by_the_rows_that_are_kept() -> None:
    """And what makes the cache's entries by all of them."""
    _, gm, _ = trimmed(["product", "cache", "product"], 6)
    early, late = nodes_of(gm, "aten.mm")
    rows = {ROWS: 1000, KEPT: 7}
    assert [Costs().node(node).at(**rows).flops for node in (early, late)] == [2 * n * 8 * 8 for n in (1000, 7)]
    whole = Costs().program(gm)
    assert {ROWS, KEPT} <= {str(symbol) for symbol in whole.flops.free_symbols}


def test_a_program_costs_what_its_nodes_cost() -> None:
    gm, _ = build(["norm", "experts", "window", "ring"])
    costs = Costs()
    nodes = [costs.node(node) for node in gm.graph.nodes if node.op == "call_function"]
    whole = costs.program(gm)
    assert whole == costs.parts(gm)
    for field in ("read", "written", "launches"):
        assert getattr(numbers(whole), field) == sum(getattr(numbers(node), field) for node in nodes)
    assert str(whole.read.free_symbols) != "set()"


class Concrete(Interpreter):
    """Puts what a node gives in a run in the place of its fake tensor."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = value
        return value


@pytest.mark.parametrize("rows", [1, 128])
def test_numbers_for_symbols_give_what_a_run_has(rows: int) -> None:
    gm, _ = build(["norm", "grouped experts", "window", "heads", "ring", "by request", "cumulative", "position"])
    costs = Costs()
    whole, parts = costs.program(gm), costs.parts(gm)
    Concrete(gm).run(*step([(0, rows)]), enable_io_processing=False)
    sizes = {ROWS: rows, REQUESTS: 1, LONGEST: rows, LOGITS: 1}
    assert Costs().program(gm) == whole.at(**sizes) == parts.at(**sizes)


def test_an_unknown_operator_is_named_and_has_bytes() -> None:
    gm, _ = build(["product"])
    (node,) = nodes_of(gm, "aten.mm")
    assert Costs().program(gm).unknown == ()
    node.target, node.args = torch.ops.aten.linalg_eig.default, node.args[:1]
    found = Costs().node(node)
    assert (found.flops, found.unknown) == (None, ("aten.linalg_eig.default",))
    assert numbers(found).moved == 2 * 4 * 10 * 8
    assert Costs().program(gm).unknown == found.unknown


def region() -> tuple[GraphModule, Node]:
    """norm, product, window and table as one region; what it reads of rows and caches are operands."""
    gm, _ = build(["norm", "product", "table"])
    inside = [node for node in gm.graph.nodes if node.op == "call_function" and node.meta["val"] is not None]
    logits = gm.graph.output_node().args[0][0]  # type: ignore[index]
    inside = [node for node in inside if node is not logits and isinstance(node.meta["val"], Tensor)]
    return gm, outline(gm, inside, kind="all")


def test_a_region_moves_its_operands_and_results_once() -> None:
    gm, call = region()
    costs = Costs()
    found, parts = numbers(costs.node(call)), numbers(costs.parts(gm))
    x, weight, taken, indices = 4 * 10 * 8, 4 * 64, 4 * 10 * 8, 2 * 8 * 10
    assert (found.read, found.written, found.launches) == (x + weight + taken + indices, 4 * 10 * 8, 1)
    assert found.flops == parts.flops
    assert parts.moved > found.moved and parts.launches > 5


def test_a_broadcast_is_read_once_and_nothing_of_an_operand_nobody_reads() -> None:
    gm, _ = build(["stacked"])
    graph = gm.graph
    add = nodes_of(gm, "aten.add")[0]
    with graph.inserting_before(add):
        expanded = graph.call_function(torch.ops.aten.expand.default, (add.args[0], [3, -1, -1]))
    value = fakes()[0]
    with value.fake_mode:  # type: ignore[attr-defined]
        expanded.meta["val"] = value.expand(3, -1, -1)
    assert cost.bytes_of(expanded) == cost.bytes_of(add.args[0])  # type: ignore[arg-type]
    assert shape(expanded)[0] == 3
    free = graph.placeholder("free")
    free.meta["val"] = value
    assert cost.taken(free) == 0


def test_work_grows_with_the_program() -> None:
    def calls(steps: int) -> int:
        gm, _ = build(["norm", "product", "experts", "window"] * steps)
        return calls_of(lambda: Costs().program(gm))

    calls(2)  # what is remembered of shapes
    assert calls(40) < 20 * calls(4)
