"""packed_kernel: rows sorted by group, each times the weights of its group, which are read as they are stored.

    program (group, block of columns)     its weights, codes of e2m1 under powers of two, are read once for up to ROWS
                                          rows of the group, decoded in registers, and meet them on tensor cores
    program (row, block of columns)       of fewer rows than groups: what is first of its group has the group

Like grouped_kernel.py, whose sums these are: fp32, tile after tile. A tile of STEP terms is four products, of the first
code of each unit, of the second and so on (templates/decode.py): whoever makes x puts its terms so, and nothing is
shuffled. Codes are asked for STAGES tiles ahead; scales, which are too narrow for that, one tile ahead by the threads
that need them.
"""

from __future__ import annotations

from v41.lowering.templates.decode import ORDER, SPREAD, keys_text
from v41.lowering.templates.formats import DECODERS, HEAD

NAME = "packed_product"

KERNEL = f'''@triton.jit
def {NAME}(x, units, scales, ends, out, GROUPS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
           TERMS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
           STAGES: tl.constexpr, BY_ROW: tl.constexpr, PACKED: tl.constexpr):
    """x [rows, TERMS] as decoded, units [GROUPS, COLUMNS, TERMS / 4], a scale for each SCALED terms, ends [GROUPS] ->
    out [rows, COLUMNS]"""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    tiles: tl.constexpr = TERMS // STEP
    group = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    if BY_ROW:
        own, each = group, tl.arange(0, PADDED)
        before = (tl.load(ends + each, mask=each < GROUPS, other=0) <= own) & (each < GROUPS)
        group = tl.minimum(tl.sum(before.to(tl.int32)), GROUPS - 1)  # scales are read ahead, of a row behind all too
        first = tl.load(ends + group - 1, mask=group > 0, other=0)
        end = tl.load(ends + group, mask=first == own, other=0)  # 0: another row's; behind all no more than own
    else:
        end = tl.load(ends + group)
        first = tl.load(ends + group - 1, mask=group > 0, other=0)
    line = (group.to(tl.int64) * COLUMNS + tl.minimum(column, COLUMNS - 1))[:, None]  # the last again behind it
    held_at = units + line * (TERMS // 4) + tl.arange(0, STEP // 4)[None, :]
    bytes_at = scales + line * (TERMS // SCALED) + tl.arange(0, STEP // SCALED)[None, :]
    while first < end:
        row = first + tl.arange(0, ROWS)
        live = row < end
        row_at = x + row.to(tl.int64)[:, None] * TERMS + tl.arange(0, STEP // 4)[None, :]
        sums = tl.zeros([BLOCK, ROWS], tl.float32)
        bytes = byte_of(bytes_at, PACKED)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            held = tl.load(held_at + tile * (STEP // 4))
            x0 = tl.load(row_at + tile * STEP, mask=live[:, None], other=0.0)
            x1 = tl.load(row_at + tile * STEP + STEP // 4, mask=live[:, None], other=0.0)
            x2 = tl.load(row_at + tile * STEP + 2 * (STEP // 4), mask=live[:, None], other=0.0)
            x3 = tl.load(row_at + tile * STEP + 3 * (STEP // 4), mask=live[:, None], other=0.0)
            by = spread(e2m1_ue8m0_scale(bytes), BLOCK, STEP // SCALED, SCALED // 4)
            bytes = byte_of(bytes_at + tl.minimum(tile + 1, tiles - 1) * (STEP // SCALED), PACKED)
            w0, w1, w2, w3 = e2m1_ue8m0_units(held, by, PACKED)
            sums = tl.dot(w0, x0.trans(), sums)
            sums = tl.dot(w1, x1.trans(), sums)
            sums = tl.dot(w2, x2.trans(), sums)
            sums = tl.dot(w3, x3.trans(), sums)
        place = out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
        tl.store(place, sums.to(tl.bfloat16), mask=live[None, :] & (column < COLUMNS)[:, None])
        first += ROWS
'''

TEXT = "\n\n".join([HEAD, ORDER, SPREAD, DECODERS["e2m1"], keys_text("e2m1", "ue8m0"), KERNEL])
