"""Sums over ranks of what experts return, in front of a norm, in many spellings, and near misses, as programs to edit.

All of it is traced and run inside of `ranks(...)` (ranks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.experts import SUMS, Mixture
from tests.strategies.reduced import Sum
from tests.strategies.tracing import trace
from v41.passes.matching import aten
from v41.passes.pipeline import PIPELINE, run_pipeline
from v41.regions import REDUCED, regions

BEFORE = tuple(each for each in PIPELINE if each.serves is None and each.name != "reinplace_cache_writes")
RETURNED = "experts' outputs are added up to the part, which nobody else reads"
WIDER = "what it is made of is no wider than the part"
FLAWS = {  # what is wrong -> the rule it breaks
    "a product": RETURNED,
    "read elsewhere": RETURNED,
    "no sum of rows": "the part is a sum, a cast or a view of rows",
    "read on the way": "what is on the way to the part is read there alone",
    "read behind the sum": "what is on the way to the part is read there alone",
    "flat": "each row of the part is made of rows of its own",
    "in other rows": "each row of the part is made of rows of its own",
    "a table of rows": "what is on the way to the part is read there alone",
    "named otherwise": "rows are named by a sort of as many",
    "scattered rows are added": WIDER,
    "written over": "what it is made of is not written over meanwhile",
    "an input is written": "nothing is written in between, and no effect reads it there",
}
SUMS["named otherwise"] = lambda y, by, k: y[by.argsort().flip(0).flip(0)].view(-1, k, y.shape[1]).float().sum(1)


@dataclass(frozen=True)
class Unrounded(Mixture):
    """It returns its sum in fp32."""

    def with_shared(self, total: Tensor, x: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        return total


@dataclass(frozen=True)
class Combine:
    """A residual stream to which the experts' outputs, summed over ranks, are added. twice: rounded to another type,
    too, on the way."""

    mixture: Mixture = field(default_factory=lambda: Mixture(width=64, inner=32))
    sum: Sum = field(default_factory=Sum)
    twice: bool = False
    flaw: str = ""

    def run(self, h: Tensor, x: Tensor, weights: Tensor, picks: Tensor, norm: Tensor, *held: Tensor) -> list[Tensor]:
        taken: list[Tensor] = []
        y = self.mixture.forward(x, weights, picks, *held)
        if self.flaw == "read on the way":
            taken.append(y.sin())
            y = y + x
        if self.flaw == "read behind the sum":
            h, y = y, y + x
        if self.flaw == "a table of rows":  # it is added behind the sum, row by row
            y = y + h[x[:, 0].argsort()]
        if self.flaw == "written over":
            y = y + h
            h = h.slice_scatter(x[:, :8], 1, 0, 8)
        y = y.half().bfloat16() if self.twice else y
        y = y @ held[-1].new_ones(self.mixture.width, self.mixture.width) if self.flaw == "a product" else y
        if self.flaw == "read elsewhere":
            taken.append(y.exp())
        h = (h + self.sum.of(y, taken)).bfloat16()
        f = h.float()
        return [h, (norm.float() * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6))).bfloat16(), *taken]

    def shaped(self) -> Combine:
        """The same with the parts that its flaw needs."""
        mixture = self.mixture
        match self.flaw:
            case "no sum of rows":
                mixture = Unrounded(sums="index_add", shared="none", width=mixture.width, inner=mixture.inner)
            case "named otherwise":
                mixture = replace(mixture, sums="named otherwise")
            case "scattered rows are added":
                mixture = replace(mixture, sums="index_add")
            case "flat":
                return replace(self, sum=Sum("flat"))
            case "in other rows":
                return replace(self, sum=Sum("through a view"))
        return replace(self, mixture=mixture, twice=self.twice and self.flaw != "no sum of rows")

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What `run` takes: rows, and what has none."""
        generator = torch.Generator().manual_seed(0)
        width = self.mixture.width
        rows = [torch.randn(5, width, generator=generator).bfloat16(), *self.mixture.rows()]
        return rows, [torch.rand(width, generator=generator).bfloat16(), *self.mixture.weights()]

    def program(self) -> GraphModule:
        """With the sum over ranks, and what reads it, as one region."""
        gm, _ = run_pipeline(_traced(self.shaped()), BEFORE, strict=True)
        if self.flaw == "an input is written":
            (call,) = regions(gm, REDUCED)
            h = next(node for node in gm.graph.nodes if isinstance(node.meta["val"], Tensor))
            with gm.graph.inserting_before(call):
                gm.graph.call_function(aten.zero_.default, (h,)).meta = dict(h.meta)
        return gm


def _traced(case: Combine) -> GraphModule:
    rows, held = case.tensors()
    return trace(lambda *given: case.run(*given), *rows, static=held)


@cache
def prepared(case: Combine) -> GraphModule:
    return case.program()


sums = st.sampled_from(("as the model does", "in place", "in fp32"))
mixtures = st.sampled_from(
    [Mixture(sums=how, shared=shared, k=k, width=64, inner=32)
     for how, shared, k in (("inverse", "same", 2), ("scattered", "gated", 3), ("inverse", "behind the cast", 1))]
)  # fmt: skip
legal = st.builds(Combine, mixtures, st.builds(Sum, sums), st.booleans())
flawed = st.builds(Combine, mixtures.filter(lambda each: each.sums == "inverse"), flaw=st.sampled_from(sorted(FLAWS)))
