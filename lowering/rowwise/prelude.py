"""prelude: the helpers that every generated file begins with, as text."""

from __future__ import annotations

PRELUDE = '''import triton
import triton.language as tl


@triton.jit
def fold_last(x, OP: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr):
    """[A, B] to [A, 1]: neighbours in pairs, the pairs in pairs, in whatever threads they lie."""
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, [A, B >> (level + 1), 2])
        if OP == 0:
            x = tl.sum(x, 2)
        elif OP == 1:
            x = tl.reduce(x, 2, maximum_or_nan)
        else:
            x = tl.reduce(x, 2, minimum_or_nan)
    return x


@triton.jit
def row_totals(home, index, OP: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
               RUNS: tl.constexpr, LEVELS: tl.constexpr, STEPS: tl.constexpr, STRIDE: tl.constexpr):
    """[WIDTH, ROWS] totals of a row from those of its chunks, or (STEPS 1) of its runs."""
    run = tl.arange(0, RUNS)[None, :]
    x = tl.full([WIDTH * ROWS, RUNS], START, tl.float32)
    for step in tl.static_range(STEPS):
        part = tl.load(home + (run * STEPS + step) * STRIDE + index, cache_modifier=".cg")
        if OP == 0:
            x = x + part
        elif OP == 1:
            x = maximum_or_nan(x, part)
        else:
            x = minimum_or_nan(x, part)
    return tl.reshape(fold_last(x, OP, WIDTH * ROWS, RUNS, LEVELS), [WIDTH, ROWS])


@triton.jit
def first_of(a, b):
    return a


@triton.jit
def settle(x):
    """`x` [n, 1] itself, behind an op that Triton moves no layout conversion across: without it, tiles that a product
    reads are computed twice, once in the layout of the product's operand and there by every warp. A single number
    becomes a scalar."""
    if x.shape[0] == 1:
        return tl.reduce(tl.reshape(x, [1]), 0, first_of)
    else:
        return tl.reduce(x, 1, first_of, keep_dims=True)


@triton.jit
def pick(home, lane, SLOT: tl.constexpr, ROWS: tl.constexpr):
    """Total number SLOT of every row, out of the memory where this program put them."""
    if ROWS == 1:
        return tl.load(home + SLOT)
    else:
        return tl.load(home + SLOT * ROWS + lane)


@triton.jit
def maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_or_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
'''
