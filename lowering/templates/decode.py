"""decode: units of records become a tile of bf16 keys: in Triton, and in PTX where two units go at once.

    unit    four channels side by side, 2 bytes of e2m1 or 4 of e4m3: channel n of unit j is channel 4 * j + n
    tile    of each 128 channels (or all, if fewer), channel n of all units, then channel n + 1: what threads hold lies
            as it was read, and nothing is shuffled. Queries stand in the same order: `ordered`
    plain   each value to fp32, times the scale, rounded
    packed  the same in bf16, two neighbouring units at once: 3 instructions a value of e2m1, 5 of e4m3. Each step is
            exact but the last, which rounds as plain does

A code s e e m of e2m1 is bf16 s 000000 e e m: its value times 2^-126, subnormal where e is 0, as e2m1 has it itself.
Packed takes mul.bf16x2, which Hopper has first; the interpreter has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from v41.lowering.gpu import gpu_of
from v41.lowering.templates.formats import DECODERS

UNIT = 4  # channels
BYTES = {"e2m1": 2, "e4m3": 4}  # of a unit
PART = 32  # units whose channels a tile puts together
HOPPER = 9  # the compute capability that multiplies bf16 in pairs

MAGNITUDES, SIGNS = 0x01C001C0, 0x80008000  # of both halves of a register
LARGE = 0x7E807E80  # 2^126, twice

ORDER = f'''@triton.jit
def joined(k0, k1, k2, k3, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Four tiles [ROWS, UNITS] -> [ROWS, {UNIT} * UNITS]."""
    PART: tl.constexpr = {PART} if UNITS >= {PART} else UNITS
    k = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    k = tl.permute(tl.reshape(k, [ROWS, UNITS // PART, PART, 2, 2]), (0, 1, 3, 4, 2))
    return tl.reshape(k, [ROWS, {UNIT} * UNITS])


@triton.jit
def ordered(x, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """[ROWS, {UNIT} * UNITS]: channels as a tile of keys has them."""
    PART: tl.constexpr = {PART} if UNITS >= {PART} else UNITS
    x = tl.permute(tl.reshape(x, [ROWS, UNITS // PART, PART, {UNIT}]), (0, 1, 3, 2))
    return tl.reshape(x, [ROWS, {UNIT} * UNITS])


@triton.jit
def restored(x, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """[ROWS, {UNIT} * UNITS]: channels back where the model has them."""
    PART: tl.constexpr = {PART} if UNITS >= {PART} else UNITS
    x = tl.permute(tl.reshape(x, [ROWS, UNITS // PART, {UNIT}, PART]), (0, 1, 3, 2))
    return tl.reshape(x, [ROWS, {UNIT} * UNITS])
'''

SCALES = {
    "ue8m0": '''@triton.jit
def ue8m0_scale(byte):
    """2^(byte - 127), bf16"""
    return tl.maximum(byte << 7, 64).to(tl.int16).to(tl.bfloat16, bitcast=True)
''',
    "e4m3": '''@triton.jit
def e4m3_scale(byte):
    """The e4m3 of a byte, bf16"""
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
''',
}

SPREAD = '''@triton.jit
def bytes_of(words, ROWS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, WORDS] -> the bytes of each [ROWS, WORDS * EACH], int32"""
    found = (words.to(tl.int32)[:, :, None] >> (tl.arange(0, EACH) * 8)[None, None, :]) & 255
    return tl.reshape(found, [ROWS, WORDS * EACH])


@triton.jit
def spread(by, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, GROUPS] -> each EACH times [ROWS, GROUPS * EACH]"""
    return tl.reshape(tl.broadcast_to(by[:, :, None], [ROWS, GROUPS, EACH]), [ROWS, GROUPS * EACH])


@triton.jit
def units_of(bytes, ROWS: tl.constexpr, UNITS: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, UNITS, EACH] bytes -> units, of records that start anywhere"""
    return tl.sum((bytes.to(tl.int32) & 255) << (tl.arange(0, EACH) * 8)[None, None, :], 2)
'''


def keys_text(values: str) -> str:
    """`{values}_keys(held, by, ...)`: units [ROWS, UNITS] and the scale of each, bf16 -> a tile of keys."""
    out = ", ".join(["tl.bfloat16"] * UNIT)
    if values == "e2m1":
        plain = [f"e2m1(held >> {4 * n})" for n in range(UNIT)]
    else:
        plain = [f"e4m3((held >> {8 * n}).to(tl.uint8))" for n in range(UNIT)]
    read = ["r"] * (BYTES[values] // 2 + 1)
    return f'''{DECODERS[values]}

@triton.jit
def {values}_keys(held, by, ROWS: tl.constexpr, UNITS: tl.constexpr, PACKED: tl.constexpr):
    """Units [ROWS, UNITS] and their scales, bf16 -> a tile of keys [ROWS, {UNIT} * UNITS] bf16."""
    if PACKED:
        k0, k1, k2, k3 = tl.inline_asm_elementwise("""
{asm(values)}
        """, "{",".join(["=&r"] * UNIT + read)}", [held, by], dtype=({out}), is_pure=True, pack=2)
    else:
        scale = by.to(tl.float32)
{"".join(f"        k{n} = ({value} * scale).to(tl.bfloat16)" + chr(10) for n, value in enumerate(plain))[:-1]}
    return joined(k0, k1, k2, k3, ROWS, UNITS)
'''


def asm(values: str) -> str:
    """PTX of two units and their two scales, which fill a register: four registers, a code of each unit."""
    if values == "e2m1":
        codes = [line for n in range(UNIT) for line in _e2m1(n)]
        return "\n".join(["{ .reg .b32 sign, large;", f"mov.b32 large, {LARGE};", *codes, "}"])
    codes = [line for n in range(UNIT) for line in _e4m3(n)]
    return "\n".join(["{ .reg .b32 both; .reg .b16 codes, low, high; .reg .f32 x, y;", *codes, "}"])


def _e2m1(n: int) -> Iterator[str]:
    """Code n of both, times its scale."""
    yield _shifted(f"${n}", 6 - 4 * n)
    yield f"and.b32 ${n}, ${n}, {MAGNITUDES};"
    yield _shifted("sign", 12 - 4 * n)
    yield f"lop3.b32 ${n}, sign, {SIGNS}, ${n}, 0xEA;"  # a & b | c
    yield f"mul.bf16x2 ${n}, ${n}, large;"
    yield f"mul.bf16x2 ${n}, ${n}, $5;"


def _shifted(out: str, by: int) -> str:
    return f"{'shl' if by >= 0 else 'shr'}.b32 {out}, $4, {abs(by)};"


def _e4m3(n: int) -> Iterator[str]:
    """Byte n of both, through fp16 and fp32, which have all its values, NaN too."""
    yield f"prmt.b32 both, $4, $5, {n | n + 4 << 4:#06x};"
    yield "cvt.u16.u32 codes, both;"
    yield "cvt.rn.f16x2.e4m3x2 both, codes;"
    yield "mov.b32 {low, high}, both;"
    yield "cvt.f32.f16 x, low;"
    yield "cvt.f32.f16 y, high;"
    yield f"cvt.rn.bf16x2.f32 ${n}, y, x;"
    yield f"mul.bf16x2 ${n}, ${n}, $6;"


def packs(device: torch.device) -> bool:
    """Whether keys are decoded two units at a time there."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability[0] >= HOPPER
