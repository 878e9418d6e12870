"""elementwise: ATen's pointwise ops as expressions, and expressions as Triton text.

As in eager, an op on bf16 or fp16 reads them as fp32 and rounds its result once. Allow-list: left out are ops on
integers (index arithmetic is no arithmetic of the model), `fmod` and `remainder` (their result jumps by a whole
divisor where the quotient differs in its last bit), random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.expr import Builder, Expr

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
aten = ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)

TEXT = {  # op -> Triton, with operands a, b, c
    "add": "{a} + {b}", "sub": "{a} - {b}", "mul": "{a} * {b}", "div": "{a} / {b}", "fma": "tl.fma({a}, {b}, {c})",
    "neg": "-{a}", "recip": "1.0 / {a}", "rsqrt": "tl.rsqrt({a})", "sqrt": "tl.sqrt_rn({a})", "exp": "tl.exp({a})",
    "log": "tl.log({a})", "abs": "tl.abs({a})", "sigmoid": "1.0 / (1.0 + tl.exp(-{a}))",
    "maximum": "tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "eq": "{a} == {b}", "ne": "{a} != {b}", "lt": "{a} < {b}", "le": "{a} <= {b}",
    "gt": "{a} > {b}", "ge": "{a} >= {b}",
    "where": "tl.where({a}, {b}, {c})", "and": "{a} & {b}", "or": "{a} | {b}", "not": "~{a}",
}  # fmt: skip

Rule = Callable[..., Expr]


def simple(op: str) -> Rule:
    """The ATen op is our `op`, operand by operand."""

    def rule(b: Builder, dtype: torch.dtype, *args: Expr) -> Expr:
        return rounded(b, dtype, b.apply(op, *(wide(b, arg) for arg in args)))

    return rule


def wide(b: Builder, x: Expr) -> Expr:
    return b.cast(x, torch.float32)


def rounded(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return b.cast(x, dtype)


def compare(op: str) -> Rule:
    def rule(b: Builder, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
        return b.apply(op, wide(b, x), wide(b, y), dtype=torch.bool)

    return rule


def logical(op: str) -> Rule:
    def rule(b: Builder, dtype: torch.dtype, *args: Expr) -> Expr:
        if any(arg.dtype != torch.bool for arg in args):
            raise Refused("combines bits of numbers")
        return b.apply(op, *args, dtype=torch.bool)

    return rule


def scaled(op: str) -> Rule:
    """add and sub: the second operand times alpha."""

    def rule(b: Builder, dtype: torch.dtype, x: Expr, y: Expr, alpha: float = 1) -> Expr:
        right = wide(b, y) if alpha == 1 else b.apply("mul", wide(b, y), b.const(float(alpha)))
        return rounded(b, dtype, b.apply(op, wide(b, x), right))

    return rule


def cast(b: Builder, dtype: torch.dtype, x: Expr, *_: Any, **__: Any) -> Expr:
    if dtype == torch.bool or dtype not in FLOATS:
        raise Refused(f"casts to {dtype}")
    return b.cast(x, dtype)


def divide(b: Builder, dtype: torch.dtype, x: Expr, y: Expr, shared: bool = False) -> Expr:
    """A divisor that several quotients share is inverted once: one rounding more, a fraction of the work."""
    x, y = wide(b, x), wide(b, y)
    return rounded(b, dtype, b.apply("mul", x, b.apply("recip", y)) if shared else b.apply("div", x, y))


def power(b: Builder, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
    x = wide(b, x)
    exponent = float(str(y.data[0])) if y.op == "const" else None
    if exponent in (2.0, 3.0):
        square = b.apply("mul", x, x)
        return rounded(b, dtype, square if exponent == 2.0 else b.apply("mul", square, x))
    by = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "recip"}.get(exponent or 0.0)
    if by is None:
        raise Refused(f"raises to the power {exponent}")
    return rounded(b, dtype, b.apply(by, x))


def where(b: Builder, dtype: torch.dtype, condition: Expr, x: Expr, y: Expr) -> Expr:
    return rounded(b, dtype, b.apply("where", condition, wide(b, x), wide(b, y)))


def relu(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return rounded(b, dtype, b.apply("maximum", wide(b, x), b.const(0.0)))


def silu(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    x = wide(b, x)
    return rounded(b, dtype, b.apply("mul", x, b.apply("sigmoid", x)))


TANH = (0.00229590103, -0.00834703257, 0.0217699765, -0.0539594078, 0.133333043, -0.333333332)
# (tanh(x) / x - 1) / x^2 in descending powers of x^2, least squares on |x| < 0.625


def tanh(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    """1 - 2 / (exp(2 |x|) + 1) with the sign of x; that cancels near 0, where a polynomial takes over."""
    x = wide(b, x)
    square, size, one = b.apply("mul", x, x), b.apply("abs", x), b.const(1.0)
    series = b.const(TANH[0])
    for coefficient in TANH[1:]:
        series = b.apply("add", b.apply("mul", series, square), b.const(coefficient))
    near = b.apply("add", b.apply("mul", b.apply("mul", x, square), series), x)
    power = b.apply("exp", b.apply("add", size, size))
    far = b.apply("sub", one, b.apply("div", b.const(2.0), b.apply("add", power, one)))
    far = b.apply("where", b.apply("lt", x, b.const(0.0), dtype=torch.bool), b.apply("neg", far), far)
    return rounded(b, dtype, b.apply("where", b.apply("lt", size, b.const(0.625), dtype=torch.bool), near, far))


def clamp(b: Builder, dtype: torch.dtype, x: Expr, low: Any = None, high: Any = None, **bounds: Any) -> Expr:
    low, high = bounds.get("min", low), bounds.get("max", high)
    out = wide(b, x)
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            out = b.apply(op, out, bound if isinstance(bound, Expr) else b.const(float(bound)))
    return rounded(b, dtype, out)


def clamp_high(b: Builder, dtype: torch.dtype, x: Expr, high: Any) -> Expr:
    return clamp(b, dtype, x, None, high)


ELEMENTWISE: dict[Any, Rule] = {
    **{op: simple(op.name().split("::")[1].split(".")[0]) for op in (
        aten.mul.Tensor, aten.neg.default, aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.log.default,
        aten.abs.default, aten.sigmoid.default, aten.maximum.default, aten.minimum.default)},
    **{op: scaled(op.name().split("::")[1].split(".")[0]) for op in (
        aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)},
    **{op: compare(op.name().split("::")[1].split(".")[0]) for name in ("eq", "ne", "lt", "le", "gt", "ge")
       for op in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)},
    **{op: logical(name) for name, op in (("and", aten.logical_and.default), ("or", aten.logical_or.default),
       ("not", aten.logical_not.default), ("and", aten.bitwise_and.Tensor), ("or", aten.bitwise_or.Tensor),
       ("not", aten.bitwise_not.default))},
    aten.mul.Scalar: simple("mul"), aten.reciprocal.default: simple("recip"), aten.square.default: lambda b, dtype, x:
        rounded(b, dtype, b.apply("mul", wide(b, x), wide(b, x))),
    **dict.fromkeys(DIVISIONS, divide), aten.pow.Tensor_Scalar: power, aten.where.self: where,
    aten.relu.default: relu, aten.silu.default: silu, aten.tanh.default: tanh, aten.clamp.default: clamp,
    aten.clamp_min.default: clamp, aten.clamp_max.default: clamp_high,
    ops.prims.convert_element_type.default: cast, aten._to_copy.default: cast,
}  # fmt: skip
