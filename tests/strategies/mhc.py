"""Small mHC stacks in many spellings: entry, seams, Engram-like interruptions, exit, as a plain function to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Piece = Callable[..., Tensor]


def _loop_mix(X: Tensor, B: Tensor) -> Tensor:
    count = X.shape[1]
    mixed = [sum(B[:, j, k, None] * X[:, j] for j in range(count)) for k in range(count)]
    return torch.stack(mixed, 1)  # type: ignore[arg-type]


COLLAPSES: dict[str, Piece] = {  # sum_j A_j X_j
    "sum": lambda X, A: (A[..., None] * X).sum(1),
    "sum of the swapped": lambda X, A: (X * A.unsqueeze(2)).sum(dim=-2),
    "einsum": lambda X, A: torch.einsum("tjd,tj->td", X, A),
    "matmul": lambda X, A: (A[:, None] @ X).squeeze(1),
    "matmul of the transposed": lambda X, A: (X.mT @ A[..., None])[..., 0],
    "loop": lambda X, A: sum(A[:, j, None] * X[:, j] for j in range(X.shape[1])),  # type: ignore[return-value, misc]
}
MIXES: dict[str, Piece] = {  # sum_j B_jk X_j
    "sum": lambda X, B: (B[..., None] * X.unsqueeze(2)).sum(1),
    "einsum": lambda X, B: torch.einsum("tjd,tjk->tkd", X, B),
    "matmul": lambda X, B: B.mT @ X,
    "loop": _loop_mix,
}
PENDINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # C_k y + mixed
    "pending first": lambda y, C, mixed: C[..., None] * y[:, None] + mixed,
    "mixed first": lambda y, C, mixed: mixed + y.unsqueeze(1) * C.unsqueeze(-1),
    "einsum": lambda y, C, mixed: torch.einsum("tk,td->tkd", C, y) + mixed,
    "loop": lambda y, C, mixed: torch.stack([C[:, k, None] * y + mixed[:, k] for k in range(C.shape[1])], 1),
}
SQUARES: dict[str, Piece] = {"square": torch.square, "power": lambda x: x**2, "product": lambda x: x * x}
MEANS: dict[str, Piece] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean, axis put back": lambda x: x.mean(-1).unsqueeze(-1),
    "sum over width": lambda x: x.sum(-1, keepdim=True) / x.shape[-1],
}
DIVISIONS: dict[str, Piece] = {  # x / sqrt(v)
    "rsqrt": lambda x, v: x * v.rsqrt(),
    "rsqrt first": lambda x, v: v.rsqrt() * x,
    "sqrt": lambda x, v: x / v.sqrt(),
    "reciprocal": lambda x, v: x * v.sqrt().reciprocal(),
}
PROJECTIONS: dict[str, Piece] = {
    "matmul": lambda x, fn: x @ fn.T,
    "linear": torch.nn.functional.linear,
    "einsum": lambda x, fn: torch.einsum("tk,ck->tc", x, fn),
    "sum": lambda x, fn: (x[:, None] * fn).sum(-1),
}


@dataclass(frozen=True)
class Spelling:
    """How the one function is written. Each field changes bits at most, never what is computed."""

    collapse: str = "sum"
    mix: str = "sum"
    pending: str = "pending first"
    square: str = "square"
    mean: str = "mean"
    division: str = "rsqrt"
    projection: str = "matmul"
    scaled: str = "after"  # the projection's result, or "before": what it reads
    columns: str = "split"  # "slice", or "affine first": scaled and shifted as one vector
    shared_cast: bool = False  # X.float() once a boundary, or at every use
    subgraph: bool = False  # Sinkhorn in a subgraph of its own

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return DIVISIONS[self.division](x, MEANS[self.mean](SQUARES[self.square](x)) + eps)


@dataclass(frozen=True)
class Stack:
    """`sites` boundaries; before those in `engrams` the streams are interrupted. Fields from `share` on are the model's."""

    count: int = 4
    width: int = 8
    sites: int = 3
    engrams: tuple[int, ...] = ()
    iters: int = 2
    eps: float = 1e-6
    norm_eps: float = 1e-20
    factor: float = 2.0
    weighted: bool = True
    transposed_comb: bool = False
    dtype: torch.dtype = torch.bfloat16
    spelling: Spelling = field(default_factory=Spelling)
    damage: dict[str, Any] = field(default_factory=dict)  # a flaw by name -> the site that has it

    def trace_args(self, rows: int = 5) -> tuple[Callable[..., Any], tuple[Tensor, ...], list[Tensor]]:
        """(function, row tensors, weights) for `trace`."""
        generator = torch.Generator().manual_seed(0)
        n, D = self.count, self.width
        random = lambda *shape: torch.randn(shape, generator=generator)
        weights = [torch.randn(D, D, generator=generator).to(self.dtype)]
        for _ in range(self.sites + 1):
            weights += [random(n * (n + 2), n * D), random(n * (n + 2)), random(3), random(D).to(self.dtype)]
        return self.forward, (random(rows, D).to(self.dtype),), weights

    def forward(self, embedded: Tensor, *weights: Tensor) -> Any:
        X, A = self.entry(embedded)
        y = B = C = None
        taken: list[Tensor] = []
        mixes = [weights[i : i + 4] for i in range(1, len(weights), 4)]
        for site in range(self.sites):
            if site in self.engrams:
                X, y = self.engram(self.post(X, y, C, B)), None
            X, x, A, C, B = self.boundary(site, X, y, C, B, A, mixes[site], taken)
            y = torch.tanh(x @ weights[0])
        X = self.post(X, y, C, B)
        return self.normalise(self.collapse(X, A), mixes[-1][3]), *taken

    def entry(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        first = (torch.arange(self.count) == 0).to(torch.float32)
        return embedded.unsqueeze(1).repeat(1, self.count, 1), first.expand(embedded.shape[0], self.count)

    def engram(self, X: Tensor) -> Tensor:
        return (X.float() + torch.sigmoid(X.float().mean(-1, keepdim=True)) * X.float().exp()).to(X.dtype)

    def post(self, X: Tensor, y: Tensor | None, C: Tensor | None, B: Tensor | None) -> Tensor:
        if y is None or C is None or B is None:
            return X
        mixed = MIXES[self.spelling.mix](X.float(), B.mT if self.transposed_comb else B)
        return PENDINGS[self.spelling.pending](y.float(), C, mixed).to(X.dtype)

    def collapse(self, X: Tensor, A: Tensor) -> Tensor:
        return COLLAPSES[self.spelling.collapse](X.float(), A).to(X.dtype)

    def normalise(self, h: Tensor, weight: Tensor) -> Tensor:
        x = self.spelling.norm(h.float(), self.norm_eps)
        return (x * weight.float() if self.weighted else x).to(h.dtype)

    def boundary(self, site: int, X: Tensor, y: Any, C: Any, B: Any, A: Tensor, mix: Any, taken: list[Tensor]) -> Any:
        flaw = {name for name, at in self.damage.items() if at == site}
        fn, base, scale, weight = mix
        X = self.post(X, y, C, B)
        if "V4" in flaw:
            A = self.coefficients(X, fn, base, scale, flaw)[0]
        x = self.normalise(self.collapse(X, A), weight)
        A, C, B = self.coefficients(X, fn, base, scale, flaw)
        return X, x, A, C, B

    def coefficients(self, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, flaw: set[str]) -> Any:
        n, spelling = self.count, self.spelling
        x = X.flatten(1).float()
        project = PROJECTIONS[spelling.projection]
        if spelling.scaled == "before":
            z = project(spelling.norm(x, self.norm_eps), fn)
        else:
            mean = MEANS[spelling.mean](SQUARES[spelling.square](x))
            z = DIVISIONS[spelling.division](project(x, fn), mean + self.norm_eps)
        sizes = (n, n, n * n)
        if spelling.columns == "affine first":
            z = z * torch.cat([s.expand(size) for s, size in zip(scale, sizes, strict=True)]) + base
            a, c, b = z.split(sizes, -1)
        elif spelling.columns == "slice":
            cuts = ((0, n), (n, 2 * n), (2 * n, n * (n + 2)))
            a, c, b = (z[:, i:j] * scale[k] + base[i:j] for k, (i, j) in enumerate(cuts))
        else:
            groups = zip(scale, z.split(sizes, -1), base.split(sizes), strict=True)
            a, c, b = (s * group + g for s, group, g in groups)
        return a.sigmoid() + self.eps, self.factor * c.sigmoid(), self.sinkhorn(b.unflatten(-1, (n, n)))

    def sinkhorn(self, logits: Tensor) -> Tensor:
        return sinkhorn_region(logits, self.iters, self.eps) if self.spelling.subgraph else sinkhorn(logits, self.iters, self.eps)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


sinkhorn_region = torch.compiler.nested_compile_region(sinkhorn)
