"""elementwise: ATen's pointwise ops as expressions, and expressions as Triton text.

As in eager, an op on bf16 or fp16 reads them as fp32 and rounds its result once; integers stay what they are.
Allow-list: left out are `fmod` and `remainder` (their result jumps by a whole divisor where the quotient differs in
its last bit), integer division, shifts by numbers that are not fixed, a cast to fp8 of what may lie beyond its largest
number (torch's releases differ there) and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import ops

from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.expr import Builder, Expr

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64, torch.uint8, torch.int16, torch.int8)
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and the largest number of each
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
    "where": "tl.where({a}, {b}, {c})", "and": "{a} & {b}", "or": "{a} | {b}", "not": "~{a}", "xor": "{a} ^ {b}",
    "lshift": "{a} << {b}", "rshift": "{a} >> {b}", "exp2": "tl.exp2({a})", "log2": "tl.log2({a})",
    "floor": "tl.floor({a})", "ceil": "tl.ceil({a})", "cos": "tl.cos({a})", "sin": "tl.sin({a})", "erf": "tl.erf({a})",
}  # fmt: skip

OF_BOOLS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}  # what arithmetic on booleans is

Rule = Callable[..., Expr]


def simple(op: str) -> Rule:
    """The ATen op is our `op`, operand by operand."""

    def rule(b: Builder, dtype: torch.dtype, *args: Expr) -> Expr:
        return computed(b, dtype, op, *args)

    return rule


def computed(b: Builder, dtype: torch.dtype, op: str, *args: Expr) -> Expr:
    """`op`, for a result of `dtype`: on fp32 and rounded, or on integers."""
    if dtype.is_floating_point:
        return rounded(b, dtype, b.apply(op, *(wide(b, arg) for arg in args)))
    if dtype == torch.bool:
        if op not in OF_BOOLS:
            raise Refused(f"takes {op} of booleans")
        op = OF_BOOLS[op]
    return b.apply(op, *(b.cast(arg, dtype) for arg in args), dtype=dtype)


def wide(b: Builder, x: Expr) -> Expr:
    return b.cast(x, torch.float32)


def rounded(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return b.cast(x, dtype)


def compare(op: str) -> Rule:
    def rule(b: Builder, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
        if x.dtype.is_floating_point or y.dtype.is_floating_point:
            return b.apply(op, wide(b, x), wide(b, y), dtype=torch.bool)
        kind = torch.promote_types(x.dtype, y.dtype)
        kind = torch.int32 if kind == torch.bool else kind
        return b.apply(op, b.cast(x, kind), b.cast(y, kind), dtype=torch.bool)

    return rule


def logical(op: str) -> Rule:
    def rule(b: Builder, dtype: torch.dtype, *args: Expr) -> Expr:
        if dtype == torch.bool and any(arg.dtype != torch.bool for arg in args):
            raise Refused("combines bits of numbers")
        return b.apply(op, *(b.cast(arg, dtype) for arg in args), dtype=dtype)

    return rule


def scaled(op: str) -> Rule:
    """add and sub: the second operand times alpha."""

    def rule(b: Builder, dtype: torch.dtype, x: Expr, y: Expr, alpha: float = 1) -> Expr:
        if alpha != 1 and dtype.is_floating_point:
            y = b.apply("mul", wide(b, y), b.const(float(alpha)))
        elif alpha != 1:
            y = computed(b, dtype, "mul", y, scalar(b, alpha, dtype))
        return computed(b, dtype, op, x, y)

    return rule


def whole(op: str) -> Rule:
    """floor and ceil: integers are what they are."""

    def rule(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
        return computed(b, dtype, op, x) if dtype.is_floating_point else b.cast(x, dtype)

    return rule


def shift(op: str) -> Rule:
    """By a number of bits that the type has; what is beyond differs by device."""

    def rule(b: Builder, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
        if y.op != "const" or not 0 <= int(str(y.data[0])) < 8 * dtype.itemsize:
            raise Refused("shifts by what is no number of its bits")
        return logical(op)(b, dtype, x, y)

    return rule


def cast(b: Builder, dtype: torch.dtype, x: Expr, *_: Any, **__: Any) -> Expr:
    if dtype == torch.bool:
        x = wide(b, x) if x.dtype.is_floating_point else x
        return b.apply("ne", x, b.const(0, x.dtype), dtype=dtype)
    if dtype in FP8 and max(map(abs, bounds(x))) > FP8[dtype]:
        raise Refused(f"casts to {dtype} what may lie beyond its largest number")
    if dtype not in (*FLOATS, *INTS, *FP8) or (dtype in INTS and x.dtype in FP8):
        raise Refused(f"casts to {dtype}")
    return b.cast(wide(b, x) if x.dtype in FP8 and dtype in FP8 else x, dtype)


def bounds(x: Expr) -> tuple[float, float]:
    """Between which numbers `x` lies, NaN aside, as far as its last few operations tell."""
    if x.op == "const":
        return float(str(x.data[0])), float(str(x.data[0]))
    inner = [bounds(arg) for arg in x.args] if x.op in ("maximum", "minimum", "abs", "mul", "cast", "neg") else []
    if x.op in ("maximum", "minimum"):
        pick = max if x.op == "maximum" else min
        (low, high), (low_too, high_too) = inner
        return pick(low, low_too), pick(high, high_too)
    if x.op == "mul":
        ends = [a * b for a in inner[0] for b in inner[1]]
        return (math.nan, math.nan) if any(map(math.isnan, ends)) else (min(ends), max(ends))
    if x.op == "abs":
        low, high = inner[0]
        return max(low, -high, 0.0), max(abs(low), abs(high))
    if x.op == "neg":
        return -inner[0][1], -inner[0][0]
    if x.op == "cast" and x.args[0].dtype.is_floating_point and x.dtype.is_floating_point:
        return inner[0]
    if x.op == "fold" and x.data[0] in ("maximum", "minimum"):
        return bounds(x.args[0])
    return -math.inf, math.inf


def divide(b: Builder, dtype: torch.dtype, x: Expr, y: Expr, shared: bool = False) -> Expr:
    """A divisor that several quotients share is inverted once: one rounding more, a fraction of the work."""
    x, y = wide(b, x), wide(b, y)
    return rounded(b, dtype, b.apply("mul", x, b.apply("recip", y)) if shared else b.apply("div", x, y))


def power(b: Builder, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
    kind = torch.float32 if dtype.is_floating_point else dtype  # integers multiply as such
    x = b.cast(x, kind)
    exponent = float(str(y.data[0])) if y.op == "const" else None
    if exponent in (2.0, 3.0):
        square = b.apply("mul", x, x, dtype=kind)
        return rounded(b, dtype, square if exponent == 2.0 else b.apply("mul", square, x, dtype=kind))
    by = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "recip"}.get(exponent or 0.0)
    if by is None or kind != torch.float32:
        raise Refused(f"raises to the power {exponent}")
    return rounded(b, dtype, b.apply(by, x))


def where(b: Builder, dtype: torch.dtype, condition: Expr, x: Expr, y: Expr) -> Expr:
    return b.apply("where", condition, b.cast(x, dtype), b.cast(y, dtype), dtype=dtype)


def relu(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return computed(b, dtype, "maximum", x, b.const(0.0))


def square(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return computed(b, dtype, "mul", x, x)


def is_nan(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    return b.apply("ne", wide(b, x), wide(b, x), dtype=dtype)


def sign(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    """-1, 0 or 1; 0 of NaN, as torch has it."""
    x, zero = wide(b, x), b.const(0.0)
    up = b.apply("where", b.apply("gt", x, zero, dtype=torch.bool), b.const(1.0), zero)
    return rounded(b, dtype, b.apply("where", b.apply("lt", x, zero, dtype=torch.bool), b.const(-1.0), up))


def log1p(b: Builder, dtype: torch.dtype, x: Expr) -> Expr:
    """log(u) * x / (u - 1) with u = 1 + x, in which the error that u was rounded with falls out."""
    x, one = wide(b, x), b.const(1.0)
    u = b.apply("add", x, one)
    away = b.apply("sub", u, one)
    small, huge = (b.apply("eq", away, other, dtype=torch.bool) for other in (b.const(0.0), x))
    told = b.apply("mul", b.apply("log", u), b.apply("div", x, b.apply("where", small, one, away)))
    return rounded(b, dtype, b.apply("where", small, x, b.apply("where", huge, b.apply("log", u), told)))


ATANH = (1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)  # of atanh(s) / s - 1 in descending powers of s^2


def softplus(b: Builder, dtype: torch.dtype, x: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    """max(x, 0) + log1p(e) with e = exp(-|x|), log1p(e) = 2 atanh(e / (2 + e)): exact to the last bits for small e too,
    where log(1 + e) is not. Beyond 20 that is x itself, which is what torch returns above its threshold."""
    if beta != 1 or threshold != 20:
        raise Refused("bends a softplus")
    x = wide(b, x)
    e = b.apply("exp", b.apply("neg", b.apply("abs", x)))
    s = b.apply("div", e, b.apply("add", e, b.const(2.0)))
    power = b.apply("mul", s, s)
    series = b.const(ATANH[0])
    for coefficient in ATANH[1:]:
        series = b.apply("add", b.apply("mul", series, power), b.const(coefficient))
    rest = b.apply("add", b.apply("mul", b.apply("mul", series, power), s), s)
    return rounded(b, dtype, b.apply("add", b.apply("maximum", x, b.const(0.0)), b.apply("add", rest, rest)))


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
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            x = computed(b, dtype, op, x, bound if isinstance(bound, Expr) else scalar(b, bound, dtype))
    return rounded(b, dtype, x)


def scalar(b: Builder, value: float, dtype: torch.dtype) -> Expr:
    """A Python number beside values of `dtype`."""
    if dtype.is_floating_point or isinstance(value, float):
        return b.const(float(value))
    kind = torch.int32 if dtype == torch.bool else dtype
    if not torch.iinfo(kind).min <= value <= torch.iinfo(kind).max:
        raise Refused(f"takes {value} for a number of {kind}")
    return b.const(int(value), kind)


def clamp_high(b: Builder, dtype: torch.dtype, x: Expr, high: Any) -> Expr:
    return clamp(b, dtype, x, None, high)


ELEMENTWISE: dict[Any, Rule] = {
    **{op: simple(op.name().split("::")[1].split(".")[0]) for op in (
        aten.mul.Tensor, aten.neg.default, aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.log.default,
        aten.abs.default, aten.sigmoid.default, aten.maximum.default, aten.minimum.default, aten.exp2.default,
        aten.log2.default, aten.cos.default, aten.sin.default, aten.erf.default)},
    aten.floor.default: whole("floor"), aten.ceil.default: whole("ceil"),
    **{op: scaled(op.name().split("::")[1].split(".")[0]) for op in (
        aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)},
    **{op: compare(op.name().split("::")[1].split(".")[0]) for name in ("eq", "ne", "lt", "le", "gt", "ge")
       for op in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)},
    **{op: logical(name) for name, op in (("and", aten.logical_and.default), ("or", aten.logical_or.default),
       ("not", aten.logical_not.default), ("and", aten.bitwise_and.Tensor), ("or", aten.bitwise_or.Tensor),
       ("not", aten.bitwise_not.default), ("and", aten.bitwise_and.Scalar), ("or", aten.bitwise_or.Scalar),
       ("xor", aten.bitwise_xor.Tensor), ("xor", aten.bitwise_xor.Scalar), ("xor", aten.logical_xor.default))},
    **{op: shift(name) for name, op in (
       ("lshift", aten.__lshift__.Scalar), ("lshift", aten.bitwise_left_shift.Tensor_Scalar),
       ("lshift", aten.bitwise_left_shift.Tensor), ("rshift", aten.__rshift__.Scalar),
       ("rshift", aten.bitwise_right_shift.Tensor_Scalar), ("rshift", aten.bitwise_right_shift.Tensor))},
    aten.mul.Scalar: simple("mul"), aten.reciprocal.default: simple("recip"), aten.square.default: square,
    aten.isnan.default: is_nan, aten.sign.default: sign, aten.log1p.default: log1p, aten.softplus.default: softplus,
    **dict.fromkeys(DIVISIONS, divide), aten.pow.Tensor_Scalar: power, aten.where.self: where,
    aten.relu.default: relu, aten.silu.default: silu, aten.tanh.default: tanh, aten.clamp.default: clamp,
    aten.clamp_min.default: clamp, aten.clamp_max.default: clamp_high,
    ops.prims.convert_element_type.default: cast, aten._to_copy.default: cast,
}  # fmt: skip
