"""Seeded bugs: wrong parts of passes, each with what shows it. Nothing of this can be imported by a pass.

MUTANTS are planted and shown here. What shows a bug of the other passes needs what their own tests check, so these
bugs lie in their files: ELSEWHERE says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import PassFunction, apply, check_pass, copy_program
from tests.passes import test_borders, test_fold_sinkhorn, test_partition, test_reinplace_cache_writes
from tests.strategies.mhc import Stack
from tests.strategies.tracing import trace
from v41 import regions
from v41.passes import borders, outline_mhc, partition, spans
from v41.passes import canonicalize as canonical
from v41.passes import fold_sinkhorn as sinkhorn
from v41.passes import reinplace_cache_writes as reinplace
from v41.passes.borders import Judge
from v41.passes.matching import aten, fake, is_narrowing, is_widening
from v41.report import Decision

ELSEWHERE = {  # a pass or an analysis -> where its seeded bugs are
    "outline_index_scores": ("tests.passes.test_outline_index_scores", "WRONG"),
    "outline_gate": ("tests.passes.test_outline_gate", "WRONG"),
    "outline_experts": ("tests.passes.test_outline_experts", "WRONG"),
    "outline_attention": ("tests.passes.test_outline_attention", "WRONG"),
    "outline_output_projection": ("tests.passes.test_outline_output_projection", "WRONG"),
    "outline_engram": ("tests.passes.test_outline_engram", "WRONG"),
    "outline_compressor": ("tests.passes.test_outline_compressor", "WRONG"),
    "outline_norm_quantise": ("tests.passes.test_outline_norm_quantise", "WRONG"),
    "drop_lone_collectives": ("tests.passes.test_drop_lone_collectives", "WRONG"),
    "fuse_all_reduce": ("tests.passes.test_fuse_all_reduce", "WRONG"),
    "take_in_combine": ("tests.passes.test_take_in_combine", "WRONG"),
    "take_in_gathers": ("tests.passes.test_take_in_gathers", "WRONG"),
    "restrict_index_scores": ("tests.passes.test_restrict_index_scores", "WRONG"),
    "row_demand": ("tests.passes.test_rows", "BUGS"),
    "synchronise": ("tests.passes.test_synchronise", "WRONG"),
    "assign_streams": ("tests.passes.test_assign_streams", "WRONG"),
    "prefetch_engram": ("tests.passes.test_prefetch_engram", "WRONG"),
    "trim_replay": ("tests.passes.test_trim_replay", "WRONG"),
}


@dataclass(frozen=True)
class Mutant:
    """`wrong` in place of `owner.name`, a bug of `of`. shows: what passes with the right pass and fails with this."""

    of: Callable[..., Any]
    owner: Any
    name: str
    wrong: Any
    shows: Callable[[], object]


def check_on(
    run: PassFunction, program: Callable[[], GraphModule], wanted: Callable[[list[Decision]], bool] = lambda _: True
) -> Callable[[], None]:
    """Shows a bug of `run` on one program: by what every pass must keep, or by its decisions."""

    traced = cache(program)

    def check() -> None:
        assert wanted(check_pass(run, copy_program(traced())))

    return check


def rows(*sizes: int) -> Tensor:
    return torch.randn(5, *sizes)


# ---- canonicalize


def written_after_its_copy() -> GraphModule:
    def step(cache: Tensor, x: Tensor) -> Tensor:
        old = cache.clone()
        cache.add_(x)
        return old

    return trace(step, rows(4), rows(4))


def drops_rounding_points(node: Node) -> None:
    if is_widening(node) and is_narrowing(node.args[0]) and fake(node).dtype == fake(node.args[0].args[0]).dtype:  # type: ignore
        node.replace_all_uses_with(node.args[0].args[0])  # type: ignore[union-attr, arg-type]


def composes_permutes_backwards(node: Node) -> None:
    source = node.args[0] if node.target is aten.permute.default else None
    if isinstance(source, Node) and source.target is aten.permute.default:
        outer, inner = node.args[1], source.args[1]
        node.args = (source.args[0], [outer[axis] for axis in inner])  # type: ignore[index, union-attr]


def writes_the_traced_rows_into_views(node: Node) -> None:
    if node.target is aten.view.default:
        node.args = (node.args[0], [5 if isinstance(n, torch.SymInt) else n for n in fake(node).shape])  # type: ignore


def forgets_keywords(node: Node) -> None:
    node.kwargs = {}


def spells_every_number_as_float(node: Node) -> None:
    if node.target is aten.add.Tensor and isinstance(node.args[1], int):
        node.args = (node.args[0], float(node.args[1]))


def cubes_too(node: Node) -> None:
    if node.target is aten.pow.Tensor_Scalar:
        node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])


def only(*steps: Any) -> tuple[Any, ...]:
    return (*steps, *canonical.RESPELL)


def on(program: Callable[[], GraphModule]) -> Callable[[], None]:
    return check_on(canonical.canonicalize, program)


CANONICALIZE: dict[str, tuple[Any, str, Any, Callable[[], object]]] = {
    "a copy of a written input goes": (canonical._Memory, "may_share", lambda *_: True, on(written_after_its_copy)),
    "a returned copy of a returned value goes": (
        canonical._Memory,
        "may_share",
        lambda *_: True,
        on(lambda: trace(lambda x: ((y := x + 1), y.clone()), rows(4))),
    ),
    "a bf16 round trip goes": (
        canonical,
        "RESPELL",
        only(drops_rounding_points),
        on(lambda: trace(lambda x: x.bfloat16().float() + 1, rows(4))),
    ),
    "permutes compose backwards": (
        canonical,
        "RESPELL",
        only(composes_permutes_backwards),
        on(lambda: trace(lambda x: x.permute(0, 2, 3, 1).permute(0, 1, 3, 2) + 1, rows(2, 3, 4))),
    ),
    "views hold the rows seen while tracing": (
        canonical,
        "RESPELL",
        (*canonical.RESPELL, writes_the_traced_rows_into_views),
        on(lambda: trace(lambda x: x.flatten(1) + 1, rows(2, 3))),
    ),
    "alpha is forgotten": (
        canonical,
        "RESPELL",
        only(forgets_keywords),
        on(lambda: trace(lambda x: torch.add(x, x, alpha=3), rows(4))),
    ),
    "an integer becomes a float tensor": (
        canonical,
        "RESPELL",
        only(spells_every_number_as_float),
        on(lambda: trace(lambda x: x.long() + 1, rows(4))),
    ),
    "every power is a square": (canonical, "RESPELL", only(cubes_too), on(lambda: trace(lambda x: x**3, rows(4)))),
}


# ---- fold_sinkhorn


def chain(m: Tensor) -> Tensor:
    for axis in (-1, -2, -1):
        m = m / (m.sum(axis, keepdim=True) + 1e-6)
    return m


def step_counts(found: list[Decision]) -> list[Any]:
    return [decision.region.attrs["steps"] for decision in found if decision.region]


def looks_at_the_first_reader(chain: list[sinkhorn.Step]) -> Node | None:
    nodes = [node for step in chain for node in step.nodes]
    return next((node for node in nodes[:-1] if next(iter(node.users)) not in nodes), None)


def without(rules: Iterable[tuple[str, Any]], sentence: str, instead: Any = lambda _: None) -> tuple[Any, ...]:
    assert any(rule == sentence for rule, _ in rules)
    return tuple((rule, instead if rule == sentence else find) for rule, find in rules)


def read_twice() -> GraphModule:
    """A chain whose matrix in the middle is returned too."""
    turns = [test_fold_sinkhorn.Turn(axis, 1e-6, leak=at == 1) for at, axis in enumerate((-1, -2, -1))]
    return trace(test_fold_sinkhorn.program(turns), torch.rand(5, 4, 4))


def transposed() -> GraphModule:
    """A chain whose second step sees the matrix transposed."""
    spelled = "div", "transposed", "div"
    turns = [test_fold_sinkhorn.Turn(axis, 1e-6, spelling=s) for axis, s in zip((-1, -2, -1), spelled, strict=True)]
    gm = trace(test_fold_sinkhorn.program(turns), torch.rand(5, 4, 4))
    apply(canonical.canonicalize, gm)
    return gm


def folds(program: Callable[[], GraphModule], wanted: Callable[[list[Decision]], bool]) -> Callable[[], None]:
    return check_on(sinkhorn.fold_sinkhorn, program, wanted)


INSIDE = "is read outside at its end only"
SINKHORN: dict[str, tuple[Any, str, Any, Callable[[], object]]] = {
    "one step in a loop is forgotten": (
        sinkhorn,
        "find_chains",
        lambda gm, least=2, find=sinkhorn.find_chains: [steps[1:] for steps in find(gm, least)],
        folds(lambda: trace(chain, torch.rand(5, 4, 4)), lambda found: step_counts(found) == [3]),
    ),
    "eps is the one that others take": (
        sinkhorn,
        "outline",
        lambda gm, nodes, **attrs: regions.outline(gm, nodes, **attrs | {"eps": 1e-8}),
        folds(
            lambda: trace(chain, torch.rand(5, 4, 4)),
            lambda found: [decision.region.attrs["eps"] for decision in found if decision.region] == [1e-6],
        ),
    ),
    "a second reader is overlooked": (
        sinkhorn,
        "RULES",
        without(sinkhorn.RULES, INSIDE, looks_at_the_first_reader),
        folds(read_twice, lambda found: [decision.rule for decision in found] == [INSIDE]),
    ),
    "rows of the transposed are rows": (
        sinkhorn.Step,
        "axis_of_first",
        property(lambda step: step.axis),
        folds(transposed, lambda found: step_counts(found) == [3]),
    ),
}


# ---- outline_mhc


@cache
def stack(flaw: str = "a tap inside") -> GraphModule:
    fn, embedded, weights = Stack(sites=2, flaw=(flaw, 1)).to_trace()
    gm = trace(fn, embedded, static=weights)
    apply(canonical.canonicalize, gm)
    apply(sinkhorn.fold_sinkhorn, gm)
    return gm


def outlines(wanted: Callable[[list[Decision]], bool] = lambda _: True, flaw: str = "a tap inside") -> Any:
    return check_on(outline_mhc.outline_mhc, lambda: stack(flaw), wanted)


def told(name: str, *values: Any) -> Callable[[list[Decision]], bool]:
    return lambda found: [decision.region.attrs.get(name) for decision in found if decision.region] == list(values)


MHC: dict[str, tuple[Any, str, Any, Callable[[], object]]] = {
    "readers stay in front of the region they read": (regions, "_readers_in_between", lambda *_: [], outlines()),
    "comb is transposed": (outline_mhc.Site, "mix", "kj", outlines(told("comb_axes", None, "jk", "jk"))),
    "nothing is critical": (
        outline_mhc.Site,
        "critical",
        frozenset(),
        outlines(lambda found: all(decision.region is None or decision.region.attrs["critical"] for decision in found)),
    ),
    "a draw of random numbers moves": (
        spans,
        "moves_an_effect",
        lambda members: None,
        outlines(flaw="an effect inside"),
    ),
}


# ---- reinplace_cache_writes


def in_place(function: Callable[..., Any], edit: Callable[[GraphModule], None] | None = None) -> Callable[[], object]:
    return lambda: test_reinplace_cache_writes.reinplaced(function, edit or test_reinplace_cache_writes.as_it_is)


def loses_all_writes_but_the_last(gm: GraphModule, site: reinplace.Site, edit: Any = reinplace._edit) -> None:
    edit(gm, replace(site, writes=site.writes[-1:]))


WRITES: dict[str, tuple[Any, str, Any, Callable[[], object]]] = {
    "a read moves across a write": (
        reinplace,
        "RULES",
        without(reinplace.RULES, "is not read in a state that a write has overwritten"),
        in_place(test_reinplace_cache_writes.write_after_reading, test_reinplace_cache_writes.read_late),
    ),
    "a write is lost": (
        reinplace,
        "_edit",
        loses_all_writes_but_the_last,
        in_place(test_reinplace_cache_writes.write_then_read_then_write),
    ),
    "a write reads what it overwrites": (
        reinplace,
        "RULES",
        without(reinplace.RULES, "takes no values from the memory it writes"),
        in_place(test_reinplace_cache_writes.shifts),
    ),
}


# ---- partition

in_order = test_partition.test_writes_stay_in_order_and_in_one_piece_with_their_views
PARTITION: dict[str, tuple[Any, str, Any, Callable[[], object]]] = {
    "a piece that only writes is dead": (
        partition,
        "effect_of",
        lambda node: None,
        test_partition.test_a_piece_that_only_writes_stays,
    ),
    "pieces of other constants are one": (
        partition,
        "structure_key",
        lambda body: "_".join(str(node.target) for node in body.graph.nodes if node.op == "call_function"),
        test_partition.test_one_other_constant_is_another_artifact,
    ),
    "views of a written cache cross borders": (partition, "written_inputs", lambda gm: {}, in_order),
    "reads wait until the cache is written": (
        Judge,
        "may_wait",
        lambda judge, node: True,
        test_borders.test_what_reads_a_written_cache_does_not_wait,
    ),
    "a collective is cut from its wait": (
        borders,
        "begins_collective",
        lambda node: False,
        lambda: test_borders.test_a_collective_and_its_wait_are_one_piece(True),
    ),
}

MUTANTS = {
    name: Mutant(of, *bug)
    for of, bugs in (
        (canonical.canonicalize, CANONICALIZE),
        (sinkhorn.fold_sinkhorn, SINKHORN),
        (outline_mhc.outline_mhc, MHC),
        (reinplace.reinplace_cache_writes, WRITES),
        (partition.partition, PARTITION),
    )
    for name, bug in bugs.items()
}
