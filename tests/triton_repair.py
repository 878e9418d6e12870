"""The repair of Triton's interpreter: done by importing this file in a process that interprets (triton_interpreter.py).

The interpreter holds a bf16 or fp8 value as its bits. Everything here turns bits into torch tensors of the true type
and back, and lets torch do the rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as it

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
RUN = 64  # numbers a dot sums exactly; a longer sum is rounded after each, as in dots that go on from each other
Builder, Handle = it.InterpreterBuilder, it.TensorHandle
plain_cast, plain_binary, plain_unary = Builder.cast_impl, Builder.binary_op, Builder.unary_op
plain_tensor = it._patch_lang_tensor
plain_dot, plain_sum, plain_splat = Builder.create_dot, it.ReduceOps.sum, Builder.create_splat


def is_bits(handle: Any) -> bool:  # a comparison keeps its operands' type and holds bools
    return handle.dtype.scalar in NARROW and handle.data.dtype != np.bool_


def values(handle: Any) -> Tensor:
    tensor = torch.from_numpy(np.array(handle.data))
    return tensor.view(NARROW[handle.dtype.scalar]) if is_bits(handle) else tensor


def wide(handle: Any) -> Any:
    return values(handle).float().numpy() if is_bits(handle) else handle.data


def rounded(tensor: Tensor, kind: Any) -> Any:
    if kind not in NARROW:
        exact = tensor.float() if tensor.dtype in NARROW.values() else tensor
        return Handle(exact.numpy().astype(it._get_np_dtype(kind)), kind)
    if kind.primitive_bitwidth == 8:
        limit = torch.finfo(NARROW[kind]).max
        tensor = tensor.float().clamp(-limit, limit)
    bits = torch.int16 if kind.primitive_bitwidth == 16 else torch.uint8
    return Handle(tensor.to(NARROW[kind]).view(bits).numpy().view(it._get_np_dtype(kind)), kind)


def cast(self: Any, source: Any, target: Any) -> Any:
    if is_bits(source) or target.scalar in NARROW:
        return rounded(values(source), target.scalar)
    return plain_cast(self, source, target)


def fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
    if mode == it._ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError("a cast that rounds towards zero is not interpreted")
    return cast(self, source, target)


def binary(self: Any, a: Any, b: Any, op: Any) -> Any:
    if not is_bits(a):
        return plain_binary(self, a, b, op)
    kind, result = a.dtype.scalar, op(wide(a), wide(b))
    return Handle(result, kind) if result.dtype == np.bool_ else rounded(torch.from_numpy(result), kind)


def unary(self: Any, a: Any, op: Any) -> Any:
    return rounded(torch.from_numpy(op(wide(a))), a.dtype.scalar) if is_bits(a) else plain_unary(self, a, op)


def clamp(self: Any, x: Any, low: Any, high: Any, nan: Any) -> Any:
    keeps = nan == it._ir.PROPAGATE_NAN.ALL
    up, down = (np.maximum, np.minimum) if keeps else (np.fmax, np.fmin)
    return binary(self, binary(self, x, low, up), high, down)


def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not z.dtype.scalar.is_floating():
        return Handle(x.data * y.data + z.data, z.dtype.scalar)
    x64, y64, z64 = (np.asarray(wide(handle), np.float64) for handle in (x, y, z))
    return rounded(torch.from_numpy(x64 * y64 + z64), z.dtype.scalar)


def splat(self: Any, *args: Any) -> Any:
    (given,) = (arg for arg in args if isinstance(arg, Handle))
    spread = plain_splat(self, *args)
    if given.data.dtype == np.bool_:  # a comparison, which the interpreter spreads as numbers of its operands' type
        spread.data = spread.data.astype(np.bool_)
    return spread


def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    if not a.dtype.scalar.is_floating():
        return plain_dot(self, a, b, d, precision, imprecise)
    sides = [np.array(wide(side)) for side in (a, b)]
    if precision == it._ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32:
        for side in sides:  # to 10 bits, ties away from zero, as cvt.rna.tf32 does
            bits = side.view(np.uint32)
            bits[np.isfinite(side)] += 0x1000
            bits &= np.uint32(0xFFFFE000)
    total = wide(d)
    for first in range(0, sides[0].shape[-1], RUN):
        left, right = sides[0][..., first : first + RUN], sides[1][..., first : first + RUN, :]
        total = (np.matmul(left.astype(np.float64), right.astype(np.float64)) + total).astype(np.float32)
    return rounded(torch.from_numpy(total), d.dtype.scalar)


def tree_sum(self: Any, input: Any) -> Any:
    if not input.dtype.is_floating():
        return plain_sum(self, input)
    handle = input.handle
    data = handle.data.reshape(-1) if self.axis is None else np.moveaxis(handle.data, self.axis, 0)
    while len(data) > 1:  # blocks are powers of two
        halves = (Handle(half, handle.dtype) for half in np.split(data, 2))
        data = binary(it.interpreter_builder, *halves, np.add).data
    data = data[0]
    if self.keep_dims:
        data = data.reshape((1,) * handle.data.ndim) if self.axis is None else np.expand_dims(data, self.axis)
    return self.to_tensor(data, input.dtype)


def tensor_patched(tensor: Any, scope: Any) -> None:
    plain_tensor(tensor, scope)  # 3.6 ends a loop by int() of an array of one element, which numpy no longer takes
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


Builder.cast_impl, Builder.create_fp_to_fp, Builder.binary_op, Builder.unary_op = cast, fp_to_fp, binary, unary
Builder.create_clampf, Builder.create_fma, Builder.create_dot, Builder.create_splat = clamp, fma, dot, splat
Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
Builder.get_bf16 = lambda self, value: rounded(torch.tensor([value], dtype=torch.float32), tl.bfloat16)
it.ReduceOps.sum = tree_sum
it._patch_lang_tensor = tensor_patched
