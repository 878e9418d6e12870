"""grouped_kernel: rows sorted by group, each times the weights of its group, when there are few rows a group.

    program (group, block of columns)     its weights are read once, block by block along the terms, and meet up to ROWS
                                          rows of the group at a time; a group without rows ends at once

Then the weights are all there is to read, and what counts is how many bytes are on their way: programs are many and
small, and STAGES blocks of each are asked for ahead. Weights are the left factor, so that a few rows fill the narrow
side of a tensor core's tile. Sums are fp32 and in the order of the terms, whatever ROWS is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def grouped(x, weights, ends, out, COLUMNS: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    group = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + group)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    base = weights + group.to(tl.int64) * (COLUMNS * TERMS) + column[:, None] * TERMS
    there = column[:, None] < COLUMNS
    while first < end:
        row = first + tl.arange(0, ROWS)
        live = row < end
        sums = tl.zeros([BLOCK, ROWS], tl.float32)
        for start in tl.range(0, TERMS, STEP, num_stages=STAGES):
            term = start + tl.arange(0, STEP)
            inside = term < TERMS
            left = tl.load(base + term[None, :], mask=there & inside[None, :], other=0)
            right = tl.load(x + row.to(tl.int64)[:, None] * TERMS + term[None, :], mask=live[:, None] & inside[None, :],
                            other=0)  # fmt: skip
            sums = tl.dot(left, right.trans(), sums)
        place = out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
        tl.store(place, sums.to(out.dtype.element_ty), mask=live[None, :] & there)
        first += ROWS
