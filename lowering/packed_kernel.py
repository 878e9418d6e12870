"""packed_kernel: rows sorted by group, each times the weights of its group, which are read as they are stored.

    program (group, block of columns)     its weights, codes of e2m1 under powers of two, are read once for up to ROWS
                                          rows of the group, decoded in registers, and meet them on tensor cores

Like grouped_kernel.py, whose sums these are: fp32, in the order of tiles of STEP terms. Terms of a tile stand in the
order in which decoding leaves them (templates/decode.py), those of x too: whoever makes x puts them so. Codes are asked
for STAGES tiles ahead; scales, which are too narrow for that, a tile ahead by the threads that need them.
"""

from __future__ import annotations

from v41.lowering.templates.decode import ORDER, SPREAD, keys_text
from v41.lowering.templates.formats import DECODERS, HEAD

NAME = "packed_product"

KERNEL = f'''@triton.jit
def {NAME}(x, units, scales, ends, out, COLUMNS: tl.constexpr, TERMS: tl.constexpr, GROUP: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr):
    """x [rows, TERMS] as decoded, units [groups, COLUMNS, TERMS / 4], scales a GROUP of terms, ends [groups] ->
    out [rows, COLUMNS]"""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    tiles: tl.constexpr = TERMS // STEP
    group = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + group)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    line = (group.to(tl.int64) * COLUMNS + tl.minimum(column, COLUMNS - 1))[:, None]  # the last again behind it
    held_at = units + line * (TERMS // 4) + tl.arange(0, STEP // 4)[None, :]
    bytes_at = scales + line * (TERMS // GROUP) + tl.arange(0, STEP // GROUP)[None, :]
    while first < end:
        row = first + tl.arange(0, ROWS)
        live = row < end
        row_at = x + row.to(tl.int64)[:, None] * TERMS + tl.arange(0, STEP)[None, :]
        sums = tl.zeros([BLOCK, ROWS], tl.float32)
        bytes = byte_of(bytes_at, PACKED)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            held = tl.load(held_at + tile * (STEP // 4))
            right = tl.load(row_at + tile * STEP, mask=live[:, None], other=0.0)
            by = spread(e2m1_ue8m0_scale(bytes), BLOCK, STEP // GROUP, GROUP // 4)
            bytes = byte_of(bytes_at + tl.minimum(tile + 1, tiles - 1) * (STEP // GROUP), PACKED)
            left = e2m1_ue8m0_keys(held, by, BLOCK, STEP // 4, PACKED)
            sums = tl.dot(left, right.trans(), sums)
        place = out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
        tl.store(place, sums.to(tl.bfloat16), mask=live[None, :] & (column < COLUMNS)[:, None])
        first += ROWS
'''

TEXT = "\n\n".join([HEAD, ORDER, SPREAD, DECODERS["e2m1"], keys_text("e2m1", "ue8m0"), KERNEL])
