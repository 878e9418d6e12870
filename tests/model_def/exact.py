"""`exact()`: every GEMM, and every reduction whose length hangs on the layout, sums in fp64 and rounds once.

Under it a row's result depends on its inputs alone, not on the batch or on how a library tiles: the mode in which the
golden data was made. Reductions over a model width (a norm's mean, a Sinkhorn step) stay as they are; their lengths are
`fixed`.

A CPU computes sigmoid, silu and softplus in vectors, and what is left behind the last whole one by another routine with
other last bits, in fp64 too. So an element's value would hang on how many there are: here all lie in whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from v41.tools.exact import grouped_mm

aten = torch.ops.aten

GEMMS = {aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
         aten.baddbmm.default: torch.baddbmm, aten.linear.default: torch.nn.functional.linear,
         aten.matmul.default: torch.matmul, aten._grouped_mm.default: grouped_mm}
REDUCTIONS = {aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean, aten.logsumexp.default: torch.logsumexp,
              aten.cumsum.default: torch.cumsum}
TAILED = {aten.sigmoid.default, aten.silu.default, aten.softplus.default}
LANES = 64  # a whole number of vectors, of any type on any machine
SOFTMAXES = {aten._softmax.default: torch.softmax, aten._log_softmax.default: torch.log_softmax}


class exact(TorchDispatchMode):
    """`fixed`: lengths over which a reduction keeps its own precision."""

    def __init__(self, fixed: Iterable[int] = ()) -> None:
        super().__init__()
        self.fixed = frozenset(fixed)
        self.counts = {"gemm": 0, "reduction": 0}  # a test that expects the mode to bite can ask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GEMMS and args[0].is_floating_point():
            self.counts["gemm"] += 1
            doubles = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
            return GEMMS[func](*doubles, **kwargs).to(args[0].dtype)
        if func in REDUCTIONS and args[0].is_floating_point() and self.varies(args[0], args[1]):
            self.counts["reduction"] += 1
            dtype = kwargs.pop("dtype", None) or args[0].dtype
            return REDUCTIONS[func](args[0].double(), *args[1:], **kwargs).to(dtype)
        if func in TAILED:
            whole = pad(args[0].flatten(), (0, -args[0].numel() % LANES))
            return func(whole, *args[1:], **kwargs)[: args[0].numel()].view(args[0].shape)
        if func in SOFTMAXES and self.varies(args[0], args[1]):
            self.counts["reduction"] += 1
            return SOFTMAXES[func](args[0].double(), args[1]).to(args[0].dtype)
        with self:  # a composite op, which inference mode leaves whole: its parts come by here
            parts = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if parts is NotImplemented else parts

    def varies(self, x: Tensor, dims: int | list[int] | None) -> bool:
        dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
        return any(x.shape[d] not in self.fixed for d in dims)


def fixed_lengths(config: Any) -> set[int]:
    """The widths of a V41Config that a forward reduces over."""
    return {config.hc_mult, config.hidden_size, config.hc_mult * config.hidden_size, config.head_dim,
            config.q_lora_rank, config.index_head_dim, config.num_experts_per_tok, 2}
