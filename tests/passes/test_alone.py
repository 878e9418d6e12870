"""Passes inside plain Inductor, on models that are not V4.1: what they find there and what they leave."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule

import v41
from tests.passes.test_drop_lone_collectives import all_reduced, alone
from tests.passes.test_restrict_index_scores import marked, steps
from tests.strategies import (
    attention,
    combines,
    compressors,
    engrams,
    experts,
    gates,
    index_scores,
    mhc,
    norms,
    output_projections,
    reduced,
    rows,
)
from tests.strategies.ranks import ranks
from tests.strategies.restricted_scores import pair
from tests.strategies.whole_programs import inputs_of
from v41.passes.alone import in_order, inductor_pass
from v41.passes.canonicalize import canonicalize
from v41.passes.drop_lone_collectives import drop_lone_collectives
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.fuse_all_reduce import fuse_all_reduce
from v41.passes.outline_experts import outline_experts
from v41.passes.outline_mhc import outline_mhc
from v41.passes.outline_norm_quantise import outline_norm_quantise
from v41.passes.pipeline import PIPELINE, Pass
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.passes.restrict_index_scores import restrict_index_scores
from v41.passes.take_in_combine import take_in_combine
from v41.passes.trim_replay import trim_replay
from v41.regions import inline, region_of, regions
from v41.report import CompileReport, Decision

PRE, POST = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
CPP = [False, pytest.param(True, marks=pytest.mark.slow)]


def hyper_connection(x: Tensor, w: Tensor) -> Tensor:
    """Three residual streams x [T, 3, D] mixed by a matrix that five normalisations make nearly doubly stochastic."""
    m = (x @ w).exp()
    for turn in range(5):
        m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6)
    return m.transpose(1, 2) @ x


def write_rows(cache: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """Rows go into a cache and are read back from it."""
    cache[slots] = x * 2
    return cache[slots] + 1


def project(x: Tensor, w: Tensor) -> Tensor:
    """Nothing that Inductor generates C++ for."""
    return x @ w


def compiled(fn: Callable[..., Any], *args: Any, cpp: bool = False, **options: Any) -> tuple[Any, list[CompileReport]]:
    """What plain Inductor makes of fn(*args) under `options`, and what our passes reported meanwhile.

    Without `cpp` its code calls eager's kernels, since generating C++ takes a minute of a processor the first time.
    """
    torch.compiler.reset()
    counters.clear()
    options["fallback_by_default"] = not cpp
    with torch.no_grad(), v41.collect() as reports:
        result = torch.compile(fn, options=options, dynamic=False)(*args)
    return result, reports


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.mark.parametrize("cpp", CPP)
def test_a_hyper_connection_that_is_not_v41_is_folded_and_keeps_its_values(cpp: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.rand(4, 3, 8), torch.rand(8, 3)
    plain, none = compiled(hyper_connection, x, w, cpp=cpp)
    ours, (report,) = compiled(hyper_connection, x, w, cpp=cpp, **{POST: inductor_pass(fold_sinkhorn, verify=True)})
    assert none == []
    folded = report.passes[-1]
    assert [run.name for run in report.passes] == ["canonicalize", "fold_sinkhorn"]
    assert [run.failure for run in report.passes] == [None, None]
    assert [decision.region.attrs for decision in folded.decisions if decision.region] == [
        {"first_axis": -1, "steps": 5, "eps": 1e-6}
    ]
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(ours, hyper_connection(x, w))


@pytest.mark.parametrize("cpp", CPP)
@pytest.mark.parametrize("where", [PRE, POST])
def test_a_cache_write_is_in_place_and_keeps_values_and_cache(where: str, cpp: bool) -> None:
    torch.manual_seed(0)
    caches, slots, x = [torch.zeros(6, 4) for _ in range(2)], torch.tensor([4, 1]), torch.rand(2, 4)
    expected = write_rows(caches[0], slots, x)
    ours, (report,) = compiled(
        write_rows, caches[1], slots, x, cpp=cpp, **{where: inductor_pass(reinplace_cache_writes, verify=True)}
    )
    assert [(run.name, run.applied, run.failure) for run in report.passes] == [("reinplace_cache_writes", 1, None)]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(caches[1], caches[0])


SITES: dict[str, tuple[Any, str]] = {  # a site as others may have it, and the pass that finds it
    "mhc": (mhc.Stack(sites=1, iters=2), "outline_mhc"),
    "norm": (norms.Row(rope="the model's", format="fp8"), "outline_norm_quantise"),
    "compressor": (compressors.Pooling(rope="the model's", format="fp4 record"), "outline_compressor"),
    "look-up": (engrams.Lookup(), "outline_engram"),
    "engram gate": (engrams.Gate(), "outline_engram"),
    "gate": (gates.Router(), "outline_gate"),
    "attention": (attention.Spelling(), "outline_attention"),
    "index scores": (index_scores.Indexer(), "outline_index_scores"),
    "experts": (experts.Mixture(), "outline_experts"),
    "projection": (output_projections.Projection(), "outline_output_projection"),
}
QUICK = ("projection",)  # its views Inductor has as reshapes


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SITES]
)
def test_whatever_is_outlined_is_found_in_inductors_graph_and_keeps_its_values(name: str) -> None:
    site, pass_name = SITES[name]
    torch.manual_seed(0)
    fn, given, weights = inputs_of(site)
    given = [each.clone() for each in given]
    for row, size in zip(given, getattr(site, "all_sizes", ()) or ["rows"] * len(given), strict=True):
        mark_unbacked(row, 0, shape_id=size)
    plain, _ = compiled(fn, *given, *weights)
    ours, (report,) = compiled(fn, *given, *weights, **{POST: inductor_pass(*(p.run for p in PIPELINE), verify=True)})
    assert [run.failure for run in report.passes if run.failure] == []
    assert next(run for run in report.passes if run.name == pass_name).applied >= 1
    pairs = zip(_flat(ours), _flat(plain), strict=True)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)


def test_a_collective_of_one_rank_goes_from_inductors_graph() -> None:
    x = torch.randn(5, 8)
    with alone():
        group = dist.group.WORLD.group_name
        ours, (report,) = compiled(
            lambda x: all_reduced(x + 1, group).sin(), x, **{POST: inductor_pass(drop_lone_collectives, verify=True)}
        )
    assert [(run.applied, run.failure) for run in report.passes] == [(1, None)]
    assert torch.equal(ours, (x + 1).sin())


def test_sums_over_ranks_are_found_in_inductors_graph_with_the_norms_that_read_them() -> None:
    program = reduced.Norms((reduced.Sum(), reduced.Sum("in fp32")))
    with ranks(reduced.RANKS):
        every = inductor_pass(*(each.run for each in PIPELINE), verify=True)
        plain, _ = compiled(lambda *given: program.run(*given), *program.tensors())
        ours, (report,) = compiled(lambda *given: program.run(*given), *program.tensors(), **{POST: every})
    told = {run.name: run.applied for run in report.passes if run.applied}
    assert told == {"outline_norm_quantise": 2, "fuse_all_reduce": 2}
    assert [run.failure for run in report.passes if run.failure] == []
    assert all(map(torch.equal, ours, plain))


@pytest.mark.slow
def test_an_indexer_scores_its_candidates_alone_in_inductors_graph_in_real_steps() -> None:
    """Other heads, blocks and picks than V4.1's. One graph for all steps, and in plain ATen: no kernel is there."""
    both = pair(index_scores.Indexer(heads=3, k=6), index_scores.Indexer(heads=2, chunk=2, k=3))
    kinds: list[list[Any]] = []

    def look(gm: GraphModule) -> list[Decision]:
        kinds.append([region_of(call).attrs.get("restricted") for call in regions(gm)])
        return []

    torch.compiler.reset()
    restrict = inductor_pass(restrict_index_scores, look, verify=True)
    ours = torch.compile(both.choose, options={POST: restrict, "fallback_by_default": True})
    with torch.no_grad(), v41.collect() as reports:
        for inputs in steps(both):
            wanted = both.choose(*inputs)
            found = ours(*marked(both, inputs))
            assert all(map(torch.equal, found, wanted))
    (report,) = reports
    told = {run.name: (run.applied, run.refused) for run in report.passes if run.decisions}
    assert told == {"outline_index_scores": (2, 0), "restrict_index_scores": (1, 0)}
    assert [run.failure for run in report.passes if run.failure] == []
    assert kinds == [[None, True]]


@pytest.mark.slow
def test_a_sum_over_ranks_takes_in_what_experts_add_up_in_inductors_graph() -> None:
    case = combines.Combine().shaped()
    per_row, held = case.tensors()
    for row in per_row:
        mark_unbacked(row, 0, shape_id="rows")
    asked = (outline_experts, outline_norm_quantise, take_in_combine)
    with ranks(reduced.RANKS):
        plain, _ = compiled(lambda *given: case.run(*given), *per_row, *held)
        ours, (report,) = compiled(
            lambda *given: case.run(*given), *per_row, *held, **{POST: inductor_pass(*asked, verify=True)}
        )
    told = {run.name: (run.applied, run.refused) for run in report.passes if run.decisions}
    assert told == {each.__name__: (1, 0) for each in (*asked[:2], fuse_all_reduce, take_in_combine)}
    assert [run.failure for run in report.passes if run.failure] == []
    assert all(map(torch.equal, ours, plain))


LATE = ("norm", "window", "product", "ring", "gelu")  # steps of a model that returns some rows


def late(s: rows.Step) -> Tensor:
    """What a batch keeps is mentioned and not read, as trim_replay asks of a model."""
    s.kept_rows.detach(), s.kept_longest.detach()
    x = s.x
    for name in LATE:
        x = rows.STEPS[name](x, s)
    return x[s.logit_rows]


def batch(last: int = 5, seed: int = 0) -> rows.Step:
    made = rows.step([(0, 12), (4, 9), (1, 1)], seed, last=5, more=2)
    for each, size in zip(made, rows.SIZES, strict=False):
        mark_unbacked(each, 0, shape_id=f"last {last}" if size == "last" else size)
    return made


def test_rows_that_nobody_reads_are_left_out_in_inductors_graph_and_may_hold_anything() -> None:
    torch.compiler.reset()
    trim = inductor_pass(trim_replay, verify=True)
    ours = torch.compile(late, options={POST: trim, "fallback_by_default": True})
    with torch.no_grad(), v41.collect() as reports:
        for seed in range(2):
            given = batch(seed=seed)
            twin = rows.Step(*(each.clone() for each in given))
            wanted = late(twin)
            dropped = torch.ones(len(given.x), dtype=torch.bool).index_fill(0, given.kept_rows, False)
            given.x[dropped] = torch.nan
            torch.testing.assert_close(ours(given), wanted, rtol=1e-4, atol=1e-5)  # products of other sizes
            torch.testing.assert_close(given.ring[:-1], twin.ring[:-1], rtol=1e-4, atol=1e-5)
    (report,) = reports
    (decision,) = report.passes[-1].decisions
    assert decision.region is not None and decision.region.attrs["last"] == 5


def test_a_pass_that_is_named_runs_though_no_kernel_of_ours_is_there() -> None:
    served = [each.run for each in PIPELINE if each.serves is not None]
    assert [each.serves for each in in_order(served)] == [None] * len(in_order(served))
    assert {*served} <= {each.run for each in in_order(served)}


def _flat(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


# ---- a pass of one's own ---------------------------------------------------------------------------------------------


@torch.library.custom_op("v41_alone::balance", mutates_args=())
def balance(m: Tensor, steps: int, first: int, eps: float) -> Tensor:
    for turn in range(steps):
        axis = first if turn % 2 == 0 else -3 - first
        m = m / (m.sum(axis, keepdim=True) + eps)
    return m


@balance.register_fake
def _(m: Tensor, steps: int, first: int, eps: float) -> Tensor:
    return torch.empty_like(m)


def call_balance(gm: GraphModule) -> list[Decision]:
    """Each Sinkhorn region becomes one call of an operator that has a kernel for it."""
    for call in regions(gm, "sinkhorn"):
        attrs = gm.get_submodule(str(call.args[0].target)).meta["v41_region"].attrs  # type: ignore[union-attr]
        (result,) = call.users
        assert result.target is operator.getitem
        with gm.graph.inserting_before(call):
            made = gm.graph.call_function(
                torch.ops.v41_alone.balance.default,
                (call.args[2], attrs["steps"], attrs["first_axis"], attrs["eps"]),
            )
        made.meta["val"] = result.meta["val"]
        result.replace_all_uses_with(made)
        inline(gm, call)
    gm.graph.eliminate_dead_code()
    return []


def test_a_later_pass_lowers_regions_and_what_it_leaves_is_inlined() -> None:
    seen: list[list[str]] = []

    def look(gm: GraphModule) -> list[Decision]:
        seen.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return []

    x, w = torch.rand(4, 3, 8), torch.rand(8, 3)
    lowered = inductor_pass(fold_sinkhorn, call_balance, look)
    ours, _ = compiled(hyper_connection, x, w, **{POST: lowered})
    assert [name for name in seen[0] if "balance" in name] == ["v41_alone.balance.default"]
    assert not any("sum" in name for name in seen[0])
    torch.testing.assert_close(ours, hyper_connection(x, w))

    graphs: list[int] = []

    def count_regions(gm: GraphModule) -> list[Decision]:
        graphs.append(len(list(regions(gm))))
        return []

    fold, count = inductor_pass(fold_sinkhorn, count_regions), inductor_pass(count_regions)
    compiled(hyper_connection, x, w, **{PRE: fold, POST: count})
    assert graphs == [1, 0]


def test_a_pass_that_fails_is_undone_in_the_graph_that_inductor_holds() -> None:
    def breaks(gm: GraphModule) -> list[Decision]:
        for node in list(gm.graph.nodes):
            if node.op == "call_function":
                node.replace_all_uses_with(node.all_input_nodes[0])
                gm.graph.erase_node(node)
        raise ValueError("half way")

    x, w = torch.rand(4, 8), torch.rand(8, 3)
    ours, (report,) = compiled(project, x, w, **{POST: inductor_pass(canonicalize, breaks)})
    assert "ValueError: half way" in (report.passes[-1].failure or "")
    assert torch.equal(ours, project(x, w))


def test_each_pass_comes_once_behind_what_it_needs() -> None:
    known = {each.run: each for each in PIPELINE}
    first, second, third = (known[each] for each in (canonicalize, fold_sinkhorn, outline_mhc))
    assert in_order([outline_mhc]) == (first, second, third)
    assert in_order([fold_sinkhorn, canonicalize, outline_mhc]) == (first, second, third)
    mine = Pass(call_balance, needs=(fold_sinkhorn,))
    assert in_order([mine]) == (first, second, mine)
    set_otherwise = Pass(canonicalize, settings={"by": 1})
    assert in_order([fold_sinkhorn, set_otherwise]) == (set_otherwise, second)
    assert in_order([canonicalize, set_otherwise, canonicalize]) == (first, set_otherwise)
