"""text: the Triton source of an attention, specialised to its Form.

    scores     x = scale q.k of a block of keys                                    a program a row and block
    values     top, total, o  <-  weigh(x, k), block after block, each relative    a program a row and slice
               to the largest score so far; o / (total + exp(sink - top))          of channels
    both       in one program, x never leaves it                                   a program a row

Many rows take one launch of "both"; few take the other two, so that a row keeps many programs busy. Each way does the
same operations on the same numbers in the same order: blocks of keys are what a softmax is relative to, slices of
channels change nothing, and totals add neighbours in pairs. So a row's bits depend on neither the way nor the batch.
"""

from __future__ import annotations

from v41.lowering.rowwise.schedule import ALL, FIRST, LATER
from v41.lowering.templates.attention.form import AS_IS, Branch, Form

BLOCK = 64  # keys that are weighed at once, as in DeepSeek's own: it is part of the result
HEADS_AT_ONCE, LEAST = 64, 16  # rows of a tile that the tensor cores take

START = '''import triton
import triton.language as tl


@triton.jit
def added(p, ROWS: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COUNT] -> [ROWS]: neighbours in pairs, the pairs in pairs, in whatever threads they lie."""
    for level in tl.static_range(LEVELS):
        p = tl.sum(tl.reshape(p, [ROWS, COUNT >> (level + 1), 2]), 2)
    return tl.reshape(p, [ROWS])


@triton.jit
def weigh(x, k, top, total, o, ROWS: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """One more block of keys: `top` is the largest score so far, what came before fades to it."""
    higher = tl.maximum(top, tl.max(x, 1))
    fade = tl.exp(top - higher)
    p = tl.exp(x - higher[:, None])
    total = total * fade + added(p, ROWS, COUNT, LEVELS)
    return higher, total, tl.dot(p.to(tl.bfloat16), k, o * fade[:, None])
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


def text(form: Form, name: str, operands: list[str]) -> str:
    """The file, without its first lines. operands: what the kernel reads, in order."""
    used = dict.fromkeys(kind for branch in form.branches for kind in (branch.values, branch.scales))
    parts = [START, *(DECODERS[kind] for kind in used if kind in DECODERS)]
    parts += [turn_text(form)] if any(form.turns) else []
    parts += [keys_text(branch, form) for branch in form.branches]
    parts.append(kernel_text(form, name, operands))
    return "\n\n".join(parts)


def tile_of_heads(form: Form) -> tuple[int, int]:
    """Heads a program, a power of two, and how many programs hold all heads."""
    at_once = max(LEAST, min(HEADS_AT_ONCE, 1 << (form.heads - 1).bit_length()))
    return at_once, -(-form.heads // at_once)


def block_of(form: Form) -> int:
    """Keys a block: BLOCK, or what the longest branch fills of it."""
    most = max(branch.count for branch in form.branches)
    return max(LEAST, min(BLOCK, 1 << (most - 1).bit_length()))


def blocks_of(form: Form, branch: Branch) -> int:
    return -(-branch.count // block_of(form))


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
    """The function that reads a block of keys, all channels or a slice of them."""
    block, count = block_of(form), branch.count
    shown = "other=-1) >= 0" if branch.mask == "picks" else "other=0).to(tl.int1)"
    lines = [
        "@triton.jit",
        f"def {branch.name}_keys({branch.name}, {branch.mask}, row, block, first, WIDE: tl.constexpr):",
        f'    """Which of {block} keys are seen, and their channels from `first` on; 0 of those that are not."""',
        f"    key = block * {block} + tl.arange(0, {block})",
        f"    seen = tl.load({branch.mask} + row * {count} + key, mask=key < {count}, {shown}",
        *([f"    seen = seen & (key < {count})"] if branch.mask != "picks" else []),
        *(_numbers(branch, form) if branch.values == AS_IS else _decoded(branch, form)),
    ]
    return "\n".join(lines) + "\n"


def _numbers(branch: Branch, form: Form) -> list[str]:
    width = form.width
    return [
        f"    at = {branch.name} + (row * {branch.count} + key)[:, None] * {width}",
        "    channel = first + tl.arange(0, WIDE)",
        "    return seen, tl.load(at + channel[None, :], mask=seen[:, None], other=0.0)",
    ]


def _decoded(branch: Branch, form: Form) -> list[str]:
    held, block = branch.group_bytes, block_of(form)
    of_values = form.width // branch.group * held
    lines = [
        f"    at = ({branch.name} + (row * {branch.count} + key) * {branch.bytes})[:, None]",
        f"    group = (first // {branch.group} + tl.arange(0, WIDE // {branch.group}))[None, :]",
        f"    byte = tl.load((at + group * {held})[:, :, None] + tl.arange(0, {held})[None, None, :], "
        "mask=seen[:, None, None], other=0)",
        f"    by = {branch.scales}(tl.load(at + {of_values} + group, mask=seen[:, None], other=0))[:, :, None]",
    ]
    if branch.values == "e2m1":
        lines.append("    k = tl.join((e2m1(byte) * by).to(tl.bfloat16), (e2m1(byte >> 4) * by).to(tl.bfloat16))")
    else:
        lines.append(f"    k = ({branch.values}(byte) * by).to(tl.bfloat16)")
    return [*lines, f"    return seen, tl.reshape(k, [{block}, WIDE])"]


def kernel_text(form: Form, name: str, operands: list[str]) -> str:
    rows, tiles = tile_of_heads(form)
    lines = [
        "@triton.jit",
        f"def {name}({', '.join(operands)}, out, scores, SLICE: tl.constexpr, STEP: tl.constexpr):",
        f"    row = (tl.program_id(0) // {tiles}).to(tl.int64)",
        f"    head = tl.program_id(0) % {tiles} * {rows} + tl.arange(0, {rows})",
        f"    here = (head < {form.heads})[:, None]",
        f"    channel = tl.arange(0, {form.width})[None, :]",
        f"    home = (row * {form.heads} + head)[:, None] * {form.width}",
        f"    if STEP != {LATER}:",
        "        q = tl.load(queries + home + channel, mask=here, other=0.0)",
        *_turned("        q", "q", form, 0, "0", rows, str(form.width)),
        f"    if STEP == {FIRST}:",
        *_scores(form, rows),
        "    else:",
        *_values(form, rows),
    ]
    return "\n".join(lines) + "\n"


def _turned(into: str, what: str, form: Form, which: int, first: str, rows: int, wide: str) -> list[str]:
    """Rotation number `which`, rounded, if there is one."""
    sign = form.turns[which]
    if not sign:
        return []
    return [f"{into} = turn({what}.to(tl.float32), cos, sin, row, {first}, {sign}, {rows}, {wide}).to(tl.bfloat16)"]


def _score(form: Form) -> str:
    return f'tl.where(seen[None, :], tl.dot(q, k.trans()) * {form.scale!r}, float("-inf"))'


def _read(branch: Branch, start: int) -> str:
    """The call that reads block `number`, the branch's own beginning at `start`, up to the channels."""
    own = f"number - {start}" if start else "number"
    return f"{branch.name}_keys({branch.name}, {branch.mask}, row, {own}"


def _place(form: Form, rows: int) -> str:
    """Where the scores of block `number` of this program's row and heads lie."""
    block, total = block_of(form), sum(blocks_of(form, branch) for branch in form.branches)
    return (f"((tl.program_id(0).to(tl.int64) * {total} + number) * {rows} + tl.arange(0, {rows}))[:, None] * {block} "
            f"+ tl.arange(0, {block})[None, :]")  # fmt: skip


def _scores(form: Form, rows: int) -> list[str]:
    """Of the one block that this program has."""
    lines, start = ["        number = tl.program_id(1)", f"        at = scores + {_place(form, rows)}"], 0
    for branch in form.branches:
        end = start + blocks_of(form, branch)
        lines += [
            f"        if (number >= {start}) & (number < {end}):",
            f"            seen, k = {_read(branch, start)}, 0, {form.width})",
            f"            tl.store(at, {_score(form)})",
        ]
        start = end
    return lines


def _values(form: Form, rows: int) -> list[str]:
    block, levels = block_of(form), block_of(form).bit_length() - 1
    lines = [
        "        first = tl.program_id(1) * SLICE",
        f"        top = tl.full([{rows}], -1e30, tl.float32)",
        f"        total = tl.zeros([{rows}], tl.float32)",
        f"        o = tl.zeros([{rows}, SLICE], tl.float32)",
    ]
    start = 0
    for branch in form.branches:
        count = blocks_of(form, branch)
        lines += [
            f"        for number in range({start}, {start + count}):",
            f"            seen, k = {_read(branch, start)}, first, SLICE)",
            f"            if STEP == {ALL}:",
            f"                x = {_score(form)}",
            "            else:",
            f"                x = tl.load(scores + {_place(form, rows)})",
            f"            top, total, o = weigh(x, k, top, total, o, {rows}, {block}, {levels})",
        ]
        start += count
    return [
        *lines,
        f"        total += tl.exp(tl.load(sink + head, mask=head < {form.heads}, other=0.0).to(tl.float32) - top)",
        "        y = (o / total[:, None]).to(tl.bfloat16)",
        *_turned("        y", "y", form, 1, "first", rows, "SLICE"),
        "        tl.store(out + home + first + tl.arange(0, SLICE)[None, :], y, mask=here)",
    ]
