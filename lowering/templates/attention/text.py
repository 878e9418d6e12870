"""text: the Triton source of an attention, specialised to its Form.

    scores     x = scale q.k of a block of keys                                    a program a row and block
    values     top, total, p  <-  weigh(x), block after block, each relative    a program a row and slice
               to the largest score so far; o / (total + exp(sink - top))          of channels
    both       in one program, x never leaves it                                   a program a row

Many rows take one launch of "both"; few take the other two, so that a row keeps many programs busy. Each way does the
same operations on the same numbers in the same order: blocks of keys are what a softmax is relative to, slices of
channels change nothing, and totals add neighbours in pairs. So a row's bits depend on neither the way nor the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41.lowering.rowwise.schedule import FIRST, LATER
from v41.lowering.templates.attention.form import AS_IS, Branch, Form
from v41.lowering.templates.formats import ADDED, DECODERS, HEAD

BLOCK = 64  # keys that are weighed at once, as in DeepSeek's own: it is part of the result. See SHORTEST in form.py
HEADS_AT_ONCE, LEAST_HEADS = 64, 16  # rows of a tile that the tensor cores take
CHUNK = 128  # channels of a tile where a program has all of them: what registers hold while it is decoded

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
    used = dict.fromkeys(kind for branch in form.branches for kind in (branch.values, branch.scales))
    parts = [HEAD, ADDED, WEIGH, *(DECODERS[kind] for kind in used if kind in DECODERS)]
    parts += [turn_text(form)] if any(form.turns) else []
    parts += [keys_text(branch, form) for branch in form.branches]
    parts.append(kernel_text(form, name, operands))
    return "\n\n".join(parts)


def tile_of_heads(form: Form) -> tuple[int, int]:
    """Heads a program, a power of two, and how many programs hold all heads."""
    at_once = max(LEAST_HEADS, min(HEADS_AT_ONCE, 1 << (form.heads - 1).bit_length()))
    return at_once, -(-form.heads // at_once)


def blocks_of(form: Form, branch: Branch) -> int:
    return -(-branch.count // BLOCK)


def turn_text(form: Form) -> str:
    pairs, kept = form.rotary // 2, form.width - form.rotary
    return f'''@triton.jit
def turn(x, cos, sin, row, first, SIGN: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """fp32 [ROWS, WIDE] channels from `first` on: those from {kept} on turn in adjacent pairs."""
    pair = (first - {kept}) // 2 + tl.arange(0, WIDE // 2)
    turns = (pair >= 0)[None, :]
    c = tl.load(cos + row * {pairs} + pair, mask=pair >= 0, other=1.0)[None, :]
    s = SIGN * tl.load(sin + row * {pairs} + pair, mask=pair >= 0, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(x, [ROWS, WIDE // 2, 2]))
    return tl.reshape(tl.join(tl.where(turns, a * c - b * s, a), tl.where(turns, a * s + b * c, b)), [ROWS, WIDE])
'''


def keys_text(branch: Branch, form: Form) -> str:
    """The functions that say which keys of a block are seen, and that read some channels of them."""
    block, count = BLOCK, branch.count
    shown = "other=-1) >= 0" if branch.mask == "picks" else f"other=0).to(tl.int1) & (key < {count})"
    lines = [
        "@triton.jit",
        f"def {branch.name}_seen({branch.mask}, row, block):",
        f"    key = block * {block} + tl.arange(0, {block})",
        f"    return tl.load({branch.mask} + row * {count} + key, mask=key < {count}, {shown}",
        "",
        "",
        "@triton.jit",
        f"def {branch.name}_keys({branch.name}, seen, row, block, first, WIDE: tl.constexpr):",
        f'    """[{block}, WIDE] channels from `first` on, bf16; 0 of keys that are not seen."""',
        f"    key = row * {count} + block * {block} + tl.arange(0, {block})",
        *(_numbers(branch, form) if branch.values == AS_IS else _decoded(branch, form)),
    ]
    return "\n".join(lines) + "\n"


def _numbers(branch: Branch, form: Form) -> list[str]:
    return [
        f"    at = ({branch.name} + key * {form.width})[:, None]",
        "    channel = first + tl.arange(0, WIDE)",
        "    return tl.load(at + channel[None, :], mask=seen[:, None], other=0.0)",
    ]


def _decoded(branch: Branch, form: Form) -> list[str]:
    held, block = branch.group_bytes, BLOCK
    of_values = form.width // branch.group * held
    lines = [
        f"    at = ({branch.name} + key * {branch.bytes})[:, None]",
        f"    group = (first // {branch.group} + tl.arange(0, WIDE // {branch.group}))[None, :]",
        f"    byte = tl.load((at + group * {held})[:, :, None] + tl.arange(0, {held})[None, None, :], "
        "mask=seen[:, None, None], other=0)",
        f"    by = {branch.scales}(tl.load(at + {of_values} + group, mask=seen[:, None], other=0))[:, :, None]",
    ]
    if branch.values == "e2m1":
        lines.append("    k = tl.join(e2m1(byte) * by, e2m1(byte >> 4) * by)")
    else:
        lines.append(f"    k = {branch.values}(byte) * by")
    # the cast comes last: Triton 3.6 fails on a product of what was just reshaped
    return [*lines, f"    return tl.reshape(k, [{block}, WIDE]).to(tl.bfloat16)"]


@dataclass(frozen=True)
class Chunk:
    """Channels of a tile: from `first` on, `wide` of them; `name` ends what a variable of it is called."""

    name: str
    first: str
    wide: str
    turns: bool  # whether any of them may turn

    @property
    def channel(self) -> str:
        return f"{self.first} + tl.arange(0, {self.wide})[None, :]"


def chunks_of(form: Form) -> list[Chunk]:
    """All channels, in tiles."""
    wide, kept = min(CHUNK, form.width), form.width - form.rotary
    return [Chunk(str(i), str(at), str(wide), at + wide > kept) for i, at in enumerate(range(0, form.width, wide))]


def kernel_text(form: Form, name: str, operands: list[str]) -> str:
    rows, tiles = tile_of_heads(form)
    every, slice_ = chunks_of(form), Chunk("", "first", "SLICE", bool(form.rotary))
    lines = [
        "@triton.jit",
        f"def {name}({', '.join(operands)}, out, scores, SLICE: tl.constexpr, STEP: tl.constexpr):",
        f"    row = (tl.program_id(0) // {tiles}).to(tl.int64)",
        f"    head = tl.program_id(0) % {tiles} * {rows} + tl.arange(0, {rows})",
        f"    here = (head < {form.heads})[:, None]",
        f"    home = (row * {form.heads} + head)[:, None] * {form.width}",
        f"    if STEP == {LATER}:",
        "        first = tl.program_id(1) * SLICE",
        *_values(form, [slice_], rows, scored=True),
        "    else:",
        *_queries(form, every, rows),
        f"        if STEP == {FIRST}:",
        *_scores(form, every, rows),
        "        else:",
        *("    " + line for line in _values(form, every, rows, scored=False)),
    ]
    return "\n".join(lines) + "\n"


def _queries(form: Form, chunks: list[Chunk], rows: int) -> list[str]:
    lines = []
    for chunk in chunks:
        lines.append(f"        q{chunk.name} = tl.load(queries + home + {chunk.channel}, mask=here, other=0.0)")
        lines += _turned(f"        q{chunk.name}", form, 0, chunk, rows)
    return lines


def _turned(what: str, form: Form, which: int, chunk: Chunk, rows: int) -> list[str]:
    """Rotation number `which` of `what`, rounded, if there is one."""
    sign = form.turns[which]
    if not sign or not chunk.turns:
        return []
    place = f"row, {chunk.first}, {sign}, {rows}, {chunk.wide}"
    return [f"{what} = turn({what.strip()}.to(tl.float32), cos, sin, {place}).to(tl.bfloat16)"]


def _read(branch: Branch, number: str, chunks: list[Chunk]) -> list[str]:
    """Block `number` of a branch: what is seen, and its keys, a variable a chunk."""
    keys = (f"k{c.name} = {branch.name}_keys({branch.name}, seen, row, {number}, {c.first}, {c.wide})" for c in chunks)
    return [f"seen = {branch.name}_seen({branch.mask}, row, {number})", *keys]


def _score(form: Form, chunks: list[Chunk]) -> list[str]:
    """x of the block that was read."""
    first, *others = (c.name for c in chunks)
    return [
        f"x = tl.dot(q{first}, k{first}.trans())",
        *(f"x = tl.dot(q{name}, k{name}.trans(), x)" for name in others),
        f'x = tl.where(seen[None, :], x * {form.scale!r}, float("-inf"))',
    ]


def _place(form: Form, rows: int) -> str:
    """Where the scores of block `number` of this program's row and heads lie."""
    block, total = BLOCK, sum(blocks_of(form, branch) for branch in form.branches)
    return (f"((tl.program_id(0).to(tl.int64) * {total} + number) * {rows} + tl.arange(0, {rows}))[:, None] * {block} "
            f"+ tl.arange(0, {block})[None, :]")  # fmt: skip


def _own(start: int) -> str:
    """The number of a block in its branch, whose first is block `start` of all."""
    return f"number - {start}" if start else "number"


def _scores(form: Form, chunks: list[Chunk], rows: int) -> list[str]:
    """Of the one block that this program has."""
    lines, start = ["            number = tl.program_id(1)", f"            at = scores + {_place(form, rows)}"], 0
    for branch in form.branches:
        end = start + blocks_of(form, branch)
        lines.append(f"            if (number >= {start}) & (number < {end}):")
        body = [*_read(branch, _own(start), chunks), *_score(form, chunks), "tl.store(at, x)"]
        lines += [" " * 16 + line for line in body]
        start = end
    return lines


def _values(form: Form, chunks: list[Chunk], rows: int, scored: bool) -> list[str]:
    """Blocks one after another, their scores computed here or before; then the output."""
    block, levels = BLOCK, BLOCK.bit_length() - 1
    lines = [
        f"top = tl.full([{rows}], -1e30, tl.float32)",
        f"total = tl.zeros([{rows}], tl.float32)",
        *(f"o{c.name} = tl.zeros([{rows}, {c.wide}], tl.float32)" for c in chunks),
    ]
    start = 0
    for branch in form.branches:
        end = start + blocks_of(form, branch)
        body = [
            *_read(branch, _own(start), chunks),
            *([f"x = tl.load(scores + {_place(form, rows)})"] if scored else _score(form, chunks)),
            f"top, total, fade, p = weigh(x, top, total, {rows}, {block}, {levels})",
            *(f"o{c.name} = tl.dot(p, k{c.name}, o{c.name} * fade)" for c in chunks),
        ]
        lines += [f"for number in range({start}, {end}):", *("    " + line for line in body)]
        start = end
    lines.append(f"total += tl.exp(tl.load(sink + head, mask=head < {form.heads}, other=0.0).to(tl.float32) - top)")
    for c in chunks:
        lines.append(f"y = (o{c.name} / total[:, None]).to(tl.bfloat16)")
        lines += [*_turned("y", form, 1, c, rows), f"tl.store(out + home + {c.channel}, y, mask=here)"]
    return ["        " + line for line in lines]
