"""decode: units of a record become bf16 keys, nibble by nibble: in Triton, and in PTX where two go at once.

    unit    two bytes, codes 0..3 of 4 bits: code n of unit j is channel 4 * j + n         k0 .. k3, one nibble each
    plain   exponent and mantissa put where fp32 has its lowest, times 2^126, times the scale, rounded: 9 operations
    packed  the same in bf16, two neighbouring units in one register: 3 operations a value. Each step is exact, too

A code s e e m is bf16 s 000000 e e m: its value times 2^-126, subnormal where e is 0, as e2m1 has it itself. Packed
takes mul.bf16x2, which Hopper has first; an interpreter has none. Units of one byte (32 channels) are always plain.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41.lowering.templates.index_scores.form import Form

MAGNITUDES, SIGNS = 0x01C001C0, 0x80008000  # of both halves of a register
LARGE = 0x7E807E80  # 2^126, twice


def function_text(form: Form) -> str:
    """`keys_of(held, scales)`: units and the bytes of their scales -> a tile of bf16 for each nibble."""
    count = 2 * form.unit
    plain = ", ".join(f"(e2m1(held >> {4 * n}) * by).to(tl.bfloat16)" for n in range(count))
    kinds = ", ".join(["tl.bfloat16"] * count)
    packed = f'''    if PACKED:
        by = tl.maximum(scales << 7, 64).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise("""
{asm()}
        """, "{",".join(["=&r"] * count + ["r", "r"])}", [held, by], dtype=({kinds}), is_pure=True, pack=2)
    else:'''
    return f'''@triton.jit
def keys_of(held, scales, PACKED: tl.constexpr):
    """Of units and the bytes of their scales, int32, a tile of bf16 for each nibble."""
{packed if form.unit == 2 else "    if True:"}
        by = ue8m0(scales)
        return {plain}
'''


def asm() -> str:
    """PTX of a register of two units and one of their two scales: four registers, a code of each unit."""
    codes = [line for n in range(4) for line in _code(n)]
    return "\n".join(["{ .reg .b32 sign, large;", f"mov.b32 large, {LARGE};", *codes, "}"])


def _code(n: int) -> Iterator[str]:
    """Code n of both, times its scale."""
    yield _shifted(f"${n}", 6 - 4 * n)
    yield f"and.b32 ${n}, ${n}, {MAGNITUDES};"
    yield _shifted("sign", 12 - 4 * n)
    yield f"lop3.b32 ${n}, sign, {SIGNS}, ${n}, 0xEA;"  # a & b | c
    yield f"mul.bf16x2 ${n}, ${n}, large;"
    yield f"mul.bf16x2 ${n}, ${n}, $5;"


def _shifted(out: str, by: int) -> str:
    return f"{'shl' if by >= 0 else 'shr'}.b32 {out}, $4, {abs(by)};"


def scale_text(form: Form) -> str:
    """Of the scales of each entry, `marks`, the byte of each unit."""
    return f"(marks[:, None] >> (unit[None, :] // {form.units // form.scales} * 8)) & 255"
