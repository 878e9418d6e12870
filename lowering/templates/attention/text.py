"""text: the Triton source of an attention, specialised to its Form; keys.py has how it reads and decodes records.

    scores     x = scale log2(e) q.k of a tile of keys; own, p, sums  <-  weigh(x)      a program a row and tile
    values     o = sum over keys of p 2^(own - top), rounded to bf16, times k           a program a row and slice
               y = o / (total + exp(sink - top))                                        of channels
    both       in one program, tile after tile: what came before is multiplied by       a program a row
               2^(top - higher) where a tile has a score above top

Many rows take one launch of "both"; few take the other two, so that a row keeps many programs busy. A row's bits depend
on neither the way nor the batch. For p is made relative to the largest score of a block of keys, rounded up to a whole
number: what it is multiplied by later are powers of two, and these change no digit of p, of a product with it or of a
sum, wherever they are applied, down to 2^-126 of the largest. Near there p and o lose digits, in one way others than in
the other: it shows where all larger p meet zeros in a channel, in the last bits of some 2^-120. Sums go by keys,
sixteen at a time, totals by blocks; slices of channels change nothing.

Channels of a tile stand as keys have them once decoded (../decode.py); what is written stands as the model has it.
"both" sends its queries through memory, turned and in that order, since tensor cores take them from where they were
loaded, else from registers, block after block. Two things keep Triton from laying x or o out for a product that comes
later, in which half of a program does the whole of it: x stands in an `if`, which skips blocks that nobody sees, and no
loop is known to go round once, which would be none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from v41.lowering.rowwise.schedule import FIRST, LATER
from v41.lowering.templates.attention.form import AS_IS, Branch, Form
from v41.lowering.templates.attention.keys import FROM_END, branch_text, counted, parameters, places, pointers
from v41.lowering.templates.decode import ORDER, PART, SPREAD, UNIT, gain_of, keys_text
from v41.lowering.templates.formats import ADDED, DECODERS, HEAD, indented

BLOCK = 64  # keys that one maximum is over: it is part of the result. See SHORTEST in form.py
HEADS_AT_ONCE, LEAST_HEADS = 64, 16  # rows of a tile that the tensor cores take
AHEAD = 8  # tiles of keys whose records a program of the second launch asks for at once
CHUNK = 128  # channels of a product, where shared memory does not hold all

WEIGH = f'''@triton.jit
def power(n):
    """2^n, exactly; 0 below 2^-126. n: whole numbers up to 0"""
    return ((tl.maximum(n, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Scores [ROWS, BLOCKS * {BLOCK}] in powers of two -> of each block the least whole number that none is above, p
    relative to it and their sum: [ROWS, BLOCKS], [ROWS, BLOCKS, {BLOCK}], [ROWS, BLOCKS]."""
    x = tl.reshape(x, [ROWS, BLOCKS, {BLOCK}])
    own = tl.ceil(tl.maximum(tl.max(x, 2), -1e30))
    p = tl.exp2(x - own[:, :, None])
    sums = added(tl.reshape(p, [ROWS * BLOCKS, {BLOCK}]), ROWS * BLOCKS, {BLOCK}, {BLOCK.bit_length() - 1})
    return own, p, tl.reshape(sums, [ROWS, BLOCKS])


@triton.jit
def summed(total, sums, by, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """total and the sums of blocks, one after the other"""
    if BLOCKS == 2:
        first, second = tl.split(sums * by)
        return total + first + second
    else:
        return total + tl.reshape(sums * by, [ROWS])
'''


OF_ALL = '''@triton.jit
def first_of(a, b):
    return a


@triton.jit
def settled(x, ROWS: tl.constexpr):
    """`x` [ROWS], behind an op that Triton moves no layout conversion across: what is read later would be behind the
    barriers of one."""
    return tl.reduce(tl.reshape(x, [ROWS, 1]), 1, first_of)


@triton.jit
def of_all(tops, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The largest number of all blocks and, relative to it, their sums, one after the other. In the layout that they
    are read in: else each would go through shared memory by itself, and the next be read behind it."""
    home = tops + tl.arange(0, ROWS)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in tl.static_range(BLOCKS):
        top = tl.maximum(top, tl.load(home + block * (2 * ROWS)))
    for block in tl.static_range(BLOCKS):
        said = home + block * (2 * ROWS)
        total += tl.load(said + ROWS) * power(tl.load(said) - top)
    return settled(top, ROWS), settled(total, ROWS)
'''


def text(form: Form, name: str, operands: list[str]) -> str:
    """The file, without its first lines. operands: what the kernel reads, in order."""
    packed = [branch for branch in form.branches if branch.values != AS_IS]
    parts = [HEAD, ADDED, WEIGH, OF_ALL, ORDER]
    if packed:
        parts.append(SPREAD)
        parts += [DECODERS[kind] for kind in dict.fromkeys(branch.values for branch in packed)]
        parts += [keys_text(*kinds) for kinds in dict.fromkeys((branch.values, branch.scales) for branch in packed)]
    parts += [turn_text(form)] if any(form.turns) else []
    parts += [FROM_END] if counted(form) else []
    parts += [branch_text(branch, form.width) for branch in form.branches]
    parts.append(kernel_text(form, name, operands))
    return "\n\n".join(parts)


def tile_of_heads(form: Form) -> tuple[int, int]:
    """Heads a program, a power of two, and how many programs hold all heads."""
    at_once = max(LEAST_HEADS, min(HEADS_AT_ONCE, 1 << (form.heads - 1).bit_length()))
    return at_once, -(-form.heads // at_once)


def tile_of(branch: Branch, form: Form) -> int:
    """Keys that a program decodes at once: two blocks, where what is read of them fits its registers beside o, and they
    shared memory. With fewer heads products take both operands from registers, and keys lie there in two orders."""
    pays = branch.values == "e2m1" and branch.count > BLOCK and tile_of_heads(form)[0] == HEADS_AT_ONCE
    return 2 * BLOCK if pays else BLOCK


def tiles_of(branch: Branch, form: Form) -> int:
    return -(-branch.count // tile_of(branch, form))


def blocks_of(branch: Branch, form: Form) -> int:
    """Those behind the last key are of the last tile."""
    return tiles_of(branch, form) * tile_of(branch, form) // BLOCK


def all_blocks(form: Form) -> int:
    return sum(blocks_of(branch, form) for branch in form.branches)


def turn_text(form: Form) -> str:
    pairs, kept = form.rotary // 2, form.width - form.rotary
    return f'''@triton.jit
def turn(x, cos, sin, row, first, SIGN: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """bf16 [ROWS, WIDE] channels from `first` on: those from {kept} on turn in adjacent pairs, in fp32."""
    pair = (first - {kept}) // 2 + tl.arange(0, WIDE // 2)
    turns = (pair >= 0)[None, :]
    c = tl.load(cos + row * {pairs} + pair, mask=pair >= 0, other=1.0)
    s = SIGN * tl.load(sin + row * {pairs} + pair, mask=pair >= 0, other=0.0)
    c, s = settled(c, WIDE // 2)[None, :], settled(s, WIDE // 2)[None, :]
    a, b = tl.split(tl.reshape(x.to(tl.float32), [ROWS, WIDE // 2, 2]))
    x = tl.join(tl.where(turns, a * c - b * s, a), tl.where(turns, a * s + b * c, b))
    return tl.reshape(x, [ROWS, WIDE]).to(tl.bfloat16)
'''


@dataclass(frozen=True)
class Channels:
    """Of the channels of a tile: from `first` on, `wide` of them."""

    first: str
    wide: int | str

    @property
    def each(self) -> str:
        return f"{self.first} + tl.arange(0, {self.wide})[None, :]"


SLICE = Channels("first", "SLICE")


def turning(form: Form) -> int:
    """Channels of a tile that holds all that turns."""
    return max(UNIT, 1 << (form.rotary - 1).bit_length())


def last_of(form: Form) -> Channels:
    """That tile."""
    return Channels(str(form.width - turning(form)), turning(form))


def kernel_text(form: Form, name: str, operands: list[str]) -> str:
    rows, tiles = tile_of_heads(form)
    constants = ("SLICE", "STEP", "STAGES", "WHOLE", "PDL", "PACKED")
    numbers = list(counted(form))
    lines = [
        f"@triton.jit(do_not_specialize={numbers})" if numbers else "@triton.jit",
        f"def {name}({', '.join([*parameters(form, operands), 'out', 'parts', 'tops', *numbers])},",
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


def _at(branch: Branch, form: Form, number: str = "number", i: str = "") -> str:
    """Which records the keys of tile `number` are, and which keys are seen. i: the tile's in names."""
    return f"at{i}, seen{i} = {branch.name}_at({places(branch)}, row, {number}, {tile_of(branch, form)})"


def _read(branch: Branch, form: Form, channels: Channels, i: str = "", part: str = "") -> str:
    """What some channels of these are held as."""
    given = f"{pointers(branch)}, at{i}, {channels.first}, {tile_of(branch, form)}, {channels.wide}, PACKED"
    return f"held{i}{part} = {branch.name}_read({given})"


def _decoded(branch: Branch, form: Form, channels: Channels, i: str = "", part: str = "") -> str:
    return f"{branch.name}_tile(held{i}{part}, seen{i}, {tile_of(branch, form)}, {channels.wide}, PACKED)"


def _weighed(branch: Branch, form: Form, rows: int) -> list[str]:
    """own, p and sums of a tile of keys."""
    scale = form.scale * math.log2(math.e) * _gain(branch)
    return [
        f'x = tl.where(seen[None, :], x * {scale!r}, float("-inf"))',
        f"own, p, sums = weigh(x, {rows}, {tile_of(branch, form) // BLOCK})",
    ]


def _gain(branch: Branch) -> float:
    return 1.0 if branch.values == AS_IS else gain_of(branch.values, branch.scales)


def _blocks(branch: Branch, form: Form, rows: int, start: int, number: str = "number") -> list[str]:
    """Where a tile's blocks are among those of this program's row and heads, and what is said of each: its own number,
    and behind those of all heads its sum."""
    count = tile_of(branch, form) // BLOCK
    return [
        f"block = blocks + {start} + {number} * {count} + tl.arange(0, {count})",
        f"mark = tops + block[None, :] * {2 * rows} + tl.arange(0, {rows})[:, None]",
    ]


def _part(rows: int) -> str:
    """Where p of these is: block after block [rows, BLOCK]."""
    inner = f"tl.arange(0, {rows})[:, None, None] * {BLOCK} + tl.arange(0, {BLOCK})[None, None, :]"
    return f"parts + block[None, :, None] * {rows * BLOCK} + {inner}"


def _starts(form: Form) -> list[tuple[Branch, int, int]]:
    """Branches with the number of tiles and of blocks before each."""
    found, tiles, blocks = [], 0, 0
    for branch in form.branches:
        found.append((branch, tiles, blocks))
        tiles, blocks = tiles + tiles_of(branch, form), blocks + blocks_of(branch, form)
    return found


# ---- scores and values


def _first_block(form: Form) -> str:
    return f"blocks = tl.program_id(0).to(tl.int64) * {all_blocks(form)}"


def _scores(form: Form, rows: int) -> list[str]:
    """Of the tile that this program has."""
    lines = [
        "if PDL:  # the second launch may come up while this one runs",
        "    tl.extra.cuda.gdc_launch_dependents()",
        _first_block(form),
    ]
    for branch, tiles, blocks in _starts(form):
        body = [
            f"number = tl.program_id(1) - {tiles}",
            _at(branch, form),
            "if WHOLE:",
            *indented(_product(branch, form, rows, form.width)),
            "else:",
            *indented(_product(branch, form, rows, min(CHUNK, form.width))),
            *_weighed(branch, form, rows),
            *_blocks(branch, form, rows, blocks),
            f"tl.store({_part(rows)}, p.to(tl.bfloat16))",
            "tl.store(mark, own)",
            f"tl.store(mark + {rows}, sums)",
        ]
        end = tiles + tiles_of(branch, form)
        lines += [f"if (tl.program_id(1) >= {tiles}) & (tl.program_id(1) < {end}):", *indented(body)]
    return lines


def _product(branch: Branch, form: Form, rows: int, wide: int) -> list[str]:
    """x of a tile of keys, by so many channels at a time, all of them asked for at once."""
    chunks = [Channels(str(first), wide) for first in range(0, form.width, wide)]
    load, _ = _masked(form, rows)
    lines = [_read(branch, form, chunk, part=f"_{i}") for i, chunk in enumerate(chunks)]
    for i, chunk in enumerate(chunks):
        turns = int(chunk.first) + wide > form.width - form.rotary
        lines.append(f"q{i} = tl.load(queries + home + {chunk.each}{load})")
        lines.append(f"q{i} = ordered({_turned(f'q{i}', form, 0, chunk, rows) if turns else f'q{i}'}, "
                     f"{rows}, {wide // UNIT})")  # fmt: skip
    for i, chunk in enumerate(chunks):
        lines.append(f"x = tl.dot(q{i}, {_decoded(branch, form, chunk, part=f'_{i}')}.trans(){', x' if i else ''})")
    return lines


def _values(form: Form, rows: int) -> list[str]:
    """SLICE channels of the output, from p that was computed before. Records wait for nothing that the first launch
    stores, so up to AHEAD tiles are read before it has ended, and p a tile ahead; of more keys, tile after tile."""
    _, store = _masked(form, rows)
    total = all_blocks(form)
    each = [(branch, start, number) for branch, _, start in _starts(form) for number in range(tiles_of(branch, form))]
    ahead = len(each) <= AHEAD
    lines = ["first = tl.program_id(1) * SLICE", _first_block(form)]
    if ahead:
        lines += [_at(branch, form, str(number), str(i)) for i, (branch, _, number) in enumerate(each)]
        for i, (branch, _, _) in enumerate(each):
            keys = tile_of(branch, form)
            lines += [
                f"at{i} = settled(at{i}, {keys})",
                f"seen{i} = settled(seen{i}.to(tl.int32), {keys}) != 0",
                _read(branch, form, SLICE, str(i)),
            ]
    lines += [
        "if PDL:  # until all that the first launch stored is there",
        "    tl.extra.cuda.gdc_wait()",
        f"top, total = of_all(tops + blocks * {2 * rows}, {rows}, {total})",
        f"o = tl.zeros([{rows}, SLICE], tl.float32)",
    ]
    if ahead:
        weights = [_weights(branch, form, rows, start, str(number), str(i))
                   for i, (branch, start, number) in enumerate(each)]  # fmt: skip
        products = [_met(branch, form, rows, str(i)) for i, (branch, _, _) in enumerate(each)]
        lines += weights[0]
        for following, product in zip([*weights[1:], []], products, strict=True):
            lines += [*following, *product]
    else:
        for branch, _, start in _starts(form):
            body = [
                _at(branch, form),
                _read(branch, form, SLICE),
                *_weights(branch, form, rows, start),
                *_met(branch, form, rows),
            ]
            lines += [f"for number in tl.range(0, {tiles_of(branch, form)}, num_stages=STAGES):", *indented(body)]
    lines += [*_divided(form), f"y = restored(y, {rows}, SLICE // {UNIT})"]
    if form.turns[1]:
        lines.append(f"y = turn(y, cos, sin, row, first, {form.turns[1]}, {rows}, SLICE)")
    return [*lines, f"tl.store(out + home + first + tl.arange(0, SLICE)[None, :], y{store})"]


def _weights(
    branch: Branch, form: Form, rows: int, start: int, number: str = "number", i: str = ""
) -> list[str]:
    """p of a tile, and what each block of it is multiplied by, to be relative to the largest score of all. i: the
    tile's in names."""
    return [
        *_blocks(branch, form, rows, start, number),
        f"by{i} = power(tl.load(mark) - top[:, None]) * {_gain(branch)}",
        f"p{i} = tl.load({_part(rows)})",
    ]


def _met(branch: Branch, form: Form, rows: int, i: str = "") -> list[str]:
    """Both multiplied."""
    return [
        f"p = p{i} * by{i}.to(tl.bfloat16)[:, :, None]",
        f"k = {_decoded(branch, form, SLICE, i)}",
        f"o = tl.dot(tl.reshape(p, [{rows}, {tile_of(branch, form)}]), k, o)",
    ]


def _empty(rows: int, wide: int | str) -> list[str]:
    return [
        f"top = tl.full([{rows}], -1e30, tl.float32)",
        f"total = tl.zeros([{rows}], tl.float32)",
        f"o = tl.zeros([{rows}, {wide}], tl.float32)",
    ]


def _divided(form: Form) -> list[str]:
    sink = f"tl.load(sink + head, mask=head < {form.heads}, other=0.0).to(tl.float32)"
    return [
        f"total += tl.exp2({sink} * {math.log2(math.e)!r} - top)",
        "y = (o * (1.0 / total)[:, None]).to(tl.bfloat16)",
    ]


# ---- both in one


def _both(form: Form, rows: int) -> list[str]:
    all_ = Channels("0", form.width)
    load, store = _masked(form, rows)
    lines = [f"channel = tl.arange(0, {form.width})[None, :]", *_queries(form, rows), *_empty(rows, form.width)]
    for branch in form.branches:
        keys = tile_of(branch, form)
        weighed = [
            "x = tl.dot(q, k.trans())",
            *_weighed(branch, form, rows),
            "higher = tl.maximum(top, tl.max(own, 1))",
            "fade = power(top - higher)",
            "by = power(own - higher[:, None])",
            f"total = summed(total * fade, sums, by, {rows}, {keys // BLOCK})",
            f"p = tl.reshape(p * (by * {_gain(branch)})[:, :, None], [{rows}, {keys}]).to(tl.bfloat16)",
            "top = higher",
        ]
        body = [
            _at(branch, form),
            _read(branch, form, all_),
            f"k = {_decoded(branch, form, all_)}",
            f"fade = tl.full([{rows}], 1.0, tl.float32)",
            f"p = tl.zeros([{rows}, {keys}], tl.bfloat16)",
            "if tl.max(seen.to(tl.int32), 0) > 0:",
            *indented(weighed),
            "o = tl.dot(p, k, o * fade[:, None])",
        ]
        lines += [f"for number in tl.range(0, {tiles_of(branch, form)} * tl.num_programs(1), num_stages=1):  # by one"]
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
    ordered = f"ordered(q, {rows}, {form.width // UNIT})"
    lines = [f"q = tl.load(queries + home + channel{load})"]
    if not form.turns[0]:
        lines.append(f"tl.store(out + home + channel, {ordered}{store})")
    else:
        last, part = last_of(form), min(PART, form.width // UNIT)
        run, units = UNIT * part, turning(form) // UNIT
        stands = f"channel // {run} * {part} + channel % {part} < {int(last.first) // UNIT}"  # their units do
        here = " & here" if store else ""
        lines += [
            f"turned = tl.load(queries + home + {last.each}{load})",
            f"tl.store(out + home + channel, {ordered}, mask=({stands}){here})",
            f"turned = {_turned('turned', form, 0, last, rows)}",
            f"turned = tl.permute(tl.reshape(turned, [{rows}, {units}, {UNIT}]), (0, 2, 1))",
            f"unit = {int(last.first) // UNIT} + tl.arange(0, {units})[None, None, :]",
            f"place = unit // {part} * {run} + unit % {part} + tl.arange(0, {UNIT})[None, :, None] * {part}",
            f"tl.store(out + home[:, :, None] + place, turned{', mask=here[:, :, None]' if store else ''})",
        ]
    return [*lines, "tl.debug_barrier()", f"q = tl.load(out + home + channel{load})"]
