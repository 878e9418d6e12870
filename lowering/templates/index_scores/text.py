"""text: the Triton source of the scores of an indexer, specialised to its Form; topk/text.py picks among them.

    record    units of two bytes, then scales. Nibble n of unit j is channel 4 * j + n, so a tile of units holds, nibble
              by nibble, tiles of keys for products over a quarter of the channels each: nothing is shuffled
    scores    x = k.q of a tile of entries and all heads, max(x, 0) * w, added up by halves of heads    [entries] a row
              -> out [T, E], -inf where hidden; the best of each block -> best [T, E / block], inf for the newest

A program scores some tiles of entries for one row, or for a few: rows whose keys lie in one slot share what was read
and decoded, others take turns. Tiles that no row of it sees are not read. A score is the same operations on the same
numbers in any batch. One text a number of rows: `scores_1`, and `scores_4` where rows may share.
"""

from __future__ import annotations

from v41.lowering.templates.formats import DECODERS, HEAD
from v41.lowering.templates.index_scores.decode import function_text, scale_text
from v41.lowering.templates.index_scores.form import FAR, Form
from v41.lowering.templates.topk import TEXT

SHARED = 4  # rows of a program, where requests have several
MOST_TURNS = 16  # tiles of a program
ANY = [
    "T",
    "R",
    "Q",
    "SLOTS",
    "CAPACITY",
    "places_step",
    "given_step",
    "reach",
    "turns",
]  # numbers that cost no compilation

HELPERS = '''@triton.jit
def folded(p, ROWS: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, COUNT] -> [ROWS]: one half and the other, in whatever threads they lie."""
    for level in tl.static_range(LEVELS):
        p = tl.sum(tl.reshape(p, [ROWS, 2, COUNT >> (level + 1)]), 1)
    return tl.reshape(p, [ROWS])


@triton.jit
def slot_of(requests, slots, row, rows, count, size):
    """Of the row's request; -1 behind the last row. Indices count from the end where they are negative."""
    request = tl.load(requests + row, mask=row < rows, other=0)
    slot = tl.load(slots + tl.where(request < 0, request + count, request), mask=row < rows, other=-1)
    return tl.where((slot < 0) & (row < rows), slot + size, slot)


@triton.jit
def scored_row(requests, columns, places, row, rows, count, longest, step):
    """The row that stands in this row's place: itself, but for pads."""
    request = tl.load(requests + row, mask=row < rows, other=0)
    column = tl.load(columns + row, mask=row < rows, other=0)
    request = tl.where(request < 0, request + count, request)
    column = tl.where(column < 0, column + longest, column)
    found = tl.load(places + request * step + column, mask=row < rows, other=0)
    return tl.where(found < 0, found + rows, found)
'''


def text(form: Form) -> str:
    """The file, without its first lines."""
    kernels = [scores_text(form, rows) for rows in ((1,) if form.listed else (1, SHARED))]
    helpers = [DECODERS["ue8m0"], DECODERS["e2m1"], function_text(form), HELPERS, seen_text(form)]
    parts = [HEAD, *helpers, *kernels, TEXT]
    return "\n\n".join(parts)


def seen_text(form: Form) -> str:
    return f'''@triton.jit
def seen_by(positions, row, rows):
    """How many entries the row sees, as far as there may be."""
    after = tl.load(positions + row, mask=row < rows, other=-1) + 1
    return tl.where(after > 0, tl.minimum(after // {form.ratio}, {FAR}), 0).to(tl.int32)
'''


def scores_text(form: Form, rows: int) -> str:
    """`scores_{rows}`: given is what restricts entries, or nothing. E entries (columns) a row."""
    slots = "slots, {row}, T, R, SLOTS)"
    behind = ["if lead > 0:", f"    fresh = fresh & (slot != slot_of(requests, {slots.format(row='row - 1')})"]
    body = [
        f"row = tl.program_id(0).to(tl.int64) * {rows} + lead",
        f"slot = slot_of(requests, {slots.format(row='row')}",
        "fresh = slot >= 0",
        *(behind if rows > 1 else []),
        "if fresh:",
        *("    " + line for line in _pass(form, rows)),
    ]
    lines = [
        f"@triton.jit(do_not_specialize={ANY})",
        f"def scores_{rows}(queries, weights, cache, scales, positions, requests, columns, rows, slots, numbers,",
        f"             given, out, best, E, {', '.join(ANY)}, BLOCK: tl.constexpr, PACKED: tl.constexpr):",
        "    start = tl.program_id(1) * (turns * BLOCK)",
        f"    head = tl.arange(0, {form.padded_heads})",
        f"    unit = tl.arange(0, {form.units})",
        f"    for lead in range(0, {rows}):",
        *(" " * 8 + line for line in body),
    ]
    return "\n".join(lines) + "\n"


def _pass(form: Form, rows: int) -> list[str]:
    """Scores of all tiles, for the rows of this program from `row` on whose keys lie in `slot`."""
    record = 17 * form.scales // form.unit
    lines = [
        "most = tl.full([], 0, tl.int32)",
        f"home = cache + slot * CAPACITY * {record}",
        "home_of_scales = scales + slot * CAPACITY * 17",
    ]
    for r in range(rows):
        lines += [
            f"row{r} = tl.program_id(0).to(tl.int64) * {rows} + {r}",
            f"own{r} = (row{r} >= row) & (slot_of(requests, slots, row{r}, T, R, SLOTS) == slot)",
            f"seen{r} = tl.where(own{r}, seen_by(positions, row{r}, T), 0)",
            f"most = tl.maximum(most, seen{r})",
            f"read{r} = scored_row(requests, columns, rows, row{r}, T, R, Q, places_step)",
            f"w{r} = tl.load(weights + read{r} * {form.heads} + head, mask=head < {form.heads}, other=0.0)"
            f".to(tl.float32) * {form.scale!r}",
            f"at{r} = queries + read{r} * {form.heads * form.width} + head[None, :] * {form.width} "
            f"+ unit[:, None] * {2 * form.unit}",
            *(f"q{r}_{n} = tl.load(at{r} + {n}, mask=head[None, :] < {form.heads}, other=0.0)"
              for n in range(2 * form.unit)),
        ]  # fmt: skip
    if form.keeps:
        lines += [f"newest{r} = tl.where(seen{r} > 0, (seen{r} - 1) // {form.block}, -1)" for r in range(rows)]
    lines += [
        *_busy(form),
        "for turn in range(0, busy):",
        *("    " + line for line in _tile(form, rows)),
        "for turn in range(busy, turns):",
        *("    " + line for line in _idle(form, rows)),
    ]
    return lines


def _busy(form: Form) -> list[str]:
    """How many tiles there are up to the last that holds what a row sees."""
    size = form.block if form.listed else form.spread
    source, nothing, seen = ("numbers", FAR, f"* {size} < most")
    if form.listed:
        source, nothing, seen = ("given + row * given_step", -1, ">= 0")
    return [
        f"some = start // {size} + tl.arange(0, {MOST_TURNS} * BLOCK // {size})",
        f"among = (some < E // {size}) & (some * {size} < start + turns * BLOCK)",
        f"numbered = tl.load({source} + some, mask=among, other={nothing})",
        f"last = tl.max(tl.where(numbered {seen}, some + 1, 0), 0) * {size}",
        "busy = tl.maximum(last - start + BLOCK - 1, 0) // BLOCK",
    ]


def _place() -> list[str]:
    return ["at = start + turn * BLOCK + tl.arange(0, BLOCK)", "inside = at < E"]


def _tile(form: Form, rows: int) -> list[str]:
    """One tile: its keys, then each row's scores of them."""
    lines = _place()
    if form.listed:
        lines += [
            f"listed = tl.load(given + row * given_step + at // {form.block}, mask=inside, other=-1)",
            "open = listed >= 0",
            f"column = tl.where(open, listed, 0) * {form.block} + at % {form.block}",
        ]
    else:
        lines += ["open = inside", "column = at"]
    keys = ", ".join(f"k{n}" for n in range(2 * form.unit))
    lines += [
        f"number = tl.load(numbers + column // {form.spread}, mask=open, other=0)",
        f"entry = tl.minimum(number, {FAR}).to(tl.int32) * {form.spread} + (column % {form.spread}).to(tl.int32)",
        "open = open & (entry < most)",
        "place = tl.minimum(entry, reach)",
        f"held = tl.load(home + (place[:, None] * {17 * form.scales // form.unit} + unit[None, :]))",
        "marks = tl.load(home_of_scales + (place * 17 + 16)).to(tl.int32)",
        f"{keys} = keys_of(held, {scale_text(form)}, PACKED)",
    ]
    for r in range(rows):
        lines += _scored(form, r)
    return lines


def _scored(form: Form, r: int) -> list[str]:
    heads = form.padded_heads
    last = f"x = tl.where(head[None, :] < {form.heads}, x, 0.0)"  # inf times a padded 0 is NaN
    mask = f"tl.load(given + row{r} * given_step + at, mask=inside & own{r}, other=0).to(tl.int1)"
    return [
        f"x = tl.dot(k0, q{r}_0)",
        *(f"x = tl.dot(k{n}, q{r}_{n}, x)" for n in range(1, 2 * form.unit)),
        f"x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * w{r}[None, :]",
        *([last] if heads != form.heads else []),
        f"total = folded(x, BLOCK, {heads}, {heads.bit_length() - 1})",
        f"shown = open & (entry < seen{r})",
        *([f"shown = shown & {mask}"] if form.given == "candidates" else []),
        'total = tl.where(shown, total, float("-inf"))',
        f"tl.store(out + row{r} * E + at, total, mask=inside & own{r})",
        *(_best(form, r) if form.keeps else []),
    ]


def _best(form: Form, r: int) -> list[str]:
    """The best of each block; NaN is never kept, nor is a block that holds one."""
    return [
        f"grouped = tl.reshape(total, [BLOCK // {form.block}, {form.block}])",
        'top = tl.max(tl.where(grouped == grouped, grouped, float("-inf")), 1)',
        'top = tl.where(tl.max((grouped != grouped).to(tl.int32), 1) > 0, float("-inf"), top)',
        *_kept(form, r),
    ]


def _kept(form: Form, r: int) -> list[str]:
    return [
        f"number = (start + turn * BLOCK) // {form.block} + tl.arange(0, BLOCK // {form.block})",
        f'top = tl.where(number == newest{r}, float("inf"), top)',
        f"tl.store(best + row{r} * (E // {form.block}) + number, top, mask=(number < E // {form.block}) & own{r})",
    ]


def _idle(form: Form, rows: int) -> list[str]:
    """A tile of which no row sees anything."""
    lines = _place()
    for r in range(rows):
        lines.append(
            f'tl.store(out + row{r} * E + at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & own{r})'
        )
        if form.keeps:
            lines += [f'top = tl.full([BLOCK // {form.block}], float("-inf"), tl.float32)', *_kept(form, r)]
    return lines
