"""words: records of MXFP4 become the tile of keys that a product takes from registers, in Triton and in PTX.

    record    17 units of GROUPS bytes: 16 of values, then the scales, a byte for each group of 32 channels
    word      8 channels side by side, 4 bytes: nibble n of word j of group m is channel 32 * m + 8 * j + n
    tile      bf16; in each group nibbles 0 and 4 of word 0, of word 1, ..., then nibbles 1 and 5 of each, and so on: a
              thread of a product of Hopper holds neighbours in pairs, so it decodes words that it has read itself, and
              keys never pass through shared memory. Queries stand in the same order: `ordered`
    plain     each value to fp32, times the scale, rounded
    packed    nibbles n and n + 4 at once, 21 instructions a word. Each step is exact but the last, which rounds as
              plain does

A code s e e m of e2m1 is bf16 s 000000 e e m: its value times 2^-126, subnormal where e is 0, as e2m1 has it itself.
Two nibbles are put there by a product with two powers of two, which takes another pipe than shifts do.
Packed also reads words by PTX: what Triton's own load reads lies in the order of memory, whoever needs it. Where
records are no multiple of four bytes words are put together from units. Keys are bits until they are in order: else
Triton puts them in shared memory for Blackwell before it reshapes them, and fails where there are few channels.
"""

from __future__ import annotations

from v41.lowering.templates.formats import DECODERS

BYTES = 4  # of a word
NIBBLES = 8
WORDS = 4  # of a group
UNITS = 17  # of a record

SMALL = 0x81C081C0  # sign, exponent and mantissa of e2m1 in both halves of a register
LARGE = 0x7E807E80  # 2^126, twice
PLACED = (  # nibbles n and n + 4: how far they are shifted first, where they stand then, what puts them in place
    (0, 0x000F000F, 1 << 12 | 1 << 6),
    (0, 0x00F000F0, 1 << 8 | 1 << 2),
    (8, 0x000F000F, 1 << 12 | 1 << 6),
    (8, 0x00F000F0, 1 << 8 | 1 << 2),
)


def asm() -> str:
    """PTX of one word, $8, under one scale byte, $9: its nibbles 0, 4, 1, 5, 2, 6, 3, 7 as bf16."""
    lines = [f"mov.b32 large, {LARGE:#x};", "shr.u32 high, $8, 8;"]
    lines += ["mul.lo.u32 scale, $9, 0x800080;", "max.u32 scale, scale, 0x400040;"]  # byte 0 is 2^-127, subnormal
    for n, (shifted, where, factor) in enumerate(PLACED):
        lines += [
            f"and.b32 r{n}, {'high' if shifted else '$8'}, {where:#x};",
            f"mul.lo.u32 r{n}, r{n}, {factor:#x};",
            f"and.b32 r{n}, r{n}, {SMALL:#x};",
            f"mul.bf16x2 r{n}, r{n}, large;",
            f"mul.bf16x2 r{n}, r{n}, scale;",
            f"mov.b32 {{${2 * n}, ${2 * n + 1}}}, r{n};",
        ]
    return "\n".join(["{ .reg .b32 r0, r1, r2, r3, high, scale, large;", *lines, "}"])


PLAIN = "\n".join(
    f"        k{n} = (e2m1(words >> {4 * n}) * by).to(tl.bfloat16).to(tl.int16, bitcast=True)" for n in range(NIBBLES)
)

TEXT = f'''{DECODERS["e2m1"]}

{DECODERS["ue8m0"]}

@triton.jit
def words_at(home, place, N: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr):
    """home: a slot. Records at `place` [N] -> words [N, GROUPS, {WORDS}] and scale bytes [N, GROUPS, 1], int32."""
    EACH: tl.constexpr = {BYTES} // GROUPS
    record = home + place[:, None, None] * {UNITS}
    word = tl.arange(0, GROUPS)[None, :, None] * {WORDS} + tl.arange(0, {WORDS})[None, None, :]
    marks = record + {UNITS - 1}
    if EACH > 1:
        unit = word[:, :, :, None] * EACH + tl.arange(0, EACH)[None, None, None, :]
        units = tl.load(record[:, :, :, None] + unit).to(tl.int32) & (1 << 8 * GROUPS) - 1
        words = tl.sum(units << (tl.arange(0, EACH) * (8 * GROUPS))[None, None, None, :], 3)
        marks = tl.load(marks).to(tl.int32)
    elif PACKED:
        words = read(record + word)
        marks = read(marks)
    else:
        words = tl.load(record + word)
        marks = tl.load(marks)
    return words, (marks >> (tl.arange(0, GROUPS) * 8)[None, :, None]) & 255


@triton.jit
def read(at):
    """What stands at these addresses, int32; in whatever threads it is asked for."""
    return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def keys_of(words, marks, N: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr):
    """-> a tile of keys [N, 32 * GROUPS] bf16."""
    if PACKED:
        k0, k4, k1, k5, k2, k6, k3, k7 = tl.inline_asm_elementwise("""
{asm()}
        """, "{",".join(["=h"] * NIBBLES + ["r", "r"])}", [words, marks],
            dtype=({", ".join(["tl.int16"] * NIBBLES)}), is_pure=True, pack=1)
    else:
        by = ue8m0(marks)
{PLAIN}
    low = tl.join(tl.join(k0, k1), tl.join(k2, k3))
    high = tl.join(tl.join(k4, k5), tl.join(k6, k7))
    k = tl.permute(tl.join(low, high), (0, 1, 4, 3, 2, 5))  # [N, groups, nibble of four, word, half]
    return tl.reshape(k, [N, 32 * GROUPS]).to(tl.bfloat16, bitcast=True)


@triton.jit
def ordered(x, N: tl.constexpr, GROUPS: tl.constexpr):
    """[N, 32 * GROUPS]: channels as a tile of keys has them."""
    x = tl.permute(tl.reshape(x, [N, GROUPS, {WORDS}, 2, {NIBBLES // 2}]), (0, 1, 4, 2, 3))
    return tl.reshape(x, [N, 32 * GROUPS])
'''
