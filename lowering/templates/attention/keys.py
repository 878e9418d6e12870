"""keys: how a generated attention reads a branch of its keys: three functions of Triton a branch.

    at, seen = {name}_at(.., row, number, KEYS)    of the keys from number * KEYS on: which record, and whether seen
    {name}_read(.., at, first, KEYS, WIDE, PACKED) units and scale bytes of some channels of theirs, as they lie
    {name}_tile(held, seen, KEYS, WIDE, PACKED)    bf16 [KEYS, WIDE], 0 of keys that are not seen

A record is told by its number: slot * entries + place in a cache, row * count + key where records were handed over, and
-1 - row for one of this step's where the others lie in a cache; 64 bits, for a cache may be of any size. What is not
seen is read all the same: masks of loads cost more than they save, and picks of -1 have a record, too, the first.
"""

from __future__ import annotations

from v41.lowering.templates.attention.form import AS_IS, Branch, Form
from v41.lowering.templates.decode import BYTES, UNIT, folds
from v41.lowering.templates.formats import indented

FROM_END = '''@triton.jit
def from_end(number, count):
    """As eager counts: negative ones from the end."""
    return tl.where(number < 0, number + count, number)
'''


def branch_text(branch: Branch, width: int) -> str:
    """The three functions."""
    read, tile = (_numbers, _numbers_tile) if branch.values == AS_IS else (_records, _records_tile)
    return "\n\n".join([_at(branch), read(branch, width), tile(branch, width)])


def places(branch: Branch) -> str:
    """What `_at` is given in front: names of parameters and, in the kernel, of arguments."""
    own = [branch.mask]
    if branch.lies:
        own += [branch.places] if branch.places != branch.mask else []
        own += ["slots", f"{branch.name}_slots", f"{branch.name}_entries"]
    if branch.of_step:
        own += [f"{branch.name}_in_step", f"{branch.name}_rows", f"{branch.name}_of_step"]
    return ", ".join(own)


def pointers(branch: Branch) -> str:
    """What `_read` is given in front, likewise: records as units, and once more as the bytes that scales are."""
    return ", ".join(pointer for operand in branch.records for pointer in twice(branch, operand))


def twice(branch: Branch, operand: str) -> list[str]:
    return [operand] if branch.values == AS_IS else [operand, f"{operand}_scales"]


def parameters(form: Form, operands: list[str]) -> list[str]:
    """The tensors that the kernel is given, where it reads `operands`."""
    packed = {operand: branch for branch in form.branches for operand in branch.records}
    return [name for each in operands for name in (twice(packed[each], each) if each in packed else (each,))]


def counted(form: Form) -> dict[str, tuple[str, int]]:
    """The numbers that it is given behind them: each is the size of an operand along an axis."""
    found: dict[str, tuple[str, int]] = {}
    for branch in form.branches:
        if branch.lies:
            found |= {f"{branch.name}_slots": (branch.name, 0), f"{branch.name}_entries": (branch.name, 1)}
        if branch.of_step:
            found[f"{branch.name}_of_step"] = (f"{branch.name}_records", 0)
    return found


def size_of(branch: Branch) -> int:
    """Bytes of the numbers that its units are read as: as wide as they are, or single bytes."""
    unit = BYTES[branch.values]
    return unit if branch.bytes % unit == 0 else 1


def _at(branch: Branch) -> str:
    name, count, mask = branch.name, branch.count, branch.mask
    lines = [
        "key = number * KEYS + tl.arange(0, KEYS)",
        f"local = row * {count} + tl.minimum(key, {count - 1})",  # the last again behind it
    ]
    if mask == "picks":
        lines += [f"pick = tl.load(picks + row * {count} + key, mask=key < {count}, other=-1)", "seen = pick >= 0"]
    else:
        lines.append(f"seen = tl.load({mask} + local).to(tl.int1) & (key < {count})")
    if not branch.lies:
        lines.append("at = local")
    else:
        lines.append(f"slot = {_from_end('tl.load(slots + row).to(tl.int64)', f'{name}_slots')}")
        if branch.places == mask:
            lines.append("place = tl.maximum(pick, 0)")
        else:
            lines.append(f"place = {_from_end(f'tl.load({branch.places} + local)', f'{name}_entries')}")
        lines.append(f"at = slot * {name}_entries + place")
    if branch.of_step:
        lines += [
            f"now = {_from_end(f'tl.load({name}_rows + local).to(tl.int64)', f'{name}_of_step')}",
            f"at = tl.where(tl.load({name}_in_step + local).to(tl.int1), -1 - now, at)",
        ]
    return "\n".join(
        [
            "@triton.jit",
            f"def {name}_at({places(branch)}, row, number, KEYS: tl.constexpr):",
            *indented([*lines, "return at, seen"]),
            "",
        ]
    )


def _from_end(number: str, count: str) -> str:
    """`number`, from the end where it is negative."""
    return f"from_end({number}, {count})"


def _home(branch: Branch, of: str, step: int) -> str:
    """Where each record begins, among numbers of which it has so many. of: "" or "_scales"."""
    held = f"{branch.name}{of} + at * {step}"
    return f"tl.where(at < 0, {branch.name}_records{of} + (-1 - at) * {step}, {held})" if branch.of_step else held


def _numbers(branch: Branch, width: int) -> str:
    return f"""@triton.jit
def {branch.name}_read({pointers(branch)}, at, first, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    home = {_home(branch, "", width)}
    return tl.load(home[:, None] + first + tl.arange(0, WIDE)[None, :])
"""


def _numbers_tile(branch: Branch, width: int) -> str:
    return f"""@triton.jit
def {branch.name}_tile(held, seen, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    return ordered(tl.where(seen[:, None], held, 0.0), KEYS, WIDE // {UNIT})
"""


def _records(branch: Branch, width: int) -> str:
    unit, size = BYTES[branch.values], branch.bytes
    values = size - width // branch.group  # bytes
    if size_of(branch) == unit:
        step = size // unit
        held = f"tl.load(home[:, None] + (first // {UNIT} + tl.arange(0, WIDE // {UNIT}))[None, :])"
    else:
        step = size
        each = f"tl.arange(0, WIDE // {UNIT})[None, :, None] * {unit} + tl.arange(0, {unit})[None, None, :]"
        read = f"tl.load(home[:, None, None] + first // {UNIT} * {unit} + {each})"
        held = f"units_of({read}, KEYS, WIDE // {UNIT}, {unit})"
    group = f"({values} + first // {branch.group} + tl.arange(0, WIDE // {branch.group}))[None, :]"
    return f"""@triton.jit
def {branch.name}_read({pointers(branch)}, at, first, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    home = {_home(branch, "", step)}
    held = {held}
    home = {_home(branch, "_scales", size)}
    return held, byte_of(home[:, None] + {group}, PACKED)
"""


def _records_tile(branch: Branch, width: int) -> str:
    """What is not seen may hold NaN. Codes of e2m1 have none, and under a scale of 0 they are 0."""
    name = f"{branch.values}_{branch.scales}"
    units = "units" if folds(branch.values, branch.scales) else "tl.where(seen[:, None], units, 0)"
    return f"""@triton.jit
def {branch.name}_tile(held, seen, KEYS: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    units, bytes = held
    by = {name}_scale(tl.where(seen[:, None], bytes, 0))
    by = spread(by, KEYS, WIDE // {branch.group}, {branch.group // UNIT})
    return {name}_keys({units}, by, KEYS, WIDE // {UNIT}, PACKED)
"""
