"""Row-wise bodies drawn step by step: views of every kind, folds, products, ranks, look-ups, casts, quantisation.

Each step takes values that are there (floats [T, ...] and integers [T, ...]) and adds one. Steps keep numbers of
moderate size, and take bits of floats only where a last bit seldom tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from v41.model_def.quantization import encode_e2m1, exponent_byte, pack_pairs, power_of_two, unpack_pairs
from v41.model_def.topk import topk_lowest_index

Body = tuple[Callable[..., Any], list[Tensor], list[Tensor]]
CASTS = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 4096  # elements of a row


def pair_up(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp32, and of shapes that broadcast: `b` is averaged where it does not."""
    a, b = a.float(), b.float()
    while b.ndim > a.ndim:
        b = b.mean(1)
    while b.ndim < a.ndim:
        b = b.unsqueeze(1)
    for dim in range(1, a.ndim):
        if b.shape[dim] not in (1, a.shape[dim]):
            b = b.mean(dim, keepdim=True)
    return a, b


def grouped(x: Tensor, n: int) -> Tensor:
    sizes = [g for g in (2, 3, 4, 8, 16, 32) if x.shape[-1] % g == 0 and x.shape[-1] > g]
    return x.unflatten(-1, (-1, sizes[n % len(sizes)])) if sizes and x.ndim < 5 else x


def sliced(x: Tensor, n: int) -> Tensor:
    size = x.shape[-1]
    start = n % size
    stop = start + 1 + n // 7 % (size - start)
    return x[..., start : stop : 1 + n % 2]


def joined(x: Tensor, y: Tensor, n: int) -> Tensor:
    """Parts of x and y side by side, or one element of each by turns."""
    x, y = pair_up(x, y)
    y = y.expand(x.shape)
    dim = 1 + n % (x.ndim - 1)
    kind = n // 5 % 3
    if kind == 0:
        return torch.stack((x, y + 1), -1).flatten(-2)
    if kind == 1:
        return torch.cat((x, y * 0.5), dim)
    return torch.cat((x.narrow(dim, 0, (x.shape[dim] + 1) // 2), y.narrow(dim, 0, x.shape[dim] // 2 + 1)), dim)


def folded(x: Tensor, n: int) -> Tensor:
    dim, keep = 1 + n % (x.ndim - 1), bool(n // 3 % 2) or x.ndim == 2
    dims = [dim] if n % 5 else list(range(1, x.ndim))
    keep = keep or len(dims) == x.ndim - 1
    x = x.float()
    return (
        x.sum(dims, keepdim=keep) / 8,
        x.mean(dims, keepdim=keep),
        x.amax(dims, keepdim=keep),
        x.amin(dims, keepdim=keep),
        x.softmax(dim) * 3,
        torch.rsqrt(x.square().mean(dims, keepdim=True) + 1) * x,
        torch.nn.functional.layer_norm(x, x.shape[-1:]),
    )[n // 11 % 7]


def quantised(x: Tensor, n: int) -> Tensor:
    """Rounded to fp8 under a power of two a group, put back or with its bytes."""
    g = grouped(x.float(), n)
    byte = exponent_byte(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448))
    values = (g * power_of_two(254 - byte)).clamp(-448, 448).to(torch.float8_e4m3fn)
    if n % 2:
        return (values.float() * power_of_two(byte)).bfloat16()
    return torch.cat((values.flatten(1).view(torch.uint8), byte.flatten(1).to(torch.uint8)), -1)


def coded(x: Tensor, n: int) -> Tensor:
    """Four-bit codes in pairs, taken apart again every other time."""
    code = encode_e2m1(x.float(), x.float().abs().amax(-1, keepdim=True).clamp(min=0.5) * 0.25)
    if x.shape[-1] % 2:
        return code
    packed = pack_pairs(code)
    return unpack_pairs(packed) if n % 2 else packed


def ranked(x: Tensor, n: int) -> Tensor:
    return topk_lowest_index(x.float(), min(x.shape[-1], 1 + n % 6))


UNARY = (
    torch.sigmoid, torch.tanh, torch.neg, torch.abs, torch.sin, torch.relu, torch.sign, torch.nn.functional.softplus,
    torch.nn.functional.silu, lambda x: torch.exp(-x.abs()), lambda x: torch.log1p(x.abs()), lambda x: x.clamp(-0.5, 2),
    lambda x: torch.sqrt(x.abs() + 0.1), lambda x: x.flip(-1), lambda x: x.transpose(-1, -2) if x.ndim > 2 else x * 2,
    lambda x: torch.where(torch.isnan(x), 0.0, x), lambda x: x[..., 0] if x.ndim > 2 else x[:, :1],
    lambda x: x.flatten(1),
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, lambda a, b: a * b * 0.3, torch.maximum, lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: a.clamp(min=-1) + 0.25 * b.tanh(),
)  # fmt: skip
WHOLE = (
    lambda i: (i * 3 + 1) & 15, lambda i: i ^ 5, lambda i: (i << 2) - i, lambda i: i >> 1,
    lambda i: i.clamp(min=1, max=9), lambda i: torch.where(i > 3, i, 7 - i), lambda i: i.to(torch.int64) * 1000003,
    lambda i: (i.amax(-1, keepdim=True) - i), lambda i: i.flip(-1), lambda i: i.sum(-1, keepdim=True) + i,
)  # fmt: skip
PLAN = st.tuples(st.sampled_from("uubbvvgfffscjqkriltmMp"), *[st.integers(0, 997)] * 3)


@st.composite
def short_bodies(draw: st.DrawFn) -> Body:
    """A function of rows x [T, a, b], y [T, b], picks [T, 3] and of weights w [b], table [11, b], with its inputs."""
    a, b = draw(st.integers(1, 5)), draw(st.sampled_from((6, 16, 32, 48, 64, 80, 96, 128)))
    dtype = draw(st.sampled_from(CASTS))
    plan = draw(st.lists(PLAN, min_size=2, max_size=9))
    count = draw(st.integers(1, 3))

    rows = [torch.randn(7, a, b).to(dtype), torch.randn(7, b), torch.randint(0, 5, (7, 3))]
    return body_of(plan, dtype, count), rows, [torch.randn(b), torch.randn(11, b).bfloat16()]


def body_of(plan: Sequence[tuple[str, int, int, int]], dtype: torch.dtype, count: int) -> Callable[..., Any]:
    """The function that does the steps of `plan` and returns what the last `count` of them made."""

    def body(x: Tensor, y: Tensor, picks: Tensor, w: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        torch._check(x.shape[0] == y.shape[0])  # one number of rows, though nothing may combine them
        torch._check(x.shape[0] == picks.shape[0])
        floats, whole = [x, y.to(dtype), (y * w).to(dtype)], [picks]
        for kind, i, j, n in plan:
            value, other = floats[i % len(floats)], floats[j % len(floats)]
            number = whole[j % len(whole)]
            step(kind, value, other, number, n, table, floats, whole)
        made = [v for v in (*floats[3:], *whole[1:]) if v.shape[1:].numel() <= LARGEST]
        return tuple(v + 1 if not v.is_floating_point() else v * 1 for v in (made or floats)[-count:])

    return body


def step(kind: str, value: Tensor, other: Tensor, number: Tensor, n: int, table: Tensor, floats: list[Tensor],
         whole: list[Tensor]) -> None:  # fmt: skip
    """Adds what one step of a plan makes."""
    match kind:
        case "u":
            floats.append(UNARY[n % len(UNARY)](value.float() if n % 2 else value))
        case "b":
            floats.append(BINARY[n % len(BINARY)](*pair_up(value, other)))
        case "v":
            floats.append(sliced(value, n))
        case "g":
            floats.append(grouped(value, n))
        case "f":
            floats.append(folded(value, n))
        case "s":
            floats.append(value.to(CASTS[n % 3]))
        case "c":
            whole.append(coded(value, n).to(torch.int32))
        case "j":
            floats.append(joined(value, other, n))
        case "q":
            made = quantised(value, n)
            (floats if made.is_floating_point() else whole).append(made if n % 2 else made.to(torch.int32))
        case "k":
            floats.append(value.float().gather(-1, ranked(value, n)))
        case "r":
            whole.append(ranked(value, n))
        case "i":
            whole.append(WHOLE[n % len(WHOLE)](number))
        case "l":
            floats.append(torch.nn.functional.embedding(number & 7, table))
        case "t":
            floats.append(number.float() * 0.1)
        case "m":
            floats.append(value.float().flatten(1)[:, : table.shape[-1]] @ pad(table.float(), value))
        case "p":  # from a table made on the way; long enough for a kernel of its own kind where rows are wide
            columns = min(value.shape[1:].numel(), table.shape[-1])
            weights = table[0, :columns].float()[:, None] * table[1].float()
            floats.append(value.float().flatten(1)[:, :columns] @ (weights / columns**0.5))
        case "M":
            floats.append(torch.einsum("ts,tk->tsk", value.float().flatten(1)[:, :5], other.float().flatten(1)[:, :6]))


def pad(table: Tensor, value: Tensor) -> Tensor:
    """Weights for the first columns of `value`."""
    columns = min(value.shape[1:].numel(), table.shape[-1])
    return table[:, :columns].t() / columns**0.5
