"""Passes inside plain Inductor, on models that are not V4.1: what they find and leave, and what caches hold them by."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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
)
from tests.strategies.ranks import ranks
from tests.strategies.restricted_scores import pair
from tests.strategies.whole_programs import inputs_of
from v41.passes.alone import in_order, inductor_pass, key_of, sources_of
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


def compiled(
    fn: Callable[..., Any], *args: Tensor, cpp: bool = False, **options: Any
) -> tuple[Any, list[CompileReport]]:
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
    fn, rows, weights = inputs_of(site)
    rows = [row.clone() for row in rows]
    for row, size in zip(rows, getattr(site, "all_sizes", ()) or ["rows"] * len(rows), strict=True):
        mark_unbacked(row, 0, shape_id=size)
    plain, _ = compiled(fn, *rows, *weights)
    ours, (report,) = compiled(fn, *rows, *weights, **{POST: inductor_pass(*(p.run for p in PIPELINE), verify=True)})
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
    rows, held = case.tensors()
    for row in rows:
        mark_unbacked(row, 0, shape_id="rows")
    asked = (outline_experts, outline_norm_quantise, take_in_combine)
    with ranks(reduced.RANKS):
        plain, _ = compiled(lambda *given: case.run(*given), *rows, *held)
        ours, (report,) = compiled(
            lambda *given: case.run(*given), *rows, *held, **{POST: inductor_pass(*asked, verify=True)}
        )
    told = {run.name: (run.applied, run.refused) for run in report.passes if run.decisions}
    assert told == {each.__name__: (1, 0) for each in (*asked[:2], fuse_all_reduce, take_in_combine)}
    assert [run.failure for run in report.passes if run.failure] == []
    assert all(map(torch.equal, ours, plain))


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


# ---- the key ---------------------------------------------------------------------------------------------------------


def shift(gm: GraphModule, by: object = 0) -> list[Decision]:
    return []


def key(*passes: Any, verify: bool = False) -> str | None:
    return key_of(in_order(passes), verify)


def test_every_pass_has_a_key_of_its_own() -> None:
    keys = [key(each.run) for each in PIPELINE]
    assert None not in keys and len({*keys}) == len(keys)
    assert keys == [key(each.run) for each in PIPELINE]


def caching(**options: Any) -> str:
    """What Inductor's cache said to project(...), compiled under `options`."""
    compiled(project, torch.rand(4, 8), torch.rand(8, 3), **options)
    found = {
        name.removeprefix("fxgraph_cache_"): n for name, n in counters["inductor"].items() if "fxgraph_cache" in name
    }
    return " ".join(name for name in ("hit", "miss", "bypass") if found.get(name))


def test_inductors_cache_hits_where_nothing_changed_and_nowhere_else() -> None:
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}))}) == "hit"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 2}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}), verify=True)}) == "miss"
    assert caching(**{PRE: inductor_pass(Pass(shift, settings={"by": 1}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": object()}))}) == "bypass"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)


@given(plain, plain)
def test_settings_that_differ_give_other_keys(one: object, other: object) -> None:
    keys = [key(Pass(shift, settings={"by": value})) for value in (one, one, other)]
    assert keys[0] == keys[1] and keys[0] is not None
    assert (keys[0] == keys[2]) is (repr(one) == repr(other))


def test_a_key_holds_the_code_of_the_pass_as_it_is_in_the_process() -> None:
    def made(number: int) -> Callable[[GraphModule], list[Decision]]:
        names: dict[str, Any] = {"__name__": __name__}
        exec(f"def mine(gm):\n    return [][:{number}]", names)
        return names["mine"]  # type: ignore[no-any-return]

    assert key(made(1)) == key(made(1)) != key(made(2))


def test_a_key_holds_the_sources_that_a_pass_imports_of_its_own_package_and_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def package(name: str, number: int) -> str | None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "rules.py").write_text(f"LIMITS = frozenset([{number}])\n")
        (tmp_path / name / "mine.py").write_text("def mine(gm):\n    from .rules import LIMITS\n    return []\n")
        module = __import__(f"{name}.mine").mine
        assert [path.name for path in sources_of(f"{name}.mine")] == ["__init__.py", "mine.py", "rules.py"]
        return key(module.mine)

    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("one_alone", "same_alone", "other_alone")
    one, same, other = (package(name, number) for name, number in zip(names, (1, 1, 2), strict=True))
    for name in names:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    assert one == same != other


def test_a_source_may_be_imported_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole_alone").mkdir()
    for name, text in {"__init__": "", "words": "", "mine": "import whole_alone.words as words\n"}.items():
        (tmp_path / "whole_alone" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [path.name for path in sources_of("whole_alone.mine")] == ["__init__.py", "mine.py", "words.py"]


def test_the_sources_of_a_pass_are_its_own_closure_and_not_the_other_passes() -> None:
    names = {"/".join(path.parts[-2:]) for path in sources_of(fold_sinkhorn.__module__)}
    assert {
        "passes/fold_sinkhorn.py",
        "passes/matching.py",
        "v41/regions.py",
        "v41/report.py",
        "v41/_compat.py",
    } <= names
    assert not {"passes/outline_mhc.py", "passes/pipeline.py", "v41/backend.py"} & names


def test_a_key_holds_the_fake_of_custom_operators_which_inductors_own_key_leaves_out() -> None:
    def define(dtype: torch.dtype) -> str | None:
        with torch.library._scoped_library("v41_alone", "FRAGMENT") as library:
            library.define("half(Tensor x) -> Tensor")
            library.impl("half", lambda x: x.to(dtype), "CPU")
            torch.library.register_fake("v41_alone::half", lambda x: torch.empty_like(x, dtype=dtype), lib=library)
            return key(fold_sinkhorn)

    without = key(fold_sinkhorn)
    one, same, other = define(torch.float16), define(torch.float16), define(torch.bfloat16)
    assert one == same and len({without, one, other}) == 3
    assert key(fold_sinkhorn) == without
