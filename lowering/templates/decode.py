"""decode: units of records become a tile of bf16 keys: in Triton, and in PTX where two units go at once.

    unit    four channels side by side, 2 bytes of e2m1 or 4 of e4m3: channel n of unit j is channel 4 * j + n
    tile    of each 256 channels (or all, if fewer), channel n of all units, then channel n + 1: what threads hold lies
            as it was read, nothing is shuffled, and eight threads fill a line of shared memory. Queries stand in the
            same order: `ordered`
    scales  of two neighbouring units the same: bits of a bf16 in both halves of 32, each read as the byte that it is
    plain   each value to fp32, times the scale, rounded
    packed  the same in bf16, two neighbouring units at once: 5 instructions for two values of e2m1, 7 of e4m3. Each
            step is exact but the last, which rounds as plain does

A code s e e m of e2m1 is bf16 s 000000 e e m: its value times 2^-126, subnormal where e is 0, as e2m1 has it itself. A
product puts its four bits at both places, where a mask leaves what each is for. Scales of e4m3 are below 2^9, so one
factor of bf16 holds the scale and 2^119 of the 2^126: such keys are made 2^-7 of what they are, all of them without
rounding, and `gain_of` is what their readers make up for. Packed takes mul.bf16x2, which Hopper has first; the
interpreter has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from v41.lowering.gpu import gpu_of

UNIT = 4  # channels
BYTES = {"e2m1": 2, "e4m3": 4}  # of a unit
PART = 64  # units whose channels a tile puts together
HOPPER = 9  # the compute capability that multiplies bf16 in pairs

CODES = 0x81C081C0  # of both halves of a register: sign, exponent and mantissa of a code of e2m1
LARGE = 0x7E807E80  # 2^126, twice
FOLDED = 7  # what is left of 126, in powers of two, where a scale has the rest

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

SCALES = {  # a byte, int32 -> bf16
    "ue8m0": "tl.maximum(byte << 7, 64).to(tl.int16).to(tl.bfloat16, bitcast=True)",  # 2^(byte - 127)
    "e4m3": "byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)",
}

SPREAD = '''@triton.jit
def byte_of(pointers, PACKED: tl.constexpr):
    """uint8 -> int32. In PTX it is read by the threads that need it: a load of Triton's has a layout of its own, from
    which scales would come through shared memory."""
    if PACKED:
        return tl.inline_asm_elementwise("ld.global.nc.u8 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
                                         is_pure=True, pack=1)
    else:
        return tl.load(pointers).to(tl.int32)


@triton.jit
def spread(by, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, GROUPS] -> each EACH times [ROWS, GROUPS * EACH]"""
    return tl.reshape(tl.broadcast_to(by[:, :, None], [ROWS, GROUPS, EACH]), [ROWS, GROUPS * EACH])


@triton.jit
def units_of(bytes, ROWS: tl.constexpr, UNITS: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, UNITS, EACH] bytes -> units, of records that start anywhere"""
    return tl.sum((bytes.to(tl.int32) & 255) << (tl.arange(0, EACH) * 8)[None, None, :], 2)
'''


def folds(values: str, scales: str) -> bool:
    """Whether scales have a power of two that decoding needs."""
    return (values, scales) == ("e2m1", "e4m3")


def gain_of(values: str, scales: str) -> float:
    """How many times their keys a tile's would have to be."""
    return float(1 << FOLDED) if folds(values, scales) else 1.0


def keys_text(values: str, scales: str) -> str:
    """Functions `{values}_{scales}_scale(byte)`, int32 -> int32, `_units(held, by, ..)`: units and the scale of each ->
    their channels apart, and `_keys(held, by, ..)`: the same as a tile of keys."""
    out = ", ".join(["tl.bfloat16"] * UNIT)
    folded, name = folds(values, scales), f"{values}_{scales}"
    scale, factor = f"({SCALES[scales]}).to(tl.float32)", "(by << 16).to(tl.float32, bitcast=True)"
    more, less = (f", times 2^{126 - FOLDED}", f", times 2^-{FOLDED}") if folded else ("", "")
    if folded:
        scale, factor = f"{scale} * {2.0 ** (126 - FOLDED)!r}", f"{factor} * {2.0**-126!r}"
    if values == "e2m1":
        plain = [f"e2m1(held >> {4 * n})" for n in range(UNIT)]
    else:
        plain = [f"e4m3((held >> {8 * n}).to(tl.uint8))" for n in range(UNIT)]
    read = ["r"] * (BYTES[values] // 2 + 2)
    return f'''@triton.jit
def {name}_scale(byte):
    """Bits of bf16 in both halves{more}"""
    scale = ({scale}).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return scale | (scale << 16)


@triton.jit
def {name}_units(held, by, PACKED: tl.constexpr):
    """Units and their scales -> {UNIT} tiles of their shape, bf16{less}: the first channel of each, the second ..."""
    if PACKED:
        k0, k1, k2, k3 = tl.inline_asm_elementwise("""
{asm(values, folded)}
        """, "{",".join(["=&r"] * UNIT + read)}", [held, by], dtype=({out}), is_pure=True, pack=2)
    else:
        scale = {factor}
{"".join(f"        k{n} = ({value} * scale).to(tl.bfloat16)" + chr(10) for n, value in enumerate(plain))[:-1]}
    return k0, k1, k2, k3


@triton.jit
def {name}_keys(held, by, ROWS: tl.constexpr, UNITS: tl.constexpr, PACKED: tl.constexpr):
    """Units [ROWS, UNITS] and their scales -> a tile of keys [ROWS, {UNIT} * UNITS]."""
    k0, k1, k2, k3 = {name}_units(held, by, PACKED)
    return joined(k0, k1, k2, k3, ROWS, UNITS)
'''


def asm(values: str, folded: bool) -> str:
    """PTX of two units and twice their scale, a register each: four registers, a code of each unit."""
    if values == "e2m1":
        large = [] if folded else [".reg .b32 large;", f"mov.b32 large, {LARGE};"]
        start = ["{ .reg .b32 high;", *large, "shr.b32 high, $4, 8;"]
        codes = [line for n in range(UNIT) for line in _e2m1(n, folded)]
    else:
        start = ["{ .reg .b32 both; .reg .b16 codes, low, high; .reg .f32 x, y;"]
        codes = [line for n in range(UNIT) for line in _e4m3(n)]
    return "\n".join([*start, *codes, "}"])


def _e2m1(n: int, folded: bool) -> Iterator[str]:
    """Code n of both, times its scale."""
    lowest = 4 * (n % 2)
    yield f"and.b32 ${n}, {'high' if n > 1 else '$4'}, {0x000F000F << lowest};"
    yield f"mul.lo.u32 ${n}, ${n}, {1 << 12 - lowest | 1 << 6 - lowest};"  # to the sign's place and to the others'
    yield f"and.b32 ${n}, ${n}, {CODES};"
    if not folded:
        yield f"mul.bf16x2 ${n}, ${n}, large;"
    yield f"mul.bf16x2 ${n}, ${n}, $5;"


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
