"""prelude: the helpers that files of kernels with whole rows begin with, behind those of rowwise/prelude.py."""

from __future__ import annotations

HELPERS = '''

@triton.jit
def fold_axis(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """[A, B, C] to [A, 1, C]: neighbours in pairs, the pairs in pairs, in whatever threads they lie."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [A, B >> (level + 1), 2, C]), 2)
    return x


@triton.jit
def anchored(x, SHAPE: tl.constexpr, AXIS: tl.constexpr):
    """`x` as SHAPE, of size 1 along AXIS, behind an op that Triton moves no layout across: else tiles that meet a sum
    take its layout, all of them in every thread."""
    return tl.reduce(tl.reshape(x, SHAPE), AXIS, first_of, keep_dims=True)


@triton.jit
def bare(x):
    """`x`, a scalar if it is a single number."""
    if x.numel == 1:
        return tl.reduce(tl.reshape(x, [1]), 0, first_of)
    else:
        return x


@triton.jit
def ordered(x):
    """fp32 as int32 in the same order, NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC00000, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def ordered_down(x):
    """fp32 as int32 in the same order, NaN below all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, -0x7FC00001, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def unordered(key):
    """The fp32 that `ordered` made `key` of."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def add_up(place, there, KEPT: tl.constexpr, step):
    """The sum of KEPT numbers that lie `step` apart, one after the other."""
    x = tl.load(place, mask=there, other=0.0, cache_modifier=".cg") + 0.0
    for i in tl.static_range(1, KEPT):
        x = x + tl.load(place + i * step, mask=there, other=0.0, cache_modifier=".cg")
    return x
'''
