"""long_products: a product of 16-bit floats, summed in fp32 however many terms a sum has.

    long_product(a [m, k], b [k, n])     -> [m, n] fp32; terms k in parts of PART, the sums of parts added in fp32

Two ways. So many results that every multiprocessor has a tile of them, as those of a head, come from a kernel that adds
parts as it goes (long_product_kernel.py). Of fewer the library makes the sums of all parts, which are added then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.lowering.gpu import gpu_of

PART = 128  # terms that a tensor core sums in one go: its error is 1e-9 of the result a term, one row of eager 1e-7


@dataclass(frozen=True)
class Tiles:
    """Rows and columns of a program's tile, terms at a time, blocks of terms asked for ahead."""

    rows: int
    columns: int
    terms: int
    stages: int
    warps: int


def tiles_for(rows: int) -> Tiles:
    if rows <= 64:
        return Tiles(next(most for most in (16, 32, 64) if rows <= most), 64, 64, stages=6, warps=4)
    return Tiles(128, 128, 64, stages=4, warps=8)


def is_long(terms: int) -> bool:
    return terms > 2 * PART and terms % PART == 0


def long_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n], of one 16-bit type on a GPU, k a multiple of PART -> [m, n], fp32."""
    tiles, gpu = tiles_for(a.shape[0]), gpu_of(a.device)
    programs = -(-a.shape[0] // tiles.rows) * -(-b.shape[1] // tiles.columns)
    if gpu is not None and programs >= gpu.multiprocessors:
        return launch(a, b, tiles)
    return by_library(a, b)


def launch(a: Tensor, b: Tensor, tiles: Tiles) -> Tensor:
    """a [m, k], b [k, n] of any strides -> [m, n], fp32."""
    rows, (terms, columns) = a.shape[0], b.shape
    out = torch.empty(rows, columns, dtype=torch.float32, device=a.device)
    grid = (-(-rows // tiles.rows) * -(-columns // tiles.columns),)
    from v41.lowering.long_product_kernel import long_product  # needs Triton, which a CPU may lack

    long_product[grid](a.contiguous(), b, out, rows, columns, terms, *b.stride(), PART, tiles.rows, tiles.columns,
                       tiles.terms, tiles.stages, num_warps=tiles.warps)  # fmt: skip
    return out


def by_library(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.unflatten(1, (-1, PART)).transpose(0, 1), b.unflatten(0, (-1, PART))  # [parts, m, PART], ...
    return torch.bmm(left, right, out_dtype=torch.float32).sum(0)
