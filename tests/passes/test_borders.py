"""borders: pieces end where other sizes come in and where capture must break; results, writes and order stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import check_borders, check_plan_runs
from tests.strategies.tracing import trace
from v41.passes.borders import CHECKS, FEW
from v41.passes.check_plan import check_plan
from v41.passes.partition import partition
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.plan import Piece, Plan
from v41.regions import outline

aten = torch.ops.aten
X, R, CACHE = torch.randn(3, 4), torch.randn(3, 4), torch.zeros(8, 4)
SIZES = ("rows", "requests")


def much(x: Tensor) -> Tensor:
    """So many nodes that they deserve a piece."""
    for _ in range(FEW):
        x = x + 1
    return x


def traced(function: Callable[..., Any], *, seams: bool = False) -> GraphModule:
    """function(x [rows, 4], r [requests, 4], cache [8, 4]); `seams`: every tanh of it is a region."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        gm = trace(function, X, R, static=(CACHE,), sizes=SIZES)
    reinplace_cache_writes(gm)
    for node in [node for node in gm.graph.nodes if seams and node.target is aten.tanh.default]:
        outline(gm, [node], kind="seam")
    return gm


def planned(function: Callable[..., Any], *, seams: bool = False) -> Plan:
    """Its plan along rows, which is sound and does what `function` does."""
    gm = traced(function, seams=seams)
    plan = partition(gm, cut_at=["seam"], along="rows")
    check_plan(plan)
    check_borders(plan)
    check_plan_runs(gm, plan)
    return plan


def work(plan: Plan) -> Iterator[Piece]:
    """The pieces but for checks of sizes."""
    return (piece for piece in plan.pieces if piece.border != CHECKS)


def told(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(piece.border, plan.names_of(piece)) for piece in work(plan)]


def ragged(x: Tensor, r: Tensor) -> Tensor:
    """[rows, 4]: every row against all requests."""
    return (x @ r.T) @ r


def test_kept_rows_are_work_of_their_own_and_taking_them_lies_between() -> None:
    def step(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, z = much(x), much(much(k) + 1)
        return y, z, much(z + much(ragged(y, k)).sum(0))

    gm = trace(step, X, R, sizes=("rows", "last 3"))
    plan = partition(gm, along="rows")
    check_plan(plan)
    check_borders(plan)
    check_plan_runs(gm, plan)
    found = [names for border, names in told(plan)]
    assert found[:2] == [("rows",), ("last 3",)] and ("last 3", "rows") in [tuple(sorted(names)) for names in found]
    assert told(plan)[1][0] == "end of rows"
    assert [each for each in partition(gm).pieces] != list(plan.pieces)


def test_work_with_other_sizes_is_a_piece() -> None:
    plan = planned(lambda x, r, cache: much(ragged(much(x), r)))
    assert told(plan) == [
        (f"end of {CHECKS}", ("rows",)),
        ("use of requests", ("requests", "rows")),
        ("end of use of requests", ("rows",)),
    ]
    assert all(piece.uncapturable is None for piece in plan.pieces)
    assert plan.pieces[0].border == CHECKS and plan.pieces[0].returns == ()


def test_along_nothing_it_is_no_piece() -> None:
    gm = traced(lambda x, r, cache: much(ragged(much(x), r)))
    for along in (None, "another size"):
        (piece,) = partition(gm, along=along).pieces
        assert piece.border == "start of the graph" and len(piece.sizes) == 2


def test_ragged_work_waits_for_its_reader() -> None:
    """r + 1 and its view stand among the even work, and are read behind it."""

    def step(x: Tensor, r: Tensor, cache: Tensor) -> Tensor:
        y = much(x)
        shifted = (r + 1).relu()[:, :4]
        return much(ragged(much(y), shifted))

    plan = planned(step)
    assert [names for _, names in told(plan)] == [("rows",), ("requests", "rows"), ("rows",)]


def test_what_reads_a_written_cache_does_not_wait() -> None:
    """Read in front of the write, used behind it."""

    def step(x: Tensor, r: Tensor, cache: Tensor) -> Tensor:
        y = much(x)
        before = r @ cache[:4]
        cache[torch.arange(x.shape[0])] = y
        return much(much(y) + before.sum())

    plan = planned(step)
    reads, writes = ([i for i, piece in enumerate(work(plan)) if found(piece)] for found in (
        lambda piece: "requests" in plan.names_of(piece), lambda piece: piece.writes))  # fmt: skip
    assert reads == [1, 3] and writes == [2]


def test_a_view_waits_behind_what_it_views() -> None:
    """Behind a region, the sum waits for ragged work, and its view, which has no size, for even work."""

    def step(x: Tensor, r: Tensor, cache: Tensor) -> Tensor:
        y = x.tanh()
        total = r.sum(0)[None]
        return much(much(y) + total)

    plan = planned(step, seams=True)
    assert [border for border, _ in told(plan)] == [
        "region seam", "end of region seam", "use of requests", "end of use of requests"]  # fmt: skip


def test_a_few_even_nodes_beside_ragged_ones_join_them() -> None:
    plan = planned(lambda x, r, cache: much(ragged(ragged(much(x), r) + 1, r)))
    assert [border for border, _ in told(plan)] == [f"end of {CHECKS}", "use of requests", "end of use of requests"]
    many = planned(lambda x, r, cache: much(ragged(much(ragged(much(x), r)), r)))
    assert len(told(many)) == 5


def test_regions_side_by_side_are_pieces_of_their_own() -> None:
    plan = planned(lambda x, r, c: x.tanh().tanh() + 1, seams=True)
    assert [piece.border for piece in work(plan)] == ["region seam", "region seam", "end of region seam"]


def test_a_norm_with_nothing_behind_it_is_no_piece_of_its_own() -> None:
    gm = traced(lambda x, r, c: (x.tanh() * 2).tanh() * 3)
    for node, then in zip([n for n in gm.graph.nodes if n.target is aten.tanh.default], ((), ("fp8",)), strict=True):
        outline(gm, [node], kind="seam", then=then)
    plan = partition(gm, cut_at=["seam"], along="rows")
    assert [piece.border for piece in work(plan)][-2:] == ["region seam", "end of region seam"]
    assert sum(piece.border == "region seam" for piece in plan.pieces) == 1


def test_a_region_beside_ragged_work_stays_a_piece() -> None:
    plan = planned(lambda x, r, cache: ragged(ragged(x, r).tanh(), r), seams=True)
    assert [border for border, _ in told(plan)] == ["use of requests", "region seam", "use of requests"]


def compress(x: Tensor, r: Tensor, cache: Tensor) -> Tensor:
    return much(much(x)[(x.sum(-1) > 0).nonzero().squeeze(-1)])


def number(x: Tensor, r: Tensor, cache: Tensor) -> Any:
    y = much(x)
    return much(y), y.sum().item()


def masked(x: Tensor, r: Tensor, cache: Tensor) -> Tensor:
    y = much(x)
    cache[cache.sum(-1) > 0] = y.sum(0)
    return much(y + cache.sum())


HOST = {  # -> the op, why, and whether each piece behind the checks can be captured
    "nonzero": (compress, "aten.nonzero makes the size u1 out of data", [True, False]),
    "item": (number, "aten._local_scalar_dense hands a number to the host", [True, False]),
    "a mask": (masked, "aten.index_put_ counts the rows of a mask", [True, False, True]),
}


@pytest.mark.parametrize("name", HOST)
def test_what_asks_the_host_is_a_piece_that_cannot_be_captured(name: str) -> None:
    program, why, captured = HOST[name]
    plan = planned(program)
    pieces = list(work(plan))
    assert [piece.uncapturable is None for piece in pieces] == captured
    (host,) = (piece for piece in pieces if piece.uncapturable)
    assert host.uncapturable == why and host.border == f"not capturable: {why}"
    assert f"{why}  not capturable" in str(plan)


def insert(gm: GraphModule, after: Node, op: Any, *args: Any) -> Node:
    """A call of `op` whose result is like that of `after`, which it takes the readers of."""
    with gm.graph.inserting_after(after):
        node = gm.graph.call_function(op, (after, *args))
    node.meta = dict(after.meta)
    after.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    return node


@pytest.mark.parametrize("apart", [False, True])
def test_a_collective_and_its_wait_are_one_piece(apart: bool) -> None:
    """Between them, if apart, stand a region and work with other sizes."""
    gm = traced(lambda x, r, cache: much(ragged(much(x).tanh(), r)), seams=True)
    sums = [node for node in gm.graph.nodes if node.target is aten.add.Tensor]
    last = sums[FEW - 1]
    wait, begin = torch.ops._c10d_functional.wait_tensor.default, torch.ops._c10d_functional.all_reduce.default
    reduced = insert(gm, last, begin, "sum", "0")
    waited = insert(gm, reduced, wait)
    if apart:
        product = next(node for node in gm.graph.nodes if node.target is aten.mm.default)
        (seam,) = (node for node in gm.graph.nodes if node.name.startswith("seam"))
        waited.replace_all_uses_with(last)  # the region no longer needs it
        product.append(waited)
        added = insert(gm, sums[-1], aten.add.Tensor, waited)
        assert list(gm.graph.nodes).index(seam) < list(gm.graph.nodes).index(waited) and added.args[1] is waited
    gm.graph.lint()
    plan = partition(gm, cut_at=["seam"], along="rows")
    check_plan(plan)
    (home,) = (p for p in plan.pieces if any(n.target is begin for n in p.body.graph.nodes))
    assert any(node.target is wait for node in home.body.graph.nodes)
    assert ("region seam" in [piece.border for piece in plan.pieces]) is not apart


STEPS = st.lists(
    st.sampled_from(["much", "add", "ragged", "view", "keep", "write", "read", "wide", "seam", "sum of both"]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=settings().max_examples // 2)
@given(STEPS)
def test_any_program(steps: list[str]) -> None:
    def program(x: Tensor, r: Tensor, cache: Tensor) -> Any:
        y, z, kept = x, r, []
        for step in steps:
            match step:
                case "much":
                    y = much(y)
                case "add":
                    y = y + x
                case "ragged":
                    y = ragged(y, z)
                case "view":
                    y, z = y[:, None].flatten(1), z.view(-1, 2, 2).flatten(1)
                case "keep":
                    kept += [y + 1, z]
                case "write":
                    cache[torch.arange(x.shape[0])] = y + z.sum(0)
                case "read":
                    z = z + cache[0]
                case "wide":
                    z = z.relu() + 1
                case "seam":
                    y = y.tanh()
                case "sum of both":
                    y = y + z.sum()
        return y.relu(), z + 1, *kept

    gm = traced(program, seams=True)
    plan = partition(gm, cut_at=["seam"], along="rows")
    check_plan(plan)
    check_borders(plan)
    check_plan_runs(gm, plan)
    in_pieces = Counter(node.target for p in plan.pieces for node in p.body.graph.nodes if computes(node))
    assert in_pieces == Counter(node.target for node in gm.graph.nodes if computes(node) and node.users)
    assert writes(piece.body for piece in plan.pieces) == writes([gm])
    for piece in plan.pieces:
        assert piece.border == "region seam" or not any(node.name.startswith("seam") for node in piece.body.graph.nodes)
        assert piece.uncapturable is None
        if piece.border.startswith("end of"):
            assert plan.names_of(piece) in [(), ("rows",)]


COMPUTE = (aten.add.Tensor, aten.relu.default, aten.mm.default, aten.sum.dim_IntList)
WRITES = ("aten.copy_.default", "aten.index_put_.default")


def computes(node: Node) -> bool:
    return node.target in COMPUTE


def writes(programs: Any) -> list[str]:
    return [str(node.target) for gm in programs for node in gm.graph.nodes if str(node.target) in WRITES]
