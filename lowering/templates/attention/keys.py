"""keys: how a generated attention reads a branch of its keys: three functions of Triton a branch.

    seen(mask, row, number, KEYS)                    which of the keys from number * KEYS on are seen
    read(records, scales, row, number, first, ..)    units and scale bytes of some channels of theirs, as they lie
    tile(held, seen, KEYS, WIDE, PACKED)             bf16 [KEYS, WIDE], 0 of keys that are not seen

What is not seen is read all the same: masks of loads cost more than they save, and picks of -1 have records, too.
"""

from __future__ import annotations

from v41.lowering.templates.attention.form import AS_IS, Branch
from v41.lowering.templates.decode import BYTES, UNIT

WORD = 4  # bytes


def branch_text(branch: Branch, width: int) -> str:
    """The three functions."""
    read, tile = (_numbers, _numbers_tile) if branch.values == AS_IS else (_records, _records_tile)
    return "\n\n".join([_seen(branch), read(branch, width), tile(branch, width)])


def sizes_of(branch: Branch, width: int) -> tuple[int, int]:
    """Bytes of the numbers that its units, and its scales, are read as: as wide as records lie, or single bytes."""
    unit, scales = BYTES[branch.values], width // branch.group
    values = branch.bytes - scales
    fits = all(size % WORD == 0 for size in (scales, values))
    return (unit if branch.bytes % unit == 0 else 1), (WORD if fits else 1)


def _key(branch: Branch) -> str:
    """Of each key that is read: the last again behind it."""
    local = "number * KEYS + tl.arange(0, KEYS)"
    return f"row * {branch.count} + tl.minimum({local}, {branch.count - 1})"


def _seen(branch: Branch) -> str:
    shown = "other=-1) >= 0" if branch.mask == "picks" else "other=0).to(tl.int1)"
    behind = "" if branch.mask == "picks" else f" & (key < {branch.count})"
    return f"""@triton.jit
def {branch.name}_seen({branch.mask}, row, number, KEYS: tl.constexpr):
    key = number * KEYS + tl.arange(0, KEYS)
    return tl.load({branch.mask} + row * {branch.count} + key, mask=key < {branch.count}, {shown}{behind}
"""


def _numbers(branch: Branch, width: int) -> str:
    return f"""@triton.jit
def {branch.name}_read({branch.name}, row, number, first, KEYS: tl.constexpr, WIDE: tl.constexpr):
    key = {_key(branch)}
    return tl.load({branch.name} + (key * {width})[:, None] + first + tl.arange(0, WIDE)[None, :])
"""


def _numbers_tile(branch: Branch, width: int) -> str:
    return f"""@triton.jit
def {branch.name}_tile(held, seen, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    return ordered(tl.where(seen[:, None], held, 0.0), KEYS, WIDE // {UNIT})
"""


def _records(branch: Branch, width: int) -> str:
    unit, size = BYTES[branch.values], branch.bytes
    scales = width // branch.group
    loaded, word = sizes_of(branch, width)
    if loaded == unit:
        at = f"(key * {size // unit} + first // {UNIT})[:, None] + tl.arange(0, WIDE // {UNIT})[None, :]"
        held = f"tl.load({branch.name} + {at})"
    else:
        at = f"(key * {size} + first // {UNIT} * {unit})[:, None, None]"
        at += f" + tl.arange(0, WIDE // {UNIT})[None, :, None] * {unit} + tl.arange(0, {unit})[None, None, :]"
        held = f"units_of(tl.load({branch.name} + {at}), KEYS, WIDE // {UNIT}, {unit})"
    name = f"{branch.name}_scales"
    lines = [f"    group = first // {branch.group}", f"    COUNT: tl.constexpr = WIDE // {branch.group}"]
    if word == WORD:
        base = f"key * {size // WORD} + {(size - scales) // WORD} + group // {WORD}"
        lines += [
            f"    if COUNT >= {WORD}:",
            f"        words = tl.load({name} + ({base})[:, None] + tl.arange(0, COUNT // {WORD})[None, :])",
            f"        return held, bytes_of(words, KEYS, COUNT // {WORD}, {WORD})",
            "    else:",
            f"        word = tl.load({name} + {base})[:, None]",
            f"        return held, (word >> ((group % {WORD} + tl.arange(0, COUNT)) * 8)[None, :]) & 255",
        ]
    else:
        at = f"(key * {size} + {size - scales} + group)[:, None] + tl.arange(0, COUNT)[None, :]"
        lines.append(f"    return held, tl.load({name} + {at}).to(tl.int32)")
    body = "\n".join([f"    key = {_key(branch)}", f"    held = {held}", *lines])
    return f"""@triton.jit
def {branch.name}_read({branch.name}, {name}, row, number, first, KEYS: tl.constexpr, WIDE: tl.constexpr):
{body}
"""


def _records_tile(branch: Branch, width: int) -> str:
    return f"""@triton.jit
def {branch.name}_tile(held, seen, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    units, bytes = held
    by = {branch.scales}_scale(tl.where(seen[:, None], bytes, 0))
    by = spread(by, KEYS, WIDE // {branch.group}, {branch.group // UNIT})
    return {branch.values}_keys(tl.where(seen[:, None], units, 0), by, KEYS, WIDE // {UNIT}, PACKED)
"""
