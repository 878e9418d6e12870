"""Sums over ranks in front of mHC boundaries and of norms, in many spellings, and near misses, as functions to trace.

All of it is traced and run inside of `ranks(...)` (ranks.py), where a sum is a multiple of what this rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.mhc import Spelling, Stack, drawn_like, spellings
from tests.strategies.norms import trace_as_is
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.outline_mhc import outline_mhc
from v41.passes.outline_norm_quantise import outline_norm_quantise

RANKS = 3
c10d = torch.ops._c10d_functional
ADDED = "what ranks have is added up"
STANDS = "no write, collective or draw stands between the collective and what reads the sum"
FLAWS = {  # what is wrong -> the rule it breaks
    "several at a time": "one value is reduced at a time",
    "an average": ADDED,
    "a maximum": ADDED,
    "integers": "floats of 16 or 32 bits are added",
    "fp64": "floats of 16 or 32 bits are added",
    "a group of one": "its group is known here, and has several ranks",
    "a second group": "all sums of a program are taken over one group",
    "read under way": "the sum is waited for before anything reads it",
    "no wait": "the sum is waited for before anything reads it",
    "work meanwhile": "nothing is computed between the collective and its wait",
    "scaled": "an mHC boundary or a norm reads the sum, or the sum with a residual",
    "a number added": "an mHC boundary or a norm reads the sum, or the sum with a residual",
    "activated": "an mHC boundary or a norm reads the sum, or the sum with a residual",
    "a sum of sums": "no other all-reduce stands nearer to what reads the sum",
    "its own part added": "a rank's own part is read by the collective alone",
    "comes back": "nothing leaves the region and comes back",
    "another collective": STANDS,
    "a draw": STANDS,
}
MORE = {"a sum of sums": 2, "another collective": 2, "a second group": 2}  # flaws with more collectives than one


def world() -> str:
    return str(dist.group.WORLD.group_name)


def added(y: Tensor, op: str = "sum", group: str | None = None) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(y, op, group or world()))


SPELLED: dict[str, Callable[[Tensor], Tensor]] = {
    "as the model does": added,
    "functional": lambda y: functional.all_reduce(y, "sum", dist.group.WORLD),
    "in place": lambda y: torch.ops.aten.copy(y, added(y)),  # what becomes of dist.all_reduce(y)
    "in fp32": lambda y: added(y.float()).to(y.dtype),
    "through a view": lambda y: added(y.reshape(-1, y.shape[-1] // 2)).view(y.shape),
    "flat": lambda y: added(y.flatten()).view(y.shape),
}


@dataclass(frozen=True)
class Sum:
    """How one sum over ranks is spelled, and who reads it beside the boundary. A flaw that is not drawn is none."""

    spelled: str = "as the model does"
    also: str = "nothing"  # "the sum", "the sum in fp32"
    flaw: str = ""

    @property
    def collectives(self) -> int:
        return MORE.get(self.flaw, 1)

    def of(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        """The sum of all ranks' y; `taken` gets what the program returns beside."""
        flawed = getattr(self, "_" + self.flaw.replace(" ", "_"), None)
        total = flawed(y, taken) if flawed else SPELLED[self.spelled](y)
        if self.also != "nothing":
            taken.append(torch.sin(total) if self.also == "the sum" else total.float().cos())
        return total

    def _several_at_a_time(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        one, other = map(c10d.wait_tensor, c10d.all_reduce_coalesced([y, y * 2], "sum", world()))
        taken.append(other)
        return one

    def _an_average(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y, "avg")

    def _a_maximum(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y, "max")

    def _integers(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added((y * 8).to(torch.int32)).to(y.dtype)

    def _fp64(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y.double()).to(y.dtype)

    def _a_group_of_one(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y, group=dist.new_group([0]).group_name)

    def _a_second_group(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        taken.append(added(y.sum(0)))
        return added(y, group=dist.new_group(list(range(RANKS))).group_name)

    def _read_under_way(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        under_way = c10d.all_reduce(y, "sum", world())
        taken.append(under_way.float())
        return c10d.wait_tensor(under_way)

    def _no_wait(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return c10d.all_reduce(y, "sum", world())

    def _work_meanwhile(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        under_way = c10d.all_reduce(y, "sum", world())
        taken.append(y.exp())
        return c10d.wait_tensor(under_way)

    def _scaled(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y) * 0.5

    def _a_number_added(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y) + 0.5

    def _activated(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return torch.tanh(added(y))

    def _a_sum_of_sums(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y) + added(y.cos())

    def _its_own_part_added(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        return added(y) + y

    def _comes_back(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        total = added(y)
        return total + torch.tanh(total)

    def _another_collective(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        total = added(y)
        taken.append(added(y.amax(0), "max"))
        return total

    def _a_draw(self, y: Tensor, taken: list[Tensor]) -> Tensor:
        total = added(y)
        taken.append(drawn_like(total))
        return total


@dataclass(frozen=True)
class Norms:
    """A residual stream as Llama has it: each sublayer's output, summed over ranks, is added and normed."""

    sums: tuple[Sum, ...]
    residual: str = "added"  # "in fp32", cast before the collective begins; "none": each norm reads the sum alone
    ends: str = "product"  # what a sublayer ends with: "product", "tanh", "product and its copy": another reads it too
    width: int = 64

    @property
    def producer(self) -> str | None:
        return "product" if self.ends == "product" else None

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((5, self.width), (self.width, self.width), (self.width,))
        return [torch.randn(size, generator=generator).bfloat16() for size in sizes]

    def run(self, h: Tensor, w: Tensor, weight: Tensor) -> list[Tensor]:
        taken: list[Tensor] = []
        x = h
        for each in self.sums:
            kept = h.float() if self.residual == "in fp32" else h
            y = torch.tanh(x) @ w
            if self.ends == "product and its copy":
                taken.append(y.sum(-1))
            total = each.of(torch.tanh(y) if self.ends == "tanh" else y, taken)
            h = total if self.residual == "none" else (kept + total).bfloat16()
            f = h.float()
            x = (weight.float() * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6))).bfloat16()
        return [x, *taken] if self.residual == "none" else [x, h, *taken]


@dataclass(frozen=True)
class Reduced(Stack):
    """An mHC stack each of whose sublayers' outputs is summed over ranks: in front of every post map."""

    sums: tuple[Sum, ...] = ()

    def forward(self, embedded: Tensor, *weights: Tensor) -> Any:
        self.__dict__["taken"] = []
        x, *taken = super().forward(embedded, *weights)
        return [x, *taken, *self.__dict__["taken"]]

    def post(self, site: int, X: Tensor, y: Tensor | None, C: Tensor | None, B: Tensor | None) -> Tensor:
        if y is not None and site > 0:
            y = self.sums[(site - 1) % len(self.sums)].of(y, self.__dict__["taken"])
        return super().post(site, X, y, C, B)


def prepared(program: Norms | Reduced) -> GraphModule:
    """The graph of `program`, for sizes as they are, with its norms and boundaries as regions."""
    if isinstance(program, Norms):
        gm = trace_as_is(lambda *given: program.run(*given), program.tensors())
    else:
        fn, embedded, weights = program.to_trace()
        gm = trace_as_is(lambda *given: fn(*given), [embedded, *weights])
    for each in (canonicalize, fold_sinkhorn, outline_mhc, outline_norm_quantise):
        each(gm)
    gm.recompile()
    return gm


legal = st.builds(
    Sum, st.sampled_from(sorted(SPELLED)), st.sampled_from(["nothing", "nothing", "the sum", "the sum in fp32"])
)
flawed = st.builds(Sum, also=st.sampled_from(["nothing", "the sum"]), flaw=st.sampled_from(sorted(FLAWS)))
norms = st.builds(
    Norms,
    st.tuples(legal, flawed | legal, legal),
    st.sampled_from(["added", "in fp32", "none"]),
    st.sampled_from(["product", "tanh", "product and its copy"]),
)
stacks = st.builds(
    lambda sums, engrams, spelling: Reduced(sites=2, iters=2, engrams=engrams, spellings=(spelling,), sums=sums),
    st.tuples(legal, flawed | legal),
    st.sampled_from([(), (1,)]),
    spellings.filter(lambda spelling: not spelling.subgraph) | st.just(Spelling()),
)
