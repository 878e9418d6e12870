"""Exact: a run of the plain model that does every operation in fp64 and rounds once, to the type the model gives it.

    eager   fp32 sums in the library's order, bf16 products as its GEMM makes them     x @ w -> bf16
    Exact   the same operation on fp64 copies, then one cast                           (x.double() @ w.double()) -> bf16

The rounding points of the model stay (streams, norms, probabilities, quantised records), so eager's distance from this
run is what accumulation and approximate functions cost, and nothing that belongs to the model. Moves of data and casts
run as they are; so does what writes in place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, ops

from v41._compat import OpOverload, TorchDispatchMode

SUMS = frozenset({  # beside everything pointwise: what adds up along an axis
    ops.aten.mm.default, ops.aten.bmm.default, ops.aten.addmm.default, ops.aten.baddbmm.default, ops.aten.mv.default,
    ops.aten.dot.default, ops.aten.sum.default, ops.aten.sum.dim_IntList, ops.aten.mean.default, ops.aten.mean.dim,
    ops.aten._softmax.default, ops.aten._log_softmax.default, ops.aten.cumsum.default, ops.aten.logsumexp.default,
    ops.aten._grouped_mm.default,
})  # fmt: skip
WORKING = (torch.float32, torch.bfloat16, torch.float16)


class Exact(TorchDispatchMode):
    """`with Exact(): model(batch, cache)`."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = set(SUMS)  # operations that are not composite, as far as they have come by

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.whole:
            with self:  # a composite op, which inference mode leaves whole: its parts come by here
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.whole.add(func)
        result = func(*args, **kwargs)
        if not computes(func) or not isinstance(result, Tensor) or result.dtype not in WORKING:
            return result
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = {**kwargs, "dtype": torch.float64}
        run = grouped_mm if func is ops.aten._grouped_mm.default else func
        return run(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()}).to(result.dtype)


@cache
def computes(func: OpOverload) -> bool:
    """Whether `func` makes new numbers out of old ones, and only that."""
    pointwise = torch.Tag.pointwise in func.tags and func is not ops.aten._to_copy.default
    return (pointwise or func in SUMS) and not func._schema.is_mutable


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype in WORKING else value


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """aten._grouped_mm of rows [T, K] and weights [G, K, N], which has no fp64. Rows past the last offset are zero."""
    assert rows.ndim == 2 and weights.ndim == 3 and bias is None
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    start = 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = rows[start:stop] @ weights[group]
        start = stop
    return out
