"""Models of a few nodes and of no preset, as a user of the command has them, and what `v41 capture` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from v41._compat_groups import ALL, pretended
from v41._compat_trace import mark_rows
from v41.model_def.topk import topk_lowest_index
from v41.report import collect
from v41.tools.inspect import capture_call
from v41.tools.run import Run, run_of

WIDTH = 8
SUMMED = 128  # so wide that 4096 rows of it go in two shots


class Balanced(nn.Module):
    """Each layer balances n x n matrices, a Sinkhorn loop, and projects what it balanced."""

    def __init__(self, layers: int = 2, eps: Sequence[float] = (1e-6, 1e-6, 1e-6)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [T, WIDTH]
        for layer in self.layers:
            m = (x.unsqueeze(-1) + layer(x).unsqueeze(-2)).exp()
            for turn, eps in enumerate(self.eps):
                m = m / (m.sum(-1 - turn % 2, keepdim=True) + eps)
            x = m.sum(-1)
        return x


def balanced() -> tuple[nn.Module, tuple[Tensor]]:
    x = torch.rand(5, WIDTH)
    mark_rows(x)
    return Balanced(), (x,)


def unbalanced(layers: int = 1) -> tuple[nn.Module, tuple[Tensor]]:
    """One step of a chain has another eps, so it is no loop."""
    x = torch.rand(5, WIDTH)
    mark_rows(x)
    return Balanced(layers, (1e-6, 2e-6, 1e-6)), (x,)


@nested_compile_region
def one_of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return route(x, weight, 1)


@nested_compile_region
def two_of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return route(x, weight, 2)


def route(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A router, [T, WIDTH] -> weights and experts [T, k]."""
    scores = F.softplus(F.linear(x.float(), weight.float())).sqrt()
    experts = topk_lowest_index(scores, k)
    weights = scores.gather(-1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


class Routed(nn.Module):
    """Two bodies, each called twice, in which nodes, and the router that each is, have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, WIDTH).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        routes = [(one_of, two_of)[at % 2](x, weight) for at, weight in enumerate(self.weight.unbind())]
        return torch.cat([weights.cos() + experts for weights, experts in routes], -1)


def routed() -> tuple[nn.Module, tuple[Tensor]]:
    x = torch.rand(5, WIDTH).bfloat16()
    mark_rows(x)
    return Routed(), (x,)


class Cut(nn.Module):
    """Has a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x


def cut() -> tuple[nn.Module, tuple[Tensor]]:
    return Cut(), (torch.rand(3),)


class Picks(nn.Module):
    """How many numbers it picks follows from their values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.nonzero()[:, 0]] * 2


def picks() -> tuple[nn.Module, tuple[Tensor]]:
    x = torch.rand(5, WIDTH)
    mark_rows(x)
    return Picks(), (x,)


class Misshapen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(WIDTH + 1, WIDTH)  # no such product


def misshapen() -> tuple[nn.Module, tuple[Tensor]]:
    return Misshapen(), (torch.rand(3, WIDTH),)


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("no such expert")


def refuses() -> tuple[nn.Module, tuple[Tensor]]:
    return Refuses(), (torch.rand(3),)


def misfed() -> tuple[nn.Module, tuple[Tensor]]:
    """A module of torch's fails, which a line of the model calls."""
    return Balanced(), (torch.rand(3, WIDTH + 1),)


def too_few() -> tuple[nn.Module, tuple[()]]:
    return Balanced(), ()


def learns() -> tuple[nn.Module, tuple[Tensor]]:
    class Learns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return x * 2

    return Learns(), (torch.rand(3, requires_grad=True),)


def identity() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Identity(), (torch.rand(3),)


def chatters() -> tuple[nn.Module, tuple[Tensor]]:
    print("weights are made")
    return balanced()


def leaves() -> None:
    raise SystemExit(3)


class Odd(BaseException):
    """No Exception."""


def odd() -> None:
    raise Odd


def no_pair() -> Tensor:
    return torch.rand(3)


def raises() -> None:
    raise ValueError("no weights here")


@cache
def run_of_routed(codegen: str) -> Run:
    """`routed`, likewise: its bodies stay shared, save where they are opened for the kernels of routers."""
    torch._dynamo.reset()
    with collect(programs=True):
        return run_of(capture_call(routed, codegen=codegen), "small_models:routed")


@cache
def run_of_balanced(flawed: bool = False) -> Run:
    """`balanced`, or `unbalanced`, captured with what each pass changed. Whoever gets it leaves it as it is."""
    torch._dynamo.reset()
    with collect(programs=True):
        return run_of(capture_call(unbalanced if flawed else balanced, codegen="triton"), "small_models:balanced")


class Summed(nn.Module):
    """A projection that ranks share by its inputs, added to a residual; a norm reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(SUMMED, SUMMED).bfloat16())

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        part = torch.ops._c10d_functional.all_reduce(y @ self.down, "sum", ALL)
        h = h + torch.ops._c10d_functional.wait_tensor(part)
        f = h.float()
        return h, (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def summed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    h, y = torch.rand(5, SUMMED).bfloat16(), torch.rand(5, SUMMED).bfloat16()
    mark_rows(h)
    mark_rows(y)
    return Summed(), (h, y)


@cache
def run_of_summed(all_reduce: str | None = None) -> Run:
    """`summed`, as the first of two ranks, of which no other and no group are there any more."""
    torch._dynamo.reset()
    with pretended(2), collect(programs=True):
        made = capture_call(summed, codegen="triton", all_reduce=all_reduce)
    return run_of(made, "small_models:summed, one of 2 ranks")
