"""long_product_kernel: x times weights with long sums, in parts that are added in fp32 as they come.

    program (block of columns, tile of rows)    walks the terms once; after every PART of them what the tensor core has
                                                summed is added to the total, in fp32, and it begins anew

A tensor core cuts what it adds (narrow_products.py), and this bounds for how long. The library would write the sums of
all parts and read them again to add them, ten times the results of a head. Weights are the left factor, so that a few
rows fill the narrow side of a tensor core's tile; programs that read the same weights are neighbours. Each sum is in
the order of the terms, whatever the tile: a row has the same bits in any batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["rows"])
def long_product(x, weights, out, rows, COLUMNS: tl.constexpr, TERMS: tl.constexpr, TERM_APART: tl.constexpr,
                 COLUMN_APART: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 STEP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS)
    column = (tl.program_id(0) // tiles) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    there, live = column[:, None] < COLUMNS, row[:, None] < rows
    left = weights + column.to(tl.int64)[:, None] * COLUMN_APART
    right = x + row.to(tl.int64)[:, None] * TERMS
    total = tl.zeros([BLOCK, ROWS], tl.float32)
    sums = tl.zeros([BLOCK, ROWS], tl.float32)
    for start in tl.range(0, TERMS, STEP, num_stages=STAGES):
        term = start + tl.arange(0, STEP)[None, :]
        of_weights = tl.load(left + term.to(tl.int64) * TERM_APART, mask=there, other=0)
        of_x = tl.load(right + term, mask=live, other=0)
        sums = tl.dot(of_weights, of_x.trans(), sums)
        if (start + STEP) % PART == 0:
            total += sums
            sums = tl.zeros([BLOCK, ROWS], tl.float32)
    place = out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
    tl.store(place, total, mask=(row < rows)[None, :] & there)
