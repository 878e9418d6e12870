"""run_fp64, assert_accurate: what a graph means in exact arithmetic, and the accuracy a lowered run of it owes.

    truth = run_fp64(gm, *inputs)                      # the graph's outputs, floats as fp64
    assert_accurate(kernel(*inputs), gm, *inputs)      # RMS error <= max(1.5 x eager's, 1 ulp of the output's RMS)

All float arithmetic runs in fp64; where the graph rounds (a value of 16 or 8 bits) the fp64 value is rounded to that
type, as the rounding contract keeps these points: so a kernel that leaves one out, or adds one, is as wrong as one
that sums badly. `rounding=False` leaves them out, which tells what the model's own rounding costs. A decision is
taken from the eager run: comparisons, picks, integer codes, ceil and the like are not truer in fp64, and one other
pick would hide every other error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map

from v41.regions import flatten

aten = torch.ops.aten
CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}
DECISIONS = {getattr(aten, name).default for name in ("ceil", "floor", "round", "trunc", "sign")}
PICKS = {aten.topk.default: 2, aten.sort.default: 1, aten.max.dim: 1, aten.min.dim: 1}  # -> position of `dim`


def run_fp64(gm: GraphModule, *inputs: Any, rounding: bool = True) -> Any:
    """Outputs of `gm` in exact arithmetic. Inputs that the graph writes are copied first."""
    flat = flatten(gm)
    eager = _Eager(flat)
    eager.run(*tree_map(_copy, inputs))
    return _Exact(flat, eager.values, rounding).run(*tree_map(_widen, inputs))


def assert_accurate(found: Any, gm: GraphModule, *inputs: Any) -> None:
    """Holds `found`, the outputs of a lowered run, to the rounding contract."""
    truth = tree_leaves(run_fp64(gm, *inputs))
    eager = tree_leaves(flatten(gm)(*tree_map(_copy, inputs)))
    for index, (got, plain, exact) in enumerate(zip(tree_leaves(found), eager, truth, strict=True)):
        assert got.dtype == plain.dtype and got.shape == plain.shape, f"output {index}: {got.dtype} {tuple(got.shape)}"
        if not got.is_floating_point():
            assert torch.equal(got, plain), f"output {index}: {(got != plain).sum()} of {got.numel()} differ"
            continue
        error, allowed = rms(got.double() - exact), max(1.5 * rms(plain.double() - exact), ulp(rms(exact), got.dtype))
        assert error <= allowed, f"output {index}: RMS error {error:.3e}, allowed {allowed:.3e}"


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbours in `dtype` around `value`."""
    limits = torch.finfo(dtype)
    return limits.eps * 2.0 ** torch.tensor(max(value, limits.tiny)).log2().floor().item()


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _widen(value: Any) -> Any:
    return value.double() if _is_float(value) else _copy(value)


class _Eager(Interpreter):
    """Keeps what every node returned, before a later node writes to it."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.values[n] = tree_map(_copy, result)
        return result


class _Exact(Interpreter):
    def __init__(self, gm: GraphModule, eager: dict[Node, Any], rounding: bool) -> None:
        super().__init__(gm)
        self.eager, self.rounding = eager, rounding

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        plain = self.eager[n]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        floats_in = any(_is_float(leaf) for leaf in tree_leaves((args, kwargs)))
        if n.target in DECISIONS or not floats_in or not any(map(_is_float, tree_leaves(plain))):
            return tree_map(_widen, plain)
        if n.target in CASTS:
            return self._rounded(args[0], plain)
        if n.target in PICKS:
            return self._rounded(_picked(n.target, args, plain), plain[0]), plain[1]
        args, kwargs = tree_map(lambda leaf: torch.float64 if _is_float_type(leaf) else leaf, (args, kwargs))
        result = getattr(self, n.op)(n.target, args, kwargs)
        return tree_map(self._rounded, result, plain)

    def _rounded(self, wide: Any, plain: Any) -> Any:
        if not _is_float(plain):
            return plain
        narrow = self.rounding and plain.dtype.itemsize < 4
        return wide.to(plain.dtype).double() if narrow else wide


def _is_float_type(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _picked(target: Any, args: tuple[Any, ...], plain: Any) -> Tensor:
    position = PICKS[target]
    dim = args[position] if len(args) > position else -1
    index = plain[1]
    if index.ndim < args[0].ndim:
        return args[0].gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return args[0].gather(dim, index)
