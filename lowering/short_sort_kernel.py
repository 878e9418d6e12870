"""short_sort_kernel: integers in order, each put where it belongs by how many come before it.

    program (BLOCK elements)      reads all keys, CHUNK at a time, counts for each of its elements the keys that are
                                  smaller, or equal and further in front, and writes the element at that place

All pairs are compared, which for some thousand keys is less than what the passes of a sort wait for one another. Ties
stay as they were: a stable sort, the same on every run.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["count"])
def short_sort(keys, values, places, count, DESCENDING: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + mine, mask=mine < count, other=0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        read = tl.load(keys + other, mask=other < count, other=0)
        ahead = (read[None, :] > key[:, None]) if DESCENDING else (read[None, :] < key[:, None])
        tied = (read[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
        before += tl.sum(((ahead | tied) & (other < count)[None, :]).to(tl.int32), 1)
    tl.store(values + before, key, mask=mine < count)
    tl.store(places + before, mine.to(tl.int64), mask=mine < count)
