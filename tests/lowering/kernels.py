"""Small Triton kernels for the tests of the interpreter's repair and of cross-compilation. Loaded by path."""

import triton
import triton.language as tl


@triton.jit
def cast(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def arithmetic(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "neg":
        r = -a
    elif OP == "scale":
        r = a * 3
    elif OP == "where":
        r = tl.where(a < b, a, b)
    elif OP == "fma":
        r = tl.fma(a, b, a)
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "min":
        r = tl.minimum(a, b)
    elif OP == "max_nan":
        r = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        r = tl.clamp(a, -1.0, 2.0)
    tl.store(out + i, r)


@triton.jit
def dot(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision=PRECISION))


@triton.jit
def reduce(x, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + m[:, None] * N + n[None, :])
    r = tl.sum(a, AXIS) if OP == "sum" else tl.max(a, AXIS)
    tl.store(out + tl.arange(0, N if AXIS == 0 else M), r)


@triton.jit
def scale_rows(x, w, out, columns, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """RMS norm of the rows of a bf16 matrix, fp32 inside."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    v = tl.load(x + row * columns + i, mask=inside, other=0.0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 0) / columns + EPS)
    v *= tl.load(w + i, mask=inside, other=0.0)
    tl.store(out + row * columns + i, v.to(tl.bfloat16), mask=inside)


@triton.jit
def spill(x, out, N: tl.constexpr):
    """More live values than the registers of one warp hold."""
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v - tl.sum(v, 0))


@triton.jit
def count_up(counter):
    tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")


def rms_norm(x, w, eps):
    """A host function, as a generated module has one: allocates, launches, returns."""
    out = x.new_empty(x.shape)
    scale_rows[(x.shape[0],)](x, w, out, x.shape[1], eps, triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def decoded_product(x, y, out, N: tl.constexpr):
    """[16, N] bf16 by [N, 16] of e4m3, summed over N."""
    row, at = tl.arange(0, 16)[:, None], tl.arange(0, N)
    left = tl.load(x + row * N + at[None, :])
    right = tl.load(y + at[:, None] * 16 + tl.arange(0, 16)[None, :])
    right = right.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    tl.store(out + row * 16 + tl.arange(0, 16)[None, :], tl.dot(left, right))
