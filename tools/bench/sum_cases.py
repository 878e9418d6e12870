"""sum_cases: what reads a sum over ranks, as cases to measure: plain functions, inputs at released widths, bodies.

critical     the seam up to what the next sublayer reads: post map, collapse, norm
seam         the whole seam, coefficients too
residual     a residual and its RMS norm, as in a Llama; it returns the sum as well
combine      critical, of parts that add up rows of experts and a shared expert first, in the same kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from v41.lowering.rowwise import Unsupported
from v41.lowering.templates.all_reduce import SummingKernel, generate
from v41.model_def import mhc
from v41.model_def.norm import rms_norm
from v41.regions import behind_sum
from v41.tools.bench import seam

functional = torch.ops._c10d_functional
PICKS = 6  # rows of experts that one row adds up
Function = Callable[..., tuple[Tensor, ...]]


def critical(y: Tensor, X: Tensor, C: Tensor, B: Tensor, A: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    X = mhc.expand(X, y, C, B)
    return X, rms_norm(mhc.collapse(X, A), norm, seam.NORM_EPS)


def whole(
    y: Tensor, X: Tensor, C: Tensor, B: Tensor, A: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor
) -> tuple[Tensor, ...]:
    return seam.plain(X, y, C, B, A, fn, base, scale, norm)


def residual(y: Tensor, x: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    x = x + y
    return x, rms_norm(x, norm, 1e-6), y


def combined(y: Tensor, places: Tensor, shared: Tensor) -> Tensor:
    """A rank's part of the experts' sum: rows `places` of y [PICKS T, D], PICKS a row, and the shared expert."""
    return (y[places].view(-1, PICKS, y.shape[1]).float().sum(1) + shared.float()).to(y.dtype)


def summed(part: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(part, "sum", "0"))


class _Critical(nn.Module):
    def forward(self, y: Tensor, X: Tensor, C: Tensor, B: Tensor, A: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        return critical(summed(y), X, C, B, A, norm)


class _Whole(nn.Module):
    def forward(
        self,
        y: Tensor,
        X: Tensor,
        C: Tensor,
        B: Tensor,
        A: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
    ) -> tuple[Tensor, ...]:
        return whole(summed(y), X, C, B, A, fn, base, scale, norm)


class _Residual(nn.Module):
    def forward(self, y: Tensor, x: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        return residual(summed(y), x, norm)


class _Combine(nn.Module):
    def forward(
        self, y: Tensor, places: Tensor, shared: Tensor, X: Tensor, C: Tensor, B: Tensor, A: Tensor, norm: Tensor
    ) -> tuple[Tensor, ...]:
        return critical(summed(combined(y, places, shared)), X, C, B, A, norm)


@dataclass(frozen=True)
class Case:
    """`plain` takes the sum first, then `row_inputs` - 1 other tensors with rows, then weights; `summing` is a module
    that takes what one rank has of it in its place: the part itself."""

    name: str
    plain: Function
    summing: type[nn.Module]
    row_inputs: int
    width: int = seam.WIDTH
    owned: ClassVar[int] = 1  # arguments that are this rank's own
    behind_as: ClassVar[str] = ""  # the case that has the same behind the sum, and takes the part

    def others(self, rows: int, device: str, seed: int = 0) -> tuple[Tensor, ...]:
        """All arguments but the first, the same on every rank."""
        X, y, C, B, A, fn, base, scale, norm = seam.inputs(rows, device, seed, self.width)
        if self.name == "residual":
            return y, norm
        return (X, C, B, A, fn, base, scale, norm) if self.name == "seam" else (X, C, B, A, norm)

    def own(self, rows: int, device: str, rank: int, seed: int = 0) -> tuple[Tensor, ...]:
        """What `rank` has of the sum."""
        return (_drawn(rows, self.width, device, rank, seed),)

    def part(self, own: Sequence[Tensor]) -> Tensor:
        """What a rank that has `own` adds to the sum, bf16 [rows, width]."""
        return own[0]

    def body(self) -> GraphModule:
        return _captured(self)

    def behind(self) -> GraphModule:
        """The body from the sum on."""
        return behind_sum(self.body())

    def kernel(self, ranks: int) -> SummingKernel:
        made = generate(self.body(), ranks, self.name)
        if isinstance(made, Unsupported):
            raise ValueError(f"refused because it {made.reason}, at {made.node}")
        return made


@dataclass(frozen=True)
class Combining(Case):
    """A case in which each rank's part is added up of rows of its experts, by the kernel."""

    owned = 3
    behind_as = "critical"

    def own(self, rows: int, device: str, rank: int, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(7 + 1000 * seed + rank)
        places = torch.randperm(PICKS * rows, generator=generator, device=device)
        y = _drawn(PICKS * rows, self.width, device, rank, seed)
        return y, places, _drawn(rows, self.width, device, rank, seed + 1)

    def part(self, own: Sequence[Tensor]) -> Tensor:
        """One row after the other, as the kernel has it; torch on a GPU adds in an order of its own, in which about one
        bf16 of 40 million comes out another."""
        y, places, shared = own
        total = y[places[0::PICKS]].float()
        for pick in range(1, PICKS):
            total = total + y[places[pick::PICKS]].float()
        return (total + shared.float()).to(y.dtype)


def _drawn(rows: int, width: int, device: str, rank: int, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1 + 1000 * seed + rank)
    return torch.randn(rows, width, generator=generator, device=device).bfloat16()


@cache
def _captured(case: Case) -> GraphModule:
    own = case.own(7, "cpu", 0)
    times = [len(each) // 7 for each in own] + [1] * (case.row_inputs - 1)
    return seam.captured(case.summing(), (*own, *case.others(7, "cpu")), times)


def added(parts: Sequence[Tensor]) -> Tensor:
    """In fp32, in the order of ranks, rounded once: what a kernel must give bit for bit."""
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each.float()
    return total.to(parts[0].dtype)


CASES = {
    case.name: case
    for case in (
        Case("critical", critical, _Critical, 5),
        Case("seam", whole, _Whole, 5),
        Case("residual", residual, _Residual, 2),
        Combining("combine", critical, _Combine, 5),
    )
}
