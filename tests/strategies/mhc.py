"""Small mHC stacks in many spellings: entry, seams, Engram-like interruptions, exit, as a plain function to trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from v41.model_def.config import V41Config
from v41.model_def.mhc import Mix, boundary, collapse, entry_streams, post
from v41.model_def.norm import RMSNorm


@torch.library.custom_op("v41_tests::drawn_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn_like(x: Tensor) -> Tensor:
    """For the compiler a draw of random numbers, which must not move; in truth zeros."""
    return torch.zeros_like(x)


drawn_like.register_fake(torch.empty_like)

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
    "1 over a root": lambda x, v: x * (1 / v.sqrt()),
    "a power": lambda x, v: x * v**-0.5,
}
NEAR_MISSES: dict[str, Piece] = {  # what is left of a sum over streams, given the sum and its last term
    "0.999 of": lambda total, last: 0.999 * total,
    "1.001 of": lambda total, last: total * 1.001,
    "all but the last term of": lambda total, last: total - last,
    "a little more than": lambda total, last: total + 1e-6,
}
PROJECTIONS: dict[str, Piece] = {
    "matmul": lambda x, fn: x @ fn.T,
    "linear": torch.nn.functional.linear,
    "einsum": lambda x, fn: torch.einsum("tk,ck->tc", x, fn),
    "sum": lambda x, fn: (x[:, None] * fn).sum(-1),
    "sum of the swapped": lambda x, fn: (fn * x[:, None]).sum(dim=-1),
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
    subgraph: bool = False  # Sinkhorn in a subgraph of its own

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return DIVISIONS[self.division](x, MEANS[self.mean](SQUARES[self.square](x)) + eps)


@dataclass(frozen=True)
class Stack:
    """`sites` boundaries and an exit; before those in `engrams` the streams are interrupted.

    `flaw`: what is wrong, and at which site (the exit counts as site number `sites`). Sites take turns at `spellings`.
    """

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
    spellings: tuple[Spelling, ...] = (Spelling(),)
    flaw: tuple[str, int] | None = None

    def to_trace(self, rows: int = 5) -> tuple[Callable[..., Any], Tensor, list[Tensor]]:
        """(function, its row tensor, its weights), for `trace`."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        n, D = self.count, self.width
        weights = [random(D, D).to(self.dtype)]
        for site in range(self.sites + 1):
            columns = n * (n + 2) + self.has("a spare column", site)
            weights += [random(columns, n * D), random(columns), random(3), random(D).to(self.dtype)]
        return self.forward, random(rows, D).to(self.dtype), weights

    def found(self) -> Counter[str]:
        """The regions that a stack without a flaw becomes, by name."""
        interrupted = len([site for site in self.engrams if site > 0])
        wanted = {
            "sinkhorn": self.sites,
            "mhc_boundary entry": 1,
            "mhc_boundary seam": self.sites - 1 - interrupted,
            "mhc_boundary after_engram": interrupted,
            "mhc_post": interrupted,
            "mhc_exit": 1,
        }
        return +Counter(wanted)

    def spelled(self, site: int) -> Spelling:
        return self.spellings[site % len(self.spellings)]

    def has(self, flaw: str, site: int) -> bool:
        return self.flaw == (flaw, site)

    def nearly(self, what: str, site: int, total: Tensor, last: Tensor) -> Tensor:
        misses = (miss for name, miss in NEAR_MISSES.items() if self.has(f"{name} {what}", site))
        return next(misses, lambda total, last: total)(total, last)

    def forward(self, embedded: Tensor, *weights: Tensor) -> Any:
        taken: list[Tensor] = []
        X, A = self.entry(embedded)
        y = B = C = None
        for site in range(self.sites):
            if site in self.engrams:
                X, y = self.engram(self.post(site, X, y, C, B)), None
            fn, base, scale, norm = weights[4 * site + 1 : 4 * site + 5]
            X = self.post(site, X, y, C, B)
            own = self.coefficients(-1, X, fn, base, scale, [])[0] if self.has("its own pre", site) else A
            x = self.collapsed(site, X, A, norm, own, taken)
            if self.has("an effect inside", site):
                taken.append(drawn_like(x))
            if self.has("a tap inside", site):  # legal: what it reads is an output, and it may wait
                taken += [x.exp(), X.float().mean(1)]
            A, C, B = self.coefficients(site, X, fn, base, scale, taken)
            y = torch.tanh(x @ weights[0])
        X = self.post(self.sites, X, y, C, B)
        return self.collapsed(self.sites, X, A, weights[-1], X.float().mean(-1).sigmoid(), taken), *taken

    def entry(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        first = (torch.arange(self.count) == 0).to(torch.float32)
        return embedded.unsqueeze(1).repeat(1, self.count, 1), first.expand(embedded.shape[0], self.count)

    def engram(self, X: Tensor) -> Tensor:
        return (X.float() + torch.sigmoid(X.float().mean(-1, keepdim=True)) * X.float().exp()).to(X.dtype)

    def post(self, site: int, X: Tensor, y: Tensor | None, C: Tensor | None, B: Tensor | None) -> Tensor:
        if y is None or C is None or B is None:
            return X
        mixed = MIXES[self.spelled(site).mix](X.float(), B.mT if self.transposed_comb else B)
        if self.has("comes back", site):
            y = y + torch.tanh(mixed[:, 0]).to(y.dtype)
        if self.has("mixes twice as much", site):
            mixed = mixed * 2
        last = (B[..., -1, None] if self.transposed_comb else B[:, -1, :, None]) * X[:, -1:]
        mixed = self.nearly("the mix", site, mixed, last)
        return PENDINGS[self.spelled(site).pending](y.float(), C, mixed).to(X.dtype)

    def collapsed(self, site: int, X: Tensor, A: Tensor, norm: Tensor, own: Tensor, taken: list[Tensor]) -> Tensor:
        """x, what the sublayer reads. own: the pre that this boundary predicts."""
        if self.has("its own pre", site):
            taken.append(A)
            A = own
        spelling = self.spelled(site)
        h = COLLAPSES[spelling.collapse](X.float(), A)
        h = self.nearly("the collapse", site, h, A[:, -1:] * X[:, -1])
        if self.has("collapses with a rest", site):
            h = h + X[:, 0].float()
        if self.has("collapses twice", site):
            again = COLLAPSES[spelling.collapse](X.float(), A.flip(-1))
            taken.append(self.normalise(spelling, again.to(X.dtype), norm))
        return self.normalise(spelling, h.to(X.dtype), norm)

    def normalise(self, spelling: Spelling, h: Tensor, weight: Tensor) -> Tensor:
        x = spelling.norm(h.float(), self.norm_eps)
        return (x * weight.float() if self.weighted else x).to(h.dtype)

    def coefficients(self, site: int, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, taken: list[Tensor]) -> Any:
        n, spelling = self.count, self.spelled(site)
        x = X.flatten(1).float()
        measured = X[:, 0].float() if self.has("the RMS of one stream", site) else x
        project = PROJECTIONS[spelling.projection]
        if spelling.scaled == "before" and measured is x:
            z = project(spelling.norm(x, self.norm_eps), fn)
        else:
            mean = MEANS[spelling.mean](SQUARES[spelling.square](measured))
            z = DIVISIONS[spelling.division](project(x, fn), mean + self.norm_eps)
        sizes = (n, n, n * n)
        cuts = ((0, n), (n, 2 * n), (2 * n, n * (n + 2)))
        if self.has("a spare column", site):
            taken.append(z[:, n * (n + 2)])
        if spelling.columns == "affine first":
            scales = torch.cat([s.expand(size) for s, size in zip(scale, sizes, strict=True)])
            a, c, b = ((z[:, : n * (n + 2)] * scales) + base[: n * (n + 2)]).split(sizes, -1)
        elif spelling.columns == "slice" or self.has("a spare column", site):
            a, c, b = (z[:, i:j] * scale[k] + base[i:j] for k, (i, j) in enumerate(cuts))
        else:
            groups = zip(scale, z.split(sizes, -1), base.split(sizes), strict=True)
            a, c, b = (s * group + g for s, group, g in groups)
        if self.has("another gate", site):
            taken.append(c.sigmoid())
        return a.sigmoid() + self.eps, self.factor * c.sigmoid(), self.sinkhorn(site, b.unflatten(-1, (n, n)))

    def sinkhorn(self, site: int, logits: Tensor) -> Tensor:
        if self.has("changes eps", site):
            return sinkhorn(logits, 2, self.eps, last_eps=1e-3)
        return (sinkhorn_region if self.spelled(site).subgraph else sinkhorn)(logits, self.iters, self.eps)


def sinkhorn(logits: Tensor, iters: int, eps: float, last_eps: float | None = None) -> Tensor:
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m if last_eps is None else m / (m.sum(-1, keepdim=True) + last_eps)


sinkhorn_region = torch.compiler.nested_compile_region(sinkhorn)

spellings = st.builds(
    Spelling,
    collapse=st.sampled_from(sorted(COLLAPSES)),
    mix=st.sampled_from(sorted(MIXES)),
    pending=st.sampled_from(sorted(PENDINGS)),
    square=st.sampled_from(sorted(SQUARES)),
    mean=st.sampled_from(sorted(MEANS)),
    division=st.sampled_from(sorted(DIVISIONS)),
    projection=st.sampled_from(sorted(PROJECTIONS)),
    scaled=st.sampled_from(["after", "before"]),
    columns=st.sampled_from(["split", "slice", "affine first"]),
    subgraph=st.booleans(),
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Legal stacks of one to three boundaries, each and the exit in a spelling of its own: a trace costs seconds."""
    sites = draw(st.sampled_from([3, 2, 1]))
    return Stack(
        count=draw(st.sampled_from([4, 2, 3])),
        width=draw(st.sampled_from([8, 4, 6])),
        sites=sites,
        engrams=tuple(site for site in range(1, sites) if draw(st.booleans())),
        iters=draw(st.integers(1, 3)),
        eps=draw(st.sampled_from([1e-6, 1e-3])),
        norm_eps=draw(st.sampled_from([1e-20, 1e-6])),
        factor=draw(st.sampled_from([2.0, 1.0])),
        weighted=draw(st.booleans()),
        transposed_comb=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32])),
        spellings=tuple(draw(spellings) for _ in range(sites + 1)),
    )


class PlainStack(nn.Module):
    """The plain model's own boundaries around the simplest of sublayers and Engrams, `config` telling how many."""

    def __init__(self, config: V41Config, width: int = 8) -> None:
        super().__init__()
        self.config, n = config, config.hc_mult
        self.work = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16))
        self.norms = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for _ in range(2 * config.num_hidden_layers + 1))
        self.fns = nn.ParameterList(torch.randn(n * (n + 2), n * width) for _ in self.norms)
        self.base, self.scale = nn.Parameter(torch.randn(n * (n + 2))), nn.Parameter(torch.ones(3))

    def mix(self, site: int) -> Mix:
        norm: Any = self.norms[site]
        numbers = self.config.hc_sinkhorn_iters, self.config.hc_eps, self.config.rms_norm_eps
        return Mix(self.fns[site], self.base, self.scale, norm, *numbers)

    def forward(self, embedded: Tensor) -> Tensor:
        X, A = entry_streams(embedded, self.config.hc_mult)
        y = B = C = None
        for layer in range(self.config.num_hidden_layers):
            if layer in self.config.engram_layer_ids:
                X, y = (post(X, y, C, B).float().exp()).bfloat16(), None
            for site in (2 * layer, 2 * layer + 1):
                X, x, A, C, B = boundary(X, y, C, B, A, self.mix(site))
                y = torch.tanh(x @ self.work)
        return self.norms[-1](collapse(post(X, y, C, B), A))
