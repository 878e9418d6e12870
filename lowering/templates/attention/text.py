"""text: the Triton source of an attention, specialised to its Form; keys.py has how it reads and decodes records.

    scores     x = scale q.k of some keys                                          a program a row and keys
    values     top, total, p  <-  weigh(x), block after block, each relative    a program a row and slice
               to the largest score so far; o / (total + exp(sink - top))          of channels
    both       in one program, x never leaves it                                   a program a row

Many rows take one launch of "both"; few take the other two, so that a row keeps many programs busy. Each way does the
same operations on the same numbers in the same order: blocks of keys are what a softmax is relative to, slices of
channels change nothing, a sum over channels is the same in one product as in four that go on from each other, and
totals add neighbours in pairs. So a row's bits depend on neither the way nor the batch.

Channels of a tile stand as keys have them once decoded (../decode.py); what is written stands as the model has it.
"both" sends its queries through memory, turned and in that order, since tensor cores take them from where they were
loaded, else from registers, block after block. Its x stands in an `if`, which skips blocks that nobody sees: without
that border Triton lays x out for the product behind it, in which half of a program does the whole of x.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41.lowering.rowwise.schedule import FIRST, LATER
from v41.lowering.templates.attention.form import AS_IS, Branch, Form
from v41.lowering.templates.attention.keys import FROM_END, branch_text, counted, parameters, places, pointers
from v41.lowering.templates.decode import ORDER, PART, SCALES, SPREAD, UNIT, keys_text
from v41.lowering.templates.formats import ADDED, HEAD, indented

BLOCK = 64  # keys that are weighed at once, as in DeepSeek's own: it is part of the result. See SHORTEST in form.py
HEADS_AT_ONCE, LEAST_HEADS = 64, 16  # rows of a tile that the tensor cores take
CHUNK = 128  # channels of a product where few keys are scored: what registers hold while it is decoded

WEIGH = '''@triton.jit
def weigh(x, top, total, ROWS: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """One more block of scores: the largest so far, the total, how far what came before fades, and p."""
    higher = tl.maximum(top, tl.max(x, 1))
    fade = tl.exp(top - higher)
    p = tl.exp(x - higher[:, None])
    return higher, total * fade + added(p, ROWS, COUNT, LEVELS), fade[:, None], p.to(tl.bfloat16)
'''


def text(form: Form, name: str, operands: list[str]) -> str:
    """The file, without its first lines. operands: what the kernel reads, in order."""
    packed = [branch for branch in form.branches if branch.values != AS_IS]
    parts = [HEAD, ADDED, WEIGH, ORDER]
    if packed:
        parts.append(SPREAD)
        parts += [SCALES[kind] for kind in dict.fromkeys(branch.scales for branch in packed)]
        parts += [keys_text(kind) for kind in dict.fromkeys(branch.values for branch in packed)]
    parts += [turn_text(form)] if any(form.turns) else []
    parts += [FROM_END] if counted(form) else []
    parts += [branch_text(branch, form.width) for branch in form.branches]
    parts.append(kernel_text(form, name, operands))
    return "\n\n".join(parts)


def tile_of_heads(form: Form) -> tuple[int, int]:
    """Heads a program, a power of two, and how many programs hold all heads."""
    at_once = max(LEAST_HEADS, min(HEADS_AT_ONCE, 1 << (form.heads - 1).bit_length()))
    return at_once, -(-form.heads // at_once)


def blocks_of(branch: Branch) -> int:
    return -(-branch.count // BLOCK)


def turn_text(form: Form) -> str:
    pairs, kept = form.rotary // 2, form.width - form.rotary
    return f'''@triton.jit
def turn(x, cos, sin, row, first, SIGN: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """bf16 [ROWS, WIDE] channels from `first` on: those from {kept} on turn in adjacent pairs, in fp32."""
    pair = (first - {kept}) // 2 + tl.arange(0, WIDE // 2)
    turns = (pair >= 0)[None, :]
    c = tl.load(cos + row * {pairs} + pair, mask=pair >= 0, other=1.0)[None, :]
    s = SIGN * tl.load(sin + row * {pairs} + pair, mask=pair >= 0, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(x.to(tl.float32), [ROWS, WIDE // 2, 2]))
    x = tl.join(tl.where(turns, a * c - b * s, a), tl.where(turns, a * s + b * c, b))
    return tl.reshape(x, [ROWS, WIDE]).to(tl.bfloat16)
'''


@dataclass(frozen=True)
class Channels:
    """Of the channels of a tile: from `first` on, `wide` of them."""

    first: str
    wide: int

    @property
    def each(self) -> str:
        return f"{self.first} + tl.arange(0, {self.wide})[None, :]"


def last_of(form: Form) -> Channels:
    """A tile that holds all that turns."""
    wide = max(UNIT, 1 << (form.rotary - 1).bit_length())
    return Channels(str(form.width - wide), wide)


def kernel_text(form: Form, name: str, operands: list[str]) -> str:
    rows, tiles = tile_of_heads(form)
    constants = ("SLICE", "STEP", "KEYS", "STAGES", "PACKED")
    numbers = list(counted(form))
    lines = [
        f"@triton.jit(do_not_specialize={numbers})" if numbers else "@triton.jit",
        f"def {name}({', '.join([*parameters(form, operands), 'out', 'scores', *numbers])},",
        f"    {', '.join(f'{each}: tl.constexpr' for each in constants)}):",
        f"    row = (tl.program_id(0) // {tiles}).to(tl.int64)",
        f"    head = tl.program_id(0) % {tiles} * {rows} + tl.arange(0, {rows})",
        f"    here = (head < {form.heads})[:, None]",
        f"    home = (row * {form.heads} + head)[:, None] * {form.width}",
        f"    if STEP == {FIRST}:",
        *indented(_scores(form, rows), 2),
        f"    elif STEP == {LATER}:",
        *indented(_values(form, rows), 2),
        "    else:",
        *indented(_both(form, rows), 2),
    ]
    return "\n".join(lines) + "\n"


def _masked(form: Form, rows: int) -> tuple[str, str]:
    """Of loads and stores, where a tile has more heads than there are."""
    return ("", "") if form.heads % rows == 0 else (", mask=here, other=0.0", ", mask=here")


def _turned(x: str, form: Form, which: int, channels: Channels, rows: int) -> str:
    """Rotation number `which` of x, if there is one."""
    sign = form.turns[which]
    return f"turn({x}, cos, sin, row, {channels.first}, {sign}, {rows}, {channels.wide})" if sign else x


def _at(branch: Branch, number: str, keys: str) -> str:
    """Which records the keys of a block are, and which keys are seen."""
    return f"at, seen = {branch.name}_at({places(branch)}, row, {number}, {keys})"


def _read(branch: Branch, held: str, keys: str, channels: Channels | str) -> str:
    """What some channels of these are held as."""
    first, wide = (channels.first, channels.wide) if isinstance(channels, Channels) else ("first", channels)
    return f"{held} = {branch.name}_read({pointers(branch)}, at, {first}, {keys}, {wide})"


def _starts(form: Form) -> list[tuple[Branch, int]]:
    """Branches with the number of blocks before each."""
    found, start = [], 0
    for branch in form.branches:
        found.append((branch, start))
        start += blocks_of(branch)
    return found


# ---- scores and values


def _place(form: Form, rows: int, key: str, keys: str) -> str:
    """Where scores of this program's row and heads lie: block after block [heads, BLOCK], from key number `key` on."""
    total = sum(map(blocks_of, form.branches))
    block = f"(tl.program_id(0).to(tl.int64) * {total} + {key} // {BLOCK}) * {rows}"
    return f"({block} + tl.arange(0, {rows}))[:, None] * {BLOCK} + {key} % {BLOCK} + tl.arange(0, {keys})[None, :]"


def _scores(form: Form, rows: int) -> list[str]:
    """Of the KEYS that this program has."""
    wide, kept = min(CHUNK, form.width), form.width - form.rotary
    chunks = [Channels(str(first), wide) for first in range(0, form.width, wide)]
    load, _ = _masked(form, rows)
    lines = ["start = tl.program_id(1) * KEYS", f"place = scores + {_place(form, rows, 'start', 'KEYS')}"]
    for i, chunk in enumerate(chunks):
        lines.append(f"q{i} = tl.load(queries + home + {chunk.each}{load})")
        if int(chunk.first) + wide > kept and form.turns[0]:
            lines.append(f"q{i} = {_turned(f'q{i}', form, 0, chunk, rows)}")
        lines.append(f"q{i} = ordered(q{i}, {rows}, {wide // UNIT})")
    for branch, start in _starts(form):
        end = (start + blocks_of(branch)) * BLOCK
        tile = f"{branch.name}_tile(held{{i}}, seen, KEYS, {wide}, PACKED).trans()"
        body = [
            f"number = tl.program_id(1) - {start * BLOCK} // KEYS",
            _at(branch, "number", "KEYS"),
            *(_read(branch, f"held{i}", "KEYS", chunk) for i, chunk in enumerate(chunks)),
            f"x = tl.dot(q0, {tile.format(i=0)})",
            *(f"x = tl.dot(q{i}, {tile.format(i=i)}, x)" for i in range(1, len(chunks))),
            f'tl.store(place, tl.where(seen[None, :], x * {form.scale!r}, float("-inf")))',
        ]
        lines += [f"if (start >= {start * BLOCK}) & (start < {end}):", *indented(body)]
    return lines


def _values(form: Form, rows: int) -> list[str]:
    """SLICE channels of the output, from scores that were computed before."""
    _, store = _masked(form, rows)
    lines = ["first = tl.program_id(1) * SLICE", *_empty(rows, "SLICE")]
    for branch, start in _starts(form):
        body = [
            _at(branch, "number", str(BLOCK)),
            _read(branch, "held", str(BLOCK), "SLICE"),
            f"x = tl.load(scores + {_place(form, rows, f'(number + {start}) * {BLOCK}', str(BLOCK))})",
            f"k = {branch.name}_tile(held, seen, {BLOCK}, SLICE, PACKED)",
            _weighed(rows),
            "o = tl.dot(p, k, o * fade)",
        ]
        lines += [f"for number in tl.range(0, {blocks_of(branch)}, num_stages=STAGES):"]
        lines += indented(body)
    lines += [*_divided(form), f"y = restored(y, {rows}, SLICE // {UNIT})"]
    if form.turns[1]:
        lines.append(f"y = turn(y, cos, sin, row, first, {form.turns[1]}, {rows}, SLICE)")
    return [*lines, f"tl.store(out + home + first + tl.arange(0, SLICE)[None, :], y{store})"]


def _empty(rows: int, wide: int | str) -> list[str]:
    return [
        f"top = tl.full([{rows}], -1e30, tl.float32)",
        f"total = tl.zeros([{rows}], tl.float32)",
        f"o = tl.zeros([{rows}, {wide}], tl.float32)",
    ]


def _weighed(rows: int) -> str:
    return f"top, total, fade, p = weigh(x, top, total, {rows}, {BLOCK}, {BLOCK.bit_length() - 1})"


def _divided(form: Form) -> list[str]:
    return [
        f"total += tl.exp(tl.load(sink + head, mask=head < {form.heads}, other=0.0).to(tl.float32) - top)",
        "y = (o * (1.0 / total)[:, None]).to(tl.bfloat16)",
    ]


# ---- both in one


def _both(form: Form, rows: int) -> list[str]:
    all_ = Channels("0", form.width)
    load, store = _masked(form, rows)
    lines = [f"channel = tl.arange(0, {form.width})[None, :]", *_queries(form, rows), *_empty(rows, form.width)]
    for branch, _ in _starts(form):
        scored = [
            "x = tl.dot(q, k.trans())",
            f'x = tl.where(seen[None, :], x * {form.scale!r}, float("-inf"))',
            _weighed(rows),
        ]
        body = [
            _at(branch, "number", str(BLOCK)),
            _read(branch, "held", str(BLOCK), all_),
            f"k = {branch.name}_tile(held, seen, {BLOCK}, {form.width}, PACKED)",
            f"fade = tl.full([{rows}, 1], 1.0, tl.float32)",
            f"p = tl.zeros([{rows}, {BLOCK}], tl.bfloat16)",
            "if tl.max(seen.to(tl.int32), 0) > 0:",
            *indented(scored),
            "o = tl.dot(p, k, o * fade)",
        ]
        lines += [f"for number in tl.range(0, {blocks_of(branch)}, num_stages=1):"]
        lines += indented(body)
    lines += [
        *_divided(form),
        f"y = restored(y, {rows}, {form.width // UNIT})",
        f"tl.store(out + home + channel, y{store})",
    ]
    if form.turns[1]:
        last = last_of(form)
        lines += [
            "tl.debug_barrier()",
            f"y = {_turned(f'tl.load(out + home + {last.each}{load})', form, 1, last, rows)}",
            "tl.debug_barrier()",
            f"tl.store(out + home + {last.each}, y{store})",
        ]
    return lines


def _queries(form: Form, rows: int) -> list[str]:
    """Turned, and in the order of decoded keys, through this row's place in `out`: what turns is a tile of its own."""
    load, store = _masked(form, rows)
    lines = [
        f"q = tl.load(queries + home + channel{load})",
        f"q = ordered(q, {rows}, {form.width // UNIT})",
    ]
    if not form.turns[0]:
        lines.append(f"tl.store(out + home + channel, q{store})")
    else:
        last, part = last_of(form), min(PART, form.width // UNIT)
        run = UNIT * part
        stands = (
            f"channel // {run} * {run} + channel % {part} * {UNIT} < {last.first}"  # channels of a unit go together
        )
        here = " & here" if store else ""
        units = last.wide // UNIT
        lines += [
            f"tl.store(out + home + channel, q, mask=({stands}){here})",
            f"q = {_turned(f'tl.load(queries + home + {last.each}{load})', form, 0, last, rows)}",
            f"q = tl.permute(tl.reshape(q, [{rows}, {units}, {UNIT}]), (0, 2, 1))",
            f"unit = {int(last.first) // UNIT} + tl.arange(0, {units})[None, None, :]",
            f"place = unit // {part} * {run} + unit % {part} + tl.arange(0, {UNIT})[None, :, None] * {part}",
            f"tl.store(out + home[:, :, None] + place, q{', mask=here[:, :, None]' if store else ''})",
        ]
    return [*lines, "tl.debug_barrier()", f"q = tl.load(out + home + channel{load})"]
