"""Models of a few nodes and of no preset, as a user of the command has them, and what `v41 capture` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from v41._compat_trace import mark_rows
from v41.report import collect
from v41.tools.inspect import capture_call
from v41.tools.run import Run, run_of

WIDTH = 8


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


def unbalanced() -> tuple[nn.Module, tuple[Tensor]]:
    """One step of a chain has another eps, so it is no loop."""
    x = torch.rand(5, WIDTH)
    mark_rows(x)
    return Balanced(1, (1e-6, 2e-6, 1e-6)), (x,)


class Cut(nn.Module):
    """Has a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x


def cut() -> tuple[nn.Module, tuple[Tensor]]:
    return Cut(), (torch.rand(3),)


def no_pair() -> Tensor:
    return torch.rand(3)


def raises() -> None:
    raise ValueError("no weights here")


@cache
def run_of_balanced(flawed: bool = False) -> Run:
    """`balanced`, or `unbalanced`, captured with what each pass changed. Whoever gets it leaves it as it is."""
    torch._dynamo.reset()
    with collect(programs=True):
        return run_of(capture_call(unbalanced if flawed else balanced, codegen="triton"), "small_models:balanced")
