"""Wrong versions of the passes, each with a program on which it goes wrong: what the checks must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import PassFunction, apply
from tests.strategies.mhc import Stack
from tests.strategies.tracing import trace
from v41 import regions
from v41.passes import canonicalize as canonical
from v41.passes import fold_sinkhorn as sinkhorn
from v41.passes import outline_mhc
from v41.passes.matching import aten, fake, is_narrowing, is_widening
from v41.report import Decision


@dataclass(frozen=True)
class Mutant:
    """`wrong` in place of `owner.name`, seen on `program`. wanted: what holds of the decisions of the right pass."""

    owner: Any
    name: str
    wrong: Any
    run: PassFunction
    program: Callable[[], GraphModule]
    wanted: Callable[[list[Decision]], bool] = lambda decisions: True


def rows(*sizes: int) -> Tensor:
    return torch.randn(5, *sizes)


def written_after_its_copy() -> GraphModule:
    def step(cache: Tensor, x: Tensor) -> Tensor:
        old = cache.clone()
        cache.add_(x)
        return old

    return trace(step, rows(4), rows(4))


def chain(m: Tensor) -> Tensor:
    for axis in (-1, -2, -1):
        m = m / (m.sum(axis, keepdim=True) + 1e-6)
    return m


def stack() -> GraphModule:
    fn, embedded, weights = Stack(sites=2, flaw=("a tap inside", 1)).to_trace()
    gm = trace(fn, embedded, static=weights)
    apply(canonical.canonicalize, gm)
    apply(sinkhorn.fold_sinkhorn, gm)
    return gm


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


run = canonical.canonicalize
MUTANTS: dict[str, Mutant] = {
    "a copy of a written input goes": Mutant(
        canonical._Memory, "may_share", lambda self, copy: True, run, written_after_its_copy
    ),
    "a returned copy of a returned value goes": Mutant(
        canonical._Memory,
        "may_share",
        lambda self, copy: True,
        run,
        lambda: trace(lambda x: ((y := x + 1), y.clone()), rows(4)),
    ),
    "a bf16 round trip goes": Mutant(
        canonical,
        "RESPELL",
        only(drops_rounding_points),
        run,
        lambda: trace(lambda x: x.bfloat16().float() + 1, rows(4)),
    ),
    "permutes compose backwards": Mutant(
        canonical,
        "RESPELL",
        only(composes_permutes_backwards),
        run,
        lambda: trace(lambda x: x.permute(0, 2, 3, 1).permute(0, 1, 3, 2) + 1, rows(2, 3, 4)),
    ),
    "views hold the rows seen while tracing": Mutant(
        canonical,
        "RESPELL",
        (*canonical.RESPELL, writes_the_traced_rows_into_views),
        run,
        lambda: trace(lambda x: x.flatten(1) + 1, rows(2, 3)),
    ),
    "alpha is forgotten": Mutant(
        canonical, "RESPELL", only(forgets_keywords), run, lambda: trace(lambda x: torch.add(x, x, alpha=3), rows(4))
    ),
    "an integer becomes a float tensor": Mutant(
        canonical, "RESPELL", only(spells_every_number_as_float), run, lambda: trace(lambda x: x.long() + 1, rows(4))
    ),
    "every power is a square": Mutant(
        canonical, "RESPELL", only(cubes_too), run, lambda: trace(lambda x: x**3, rows(4))
    ),
    "readers stay in front of the region they read": Mutant(
        regions, "_readers_in_between", lambda *args: [], outline_mhc.outline_mhc, stack
    ),
    "one step in a loop is forgotten": Mutant(
        sinkhorn,
        "find_chains",
        lambda gm, least=2, find=sinkhorn.find_chains: [steps[1:] for steps in find(gm, least)],
        sinkhorn.fold_sinkhorn,
        lambda: trace(chain, torch.rand(5, 4, 4)),
        lambda found: [d.region.attrs["steps"] for d in found if d.region] == [3],
    ),
    "a pending output is taken for streams": Mutant(
        outline_mhc.Site,
        "mix",
        "kj",
        outline_mhc.outline_mhc,
        stack,
        lambda found: [d.region.attrs.get("comb_axes") for d in found if d.region] == [None, "jk", "jk"],
    ),
}
