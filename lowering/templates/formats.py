"""formats: what the texts of several templates begin with: sums in a pinned order, and numbers of stored bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # what so many stored bytes are read as at once

HEAD = "import triton\nimport triton.language as tl\n"

ADDED = '''@triton.jit
def added(p, ROWS: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COUNT] -> [ROWS]: neighbours in pairs, the pairs in pairs, in whatever threads they lie."""
    for level in tl.static_range(LEVELS):
        p = tl.sum(tl.reshape(p, [ROWS, COUNT >> (level + 1), 2]), 2)
    return tl.reshape(p, [ROWS])
'''

DECODERS = {
    "e4m3": """@triton.jit
def e4m3(byte):
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
""",
    "ue8m0": '''@triton.jit
def ue8m0(byte):
    """2^(byte - 127)"""
    return tl.maximum(byte.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
''',
    "e2m1": '''@triton.jit
def e2m1(byte):
    """Of the low nibble: its exponent and mantissa put where fp32 has its lowest give the value times 2^-126."""
    bits = byte.to(tl.int32)
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
''',
}


def indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    """Lines of a block."""
    return ["    " * levels + line for line in lines]
