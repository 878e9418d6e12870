"""Experts of a mixture in many spellings, and near misses of them, as plain functions to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tests.strategies import mhc as mhc  # it defines drawn_like
from v41.passes.experts_parts import GROUPED, rows_of
from v41.passes.matching import aten, prims

WIDTH, INNER = 16, 8  # at least: a grouped product asks for rows of 16 bytes
ENDS: dict[str, Callable[[Tensor, int], Tensor]] = {  # of the sorted expert numbers
    "searchsorted": lambda e, n: torch.searchsorted(e, torch.arange(n), right=True, out_int32=True),
    "counts": lambda e, n: (e[:, None] == torch.arange(n)).sum(0).cumsum(0).int(),
    "histogram": lambda e, n: torch.histc(e.float(), n, 0, n - 1).cumsum(0).to(torch.int32),
    "comparison": lambda e, n: (e <= torch.arange(n)[:, None]).sum(1, dtype=torch.int32),
}
TAKES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "division": lambda x, by, k: x[by // k],
    "index_select": lambda x, by, k: x.index_select(0, torch.div(by, k, rounding_mode="floor")),
    "repeated": lambda x, by, k: x.repeat_interleave(k, 0)[by],
    "expanded": lambda x, by, k: x[:, None].expand(-1, k, -1).reshape(-1, x.shape[1])[by],
    "gather": lambda x, by, k: x.gather(0, (by // k)[:, None].expand(-1, x.shape[1])),
}
SUMS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "inverse": lambda y, by, k: y[by.argsort()].view(-1, k, y.shape[1]).float().sum(1),
    "scattered": lambda y, by, k: torch.zeros_like(y).index_copy(0, by, y).view(-1, k, y.shape[1]).sum(1, dtype=F32),
    "index_add": lambda y, by, k: torch.zeros(len(by) // k, y.shape[1]).index_add(0, by // k, y.float()),
}
F32 = torch.float32
SILUS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "by hand": lambda g: torch.sigmoid(g) * g}
CLAMPS: dict[str, Callable[[Tensor, float | None, float | None], Tensor]] = {
    "clamp": lambda z, low, high: z.clamp(low, high),
    "where": lambda z, low, high: _where_low(torch.where(z > high, high, z), low),
}
SHARED = ("none", "same", "einsum", "another limit", "behind the cast", "gated")


def _where_low(z: Tensor, low: float | None) -> Tensor:
    return z if low is None else torch.where(z < low, low, z)


@dataclass(frozen=True)
class Mixture:
    """How one mixture is written. experts, k and limit are what the region must say of itself."""

    ends: str = "searchsorted"
    take: str = "division"
    sums: str = "inverse"
    silu: str = "silu"
    clamp: str = "clamp"
    together: bool = False  # W1 and W3 in one product
    shared: str = "same"
    experts: int = 4
    k: int = 2
    limit: float | None = 10.0
    width: int = WIDTH
    inner: int = INNER

    def rows(self) -> list[Tensor]:
        """x, the router's weights, the picks."""
        picks = torch.stack([torch.randperm(self.experts)[: self.k] for _ in range(5)])
        return [torch.randn(5, self.width).bfloat16(), torch.rand(5, self.k), picks]

    def weights(self) -> list[Tensor]:
        """Of the experts [E, out, in], then of the shared one; W3 None where W1 holds both."""
        width, inner = self.width, self.inner
        shapes = [(self.experts, inner, width)] * 2 + [(self.experts, width, inner)]
        if self.together:
            shapes = [(self.experts, 2 * inner, width), shapes[2]]
        if self.shared != "none":
            shapes += [(inner, width)] * 2 + [(width, inner)]
        return [torch.randn(shape).bfloat16() for shape in shapes]

    def forward(self, x: Tensor, weights: Tensor, picks: Tensor, *held: Tensor) -> Tensor:
        count = 2 if self.together else 3
        experts, shared = held[:count], held[count:]
        by = picks.flatten().argsort(stable=True)
        ends = ENDS[self.ends](picks.flatten()[by], self.experts)
        rows = TAKES[self.take](x, by, self.k)
        *first, last = [F.grouped_mm(rows, W.mT, offs=ends) for W in experts[:-1]]
        gate, up = last.chunk(2, -1) if self.together else (*first, last)
        a = self.swiglu(gate, up, self.limit) * weights.flatten()[by].unsqueeze(-1)
        y = F.grouped_mm(a.to(rows.dtype), experts[-1].mT, offs=ends)
        return self.with_shared(SUMS[self.sums](y, by, self.k), x, shared)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        clamp, silu = CLAMPS[self.clamp], SILUS[self.silu]
        g, u = gate.float(), up.float()
        if limit is not None:
            g = clamp(g, None, limit)
            u = clamp(u, -limit, limit)
        return silu(g) * u

    def with_shared(self, total: Tensor, x: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        if self.shared == "none":
            return total.to(x.dtype)
        gate, up = (torch.einsum("td,id->ti", x, W) if self.shared == "einsum" else F.linear(x, W) for W in held[:2])
        limit = 3.0 if self.shared == "another limit" else self.limit
        y = F.linear(self.swiglu(gate, up, limit).to(x.dtype), held[2])
        match self.shared:
            case "behind the cast":
                return total.to(x.dtype) + y
            case "gated":
                return (total + torch.sigmoid(x[:, :1].float()) * y.float()).to(x.dtype)
        return (total + y.float()).to(x.dtype)

    def wanted(self) -> dict[str, Any]:
        """What the region must say of itself."""
        inner = self.inner if self.shared in ("same", "einsum") else None
        own = {"experts": self.experts, "k": self.k, "limit": self.limit, "hidden": self.width, "inner": self.inner}
        return {**own, "shared_inner": inner, "weights": "bfloat16", "activations": "bfloat16"}

    def roles(self) -> list[str]:
        names = ["w13" if self.together else "w1", *["w3"] * (not self.together), "w2"]
        if self.wanted()["shared_inner"] is not None:
            names += ["shared_w1", "shared_w3", "shared_w2"]
        return sorted(["input", "experts", "weights", *names])


legal = st.builds(
    Mixture,
    st.sampled_from(sorted(ENDS)),
    st.sampled_from(sorted(TAKES)),
    st.sampled_from(sorted(SUMS)),
    st.sampled_from(sorted(SILUS)),
    st.sampled_from(sorted(CLAMPS)),
    st.booleans(),
    st.sampled_from(SHARED),
    st.integers(3, 9),
    st.integers(1, 3),
    st.sampled_from([None, 1.5, 10.0]),
    st.sampled_from([16, 24]),
    st.sampled_from([8, 32]),
)


# ---- damage that a program takes in whatever way its mixture is written


@dataclass(frozen=True)
class Places:
    """Where a mixture can be damaged: the products with W1 (or both) and W2, and what the latter reads."""

    gm: GraphModule
    up: Node
    down: Node

    @property
    def act(self) -> Node:
        """The activation in fp32, before it is cast."""
        return rows_of(self.order, self.down.args[0]).source.args[0]  # type: ignore[arg-type, return-value]

    @property
    def order(self) -> dict[Node, int]:
        return {node: i for i, node in enumerate(self.gm.graph.nodes)}

    @property
    def weights(self) -> Node:
        """The router's weights as the rows have them."""
        return next(n for n in self.gm.graph.nodes if n.target is aten.index.Tensor and n.meta["val"].dtype is F32)

    @property
    def rows(self) -> Node:
        return rows_of(self.order, self.up.args[0]).source  # type: ignore[arg-type]

    def behind(self, node: Node, *steps: Any) -> None:
        """Whoever reads `node` reads it after `steps`, each an operator and its further arguments."""
        users, last = list(node.users), node
        for target, *args in steps:
            with self.gm.graph.inserting_after(last):
                new = self.gm.graph.call_function(target, (last, *args))
            new.meta = {**node.meta, "val": target(*map_arg((last, *args), lambda arg: arg.meta["val"]))}
            last = new
        for user in users:
            user.replace_input_with(node, last)


def places(gm: GraphModule) -> Places:
    up, *_, down = [node for node in gm.graph.nodes if node.target is GROUPED]
    return Places(gm, up, down)


def _returns(at: Places) -> None:
    output = at.gm.graph.output_node()
    output.args = ((*output.args[0], at.down),)  # type: ignore[misc]


def _writes(at: Places) -> None:
    x = next(n for n in at.gm.graph.nodes if n.op == "placeholder" and getattr(n.meta["val"], "dtype", 0) is BF16)
    with at.gm.graph.inserting_before(at.down):
        at.gm.graph.call_function(aten.zero_.default, (x,)).meta = dict(x.meta)


def _limits_otherwise(at: Places) -> None:
    """Of the expert that is not shared."""
    last = [n for n in at.order if n.target is aten.clamp_max.default and at.order[n] < at.order[at.down]][-1]
    last.update_arg(1, 11.0)


def _reads_unrounded(at: Places) -> None:
    at.down.update_arg(0, rows_of(at.order, at.down.args[0]).source)  # type: ignore[arg-type]


DRAW = torch.ops.v41_tests.drawn_like.default
BF16, F8, CAST = torch.bfloat16, torch.float8_e4m3fn, prims.convert_element_type.default
ROUTES = "rows of x are taken by expert, for every pick once"
FORMATS = "weights, and what they are multiplied with, have one format each"
ACTIVATES = "W2 reads silu(W1 x) * W3 x, both clamped by one limit or neither"
WEIGHS = "the router's weight enters before W2"
ADDS = "the outputs of a row's picks are added, and nothing else is"
ROUNDS = "only the input of W2 and the sum are rounded"
FLAWS: dict[str, tuple[str, Callable[[Places], None]]] = {  # the rule it breaks, and how
    "rows of other tokens": (ROUTES, lambda at: at.behind(at.rows.all_input_nodes[-1], (aten.flip.default, [0]))),
    "the next expert": (ROUTES, lambda at: at.behind(at.down.args[2], (aten.add.Tensor, 1))),
    "W2 reads unrounded rows": (FORMATS, _reads_unrounded),
    "another activation": (ACTIVATES, lambda at: at.behind(at.up, (aten.tanh.default,))),
    "another limit for W3": (ACTIVATES, _limits_otherwise),
    "a draw": (ACTIVATES, lambda at: at.behind(at.act, (DRAW,), (aten.add.Tensor, at.act))),
    "a weight for all": (WEIGHS, lambda at: at.behind(at.weights, (aten.ones_like.default,))),
    "outputs that grow": (ADDS, lambda at: at.behind(at.down, (aten.mul.Tensor, 1.5))),
    "a rounded activation": (ROUNDS, lambda at: at.behind(at.act, (CAST, torch.float16), (CAST, F32))),
    "rounded outputs": (ROUNDS, lambda at: at.behind(at.down, (CAST, F8), (CAST, BF16))),
    "outputs of rows are returned": ("only its result is read outside", _returns),
    "x is written": ("nothing is written in between, and no effect reads it there", _writes),
}
