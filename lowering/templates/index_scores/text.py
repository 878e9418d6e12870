"""text: the Triton source of the scores of an indexer, specialised to its Form; topk/text.py picks among them.

    record    decoded to a tile of keys (words.py)
    scores    x = k.q of a tile of entries and all heads, then the sum of max(x, 0) * w over heads    [entries] a row
              -> out [T, E], -inf where hidden; the best of each block -> best [T, E / block], inf for the newest

A program scores some tiles of entries for one row, or for a few: rows whose keys lie in one slot share what was read
and decoded, others take turns. What is hidden is read all the same, from within the slot, and left out of the result:
masks cost more than they save; but tiles that no row sees are not read. A score is the same operations on the same
numbers in any batch. One text a number of rows: `scores_1`, and `scores_4` where rows may share.
"""

from __future__ import annotations

from v41.lowering.templates.formats import HEAD, indented
from v41.lowering.templates.index_scores import words
from v41.lowering.templates.index_scores.form import FAR, Form
from v41.lowering.templates.topk import TEXT

SHARED = 4  # rows of a program, where requests have several
MOST_TURNS = 8  # tiles of a program
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

TOGETHER = 8  # heads whose sums a thread of a product's result adds up in registers, one after the other

HELPERS = '''@triton.jit
def halves(x, N: tl.constexpr, COUNT: tl.constexpr):
    """[N, COUNT] -> its left and its right half"""
    return tl.split(tl.permute(tl.reshape(x, [N, 2, COUNT // 2]), (0, 2, 1)))


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


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
    helpers = [words.TEXT, HELPERS, summed_text(form.padded_heads), seen_text(form)]
    parts = [HEAD, *helpers, *kernels, TEXT]
    return "\n\n".join(parts)


def summed_text(heads: int) -> str:
    """`summed`: heads TOGETHER apart one after the other, then neighbours, then halves of what is left."""
    lines, xs, ws = list[str](), ["x"], ["w"]
    while heads // len(xs) > TOGETHER:
        count = heads // len(xs)
        for names, rows in ((xs, "N"), (ws, "1")):
            lines += [f"{name}0, {name}1 = halves({name}, {rows}, {count})" for name in names]
        xs, ws = ([name + half for name in names for half in "01"] for names in (xs, ws))
    lines.append(f"p = relu({xs[0]}) * {ws[0]}")
    for x, w in zip(xs[1:], ws[1:], strict=True):
        lines.append(f"p = tl.fma(relu({x}), tl.broadcast_to({w}, [N, {TOGETHER}]), p)")
    lines += [
        f"p = tl.sum(tl.reshape(p, [N, {TOGETHER // 2}, 2]), 2)",
        f"p = tl.sum(tl.reshape(p, [N, 2, {TOGETHER // 4}]), 1)",
        f"p = tl.sum(tl.reshape(p, [N, {TOGETHER // 4}]), 1)",
    ]
    head = '    """Results of all heads [N, heads], weights [1, heads] -> [N]"""'
    body = "\n".join(indented([*lines, "return tl.reshape(p, [N])"]))
    return f"@triton.jit\ndef summed(x, w, N: tl.constexpr):\n{head}\n{body}\n"


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
        *indented(_pass(form, rows)),
    ]
    lines = [
        f"@triton.jit(do_not_specialize={ANY})",
        f"def scores_{rows}(queries, weights, cache, positions, requests, columns, rows, slots, numbers, given,",
        f"             out, best, E, {', '.join(ANY)}, BLOCK: tl.constexpr, PACKED: tl.constexpr,",
        "             LEADS: tl.constexpr):",
        "    if LEADS:  # the selection may come up while this runs",
        "        tl.extra.cuda.gdc_launch_dependents()",
        "    start = tl.program_id(1) * (turns * BLOCK)",
        f"    head = tl.arange(0, {form.padded_heads})",
        f"    for lead in range(0, {rows}):",
        *indented(body, 2),
    ]
    return "\n".join(lines) + "\n"


def _pass(form: Form, rows: int) -> list[str]:
    """Scores of all tiles, for the rows of this program from `row` on whose keys lie in `slot`."""
    lines = [
        "most = tl.full([], 0, tl.int32)",
        f"home = cache + slot * CAPACITY * {words.UNITS}",
    ]
    masked = f", mask=head[:, None] < {form.heads}, other=0.0" if form.padded_heads != form.heads else ""
    for r in range(rows):
        lines += [
            f"row{r} = tl.program_id(0).to(tl.int64) * {rows} + {r}",
            f"own{r} = (row{r} >= row) & (slot_of(requests, slots, row{r}, T, R, SLOTS) == slot)",
            f"seen{r} = tl.where(own{r}, seen_by(positions, row{r}, T), 0)",
            f"most = tl.maximum(most, seen{r})",
            f"read{r} = scored_row(requests, columns, rows, row{r}, T, R, Q, places_step)",
            f"w{r} = tl.load(weights + read{r} * {form.heads} + head, mask=head < {form.heads}, other=0.0)"
            f".to(tl.float32) * {form.scale!r}",
            f"at{r} = queries + read{r} * {form.heads * form.width} + head[:, None] * {form.width}",
            f"q{r} = tl.load(at{r} + tl.arange(0, {form.width})[None, :]{masked})",
            f"q{r} = ordered(q{r}, {form.padded_heads}, {form.groups})",
        ]
    if form.keeps:
        lines += [f"newest{r} = tl.where(seen{r} > 0, (seen{r} - 1) // {form.block}, -1)" for r in range(rows)]
    lines += [
        "busy = turns",
        "if start + turns * BLOCK > most:",
        *indented(_busy(form)),
        "for turn in tl.range(0, busy, num_stages=1):",  # programs of a core hide each other's reads
        *indented(_tile(form, rows)),
        "for turn in range(busy, turns):",
        *indented(_idle(form, rows)),
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
    lines = [*_place(), "open = inside", "column = tl.minimum(at, E - 1)"]
    if form.listed:
        lines += [
            f"listed = tl.load(given + row * given_step + {_over('column', form.block)}).to(tl.int32)",
            "open = inside & (listed >= 0)",
            f"column = tl.maximum(listed, 0) * {form.block} + (column & {form.block - 1})",
        ]
    lines += [
        f"number = tl.load(numbers + {_over('column', form.spread)})",
        f"entry = tl.minimum(number, {FAR}).to(tl.int32) * {form.spread} + (column & {form.spread - 1})",
        f"held, marks = words_at(home, tl.minimum(entry, reach), BLOCK, {form.groups}, PACKED)",
        f"k = keys_of(held, marks, BLOCK, {form.groups}, PACKED)",
    ]
    for r in range(rows):
        lines += _scored(form, r)
    return lines


def _over(number: str, divisor: int) -> str:
    """`number`, which is not negative, over a power of two."""
    return f"({number} >> {divisor.bit_length() - 1})"


def _scored(form: Form, r: int) -> list[str]:
    heads = form.padded_heads
    last = f"x = tl.where(head[None, :] < {form.heads}, x, 0.0)"  # inf times a padded 0 is NaN
    mask = f"tl.load(given + row{r} * given_step + at, mask=inside & own{r}, other=0).to(tl.int1)"
    return [
        f"x = tl.dot(k, q{r}.trans())",
        *([last] if heads != form.heads else []),
        f"total = summed(x, w{r}[None, :], BLOCK)",
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
