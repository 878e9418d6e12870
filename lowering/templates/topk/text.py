"""text: the Triton source of a selection: the k best of each row.

    level n   of columns in runs of GROUP the largest score, level 0 are the scores: `maxima` makes two levels in a pass
    select    one program a row: the K best of the highest level, then of the runs below these, down to the scores
    level     the K-th largest. Keys, integers that order as scores do, are cut in three in [low, high), two counts in
              one sum, until exactly K scores lie at a cut or above, or one key is left
    picks     scores above the level, and of those equal to it the first, as many as are missing

That is exact, since a run is chosen by its largest score, ties to the lower run, as its scores are by themselves. Say
the K-th best score is s: fewer than K runs have more than s, and they hold all that is above it; of runs whose largest
is s the lower ones follow, as many as there are places left, and each holds one score of s at least. Unique pairs
(score, lower column first) decide, whatever is cut where, and a row has the same picks in any batch. However scores
cluster nothing is dropped: no buffer holds less than can be chosen.

K runs with s or more say that K scores are s or more: each search begins where the one above it ended, between some K
and 2 K of them. Cuts are where the K-th is guessed by the counts at both ends, and every second time in thirds, which
bounds their number. Seven cuts a sum took longer on an H200: 15.2 us for 16,384 scores, where two took 11.5.
"""

LOWEST = -2139095040  # key of the least finite number: what is below is never picked

TEXT = f'''@triton.jit
def key_of(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def score_of(key):
    """The score whose key this is."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def numbers(x):
    """-inf where one is never picked: NaN, -inf."""
    return tl.where(x > float("-inf"), x, float("-inf"))


@triton.jit
def total_of(x):
    """Of lines and columns."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def reached(x, key, SETS: tl.constexpr):
    """1.0 where a score is at the key or above, else 0.0."""
    if SETS:  # one instruction; a comparison and a choice are two, of the pipe that is the narrow one
        return tl.inline_asm_elementwise("set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, score_of(key)], dtype=tl.float32,
                                         is_pure=True, pack=1)
    return (x >= score_of(key)).to(tl.float32)


@triton.jit
def counts(x, a, b, SETS: tl.constexpr):
    """How many scores are at two keys or above; of both the sum of a line is a float without loss."""
    both = tl.sum(tl.sum(reached(x, a, SETS) + reached(x, b, SETS) * 65536.0, 1).to(tl.int32), 0)
    return both & 65535, both >> 16


@triton.jit
def cuts(low, high, at_low, at_high, even, K: tl.constexpr):
    """Two keys between low and high, around where the K-th is if scores between fall evenly; or nearer to low where
    none is known at high, since few scores are large. Every second time in thirds."""
    each = 1.0 / (at_low - at_high).to(tl.float32)
    middle = ((at_low - K).to(tl.float32) + 0.5) * each
    wide = 0.5 * tl.sqrt(middle * (1.0 - middle) * each)
    middle = tl.where(at_high == 0, 0.25 * middle, middle)
    wide = tl.where(at_high == 0, 0.6 * middle, wide)
    middle, wide = tl.where(even, 0.5, middle), tl.where(even, 0.1667, wide)
    gap = (high - low).to(tl.float32)
    a = tl.minimum(tl.maximum(low + (gap * (middle - wide)).to(tl.int64), low + 1), high - 1)
    b = tl.minimum(tl.maximum(low + (gap * (middle + wide)).to(tl.int64), a), high - 1)
    return a, b


@triton.jit
def level_of(x, low, high, K: tl.constexpr, SETS: tl.constexpr):
    """A key in [low, high), and whether all scores at it or above are picked: K, or fewer, which are all. Else more
    than K are, and fewer than K above it. Fewer than K are at `high`; K at `low`, or `low` is the lowest."""
    at_low, at_high = counts(x, low, high, SETS)
    exact = at_low <= K
    even = at_low < 0
    while (high - low > 1) & (exact == 0):
        a, b = cuts(low, high, at_low, at_high, even, K)
        above_a, above_b = counts(x, a, b, SETS)
        high = tl.where(above_b >= K, high, tl.where(above_a >= K, b, a))
        at_high = tl.where(above_b >= K, at_high, tl.where(above_a >= K, above_b, above_a))
        low = tl.where(above_b >= K, b, tl.where(above_a >= K, a, low))
        at_low = tl.where(above_b >= K, above_b, tl.where(above_a >= K, above_a, at_low))
        exact = at_low == K
        even = even == 0
    return low, exact


@triton.jit
def placed(x, low, exact, K: tl.constexpr):
    """Lines of scores -> which are picked, the place of each among these, and how many they are."""
    level = score_of(low)
    picked = x >= level
    if exact == 0:
        equal = (x == level).to(tl.int32)
        each = tl.sum(equal, 1)
        through = tl.cumsum(equal, 1) + (tl.cumsum(each, 0) - each)[:, None]
        missing = K - total_of((x > level).to(tl.int32))
        picked = (x > level) | ((x == level) & (through <= missing))
    taken = picked.to(tl.int32)
    each = tl.sum(taken, 1)
    return picked, tl.cumsum(taken, 1) + (tl.cumsum(each, 0) - each)[:, None] - 1, tl.sum(each, 0)


@triton.jit
def length(count, LEVEL: tl.constexpr, GROUP: tl.constexpr):
    """Of a level of `count` columns."""
    for _ in tl.static_range(LEVEL):
        count = (count + GROUP - 1) // GROUP
    return count


@triton.jit
def level_at(scores, tops, row, rows, count, LEVEL: tl.constexpr, GROUP: tl.constexpr):
    """Where that level of the row begins: above the scores they lie one behind the other in `tops`."""
    if LEVEL == 0:
        at = scores + row * count
    else:
        at = tops + row * length(count, LEVEL, GROUP)
        for below in tl.static_range(1, LEVEL):
            at += rows.to(tl.int64) * length(count, below, GROUP)
    return at


@triton.jit(do_not_specialize=["rows"])
def maxima(scores, tops, rows, count, LEVEL: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr,
           GROUP: tl.constexpr, WAITS: tl.constexpr, LEADS: tl.constexpr):
    """One or two LEVELS above LEVEL of tile program_id(1) of row program_id(0)."""
    if LEADS:  # the next launch may come up while this one runs
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:  # until all that the launch before stored is there
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    at = run[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    many = length(count, LEVEL, GROUP)
    x = tl.load(level_at(scores, tops, row, rows, count, LEVEL, GROUP) + at, mask=at < many, other=float("-inf"))
    best = tl.max(numbers(x), 1)
    many = length(count, LEVEL + 1, GROUP)
    tl.store(level_at(scores, tops, row, rows, count, LEVEL + 1, GROUP) + run, best, mask=run < many)
    if LEVELS > 1:
        best = tl.max(tl.reshape(best, [TILE // GROUP // GROUP, GROUP]), 1)
        run = tl.program_id(1) * (TILE // GROUP // GROUP) + tl.arange(0, TILE // GROUP // GROUP)
        many = length(count, LEVEL + 2, GROUP)
        tl.store(level_at(scores, tops, row, rows, count, LEVEL + 2, GROUP) + run, best, mask=run < many)


@triton.jit(do_not_specialize=["rows", "width", "list_step", "room"])
def select(scores, tops, chosen, picks, kept, lists, rows, count, width, list_step, room, K: tl.constexpr,
           ROOM: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr,
           FOLD: tl.constexpr, KEEPS: tl.constexpr, SIZE: tl.constexpr, SETS: tl.constexpr, WAITS: tl.constexpr):
    """The K best of row program_id(0), of `count` columns: picks [rows, room], room the lesser of both, ascending, then
    -1. TILE: at least as long as level LEVELS, which is made here if there is FOLD. chosen: [rows, LEVELS, ROOM] int32,
    what is chosen of each level; ROOM: K, or the next power of two.
    KEEPS: marks them in kept [rows, width], too. SIZE > 0: column c stands for lists[row, c // SIZE] * SIZE + c % SIZE.
    """
    if WAITS:
        tl.extra.cuda.gdc_wait()
    LINES: tl.constexpr = TILE // WIDE
    row = tl.program_id(0).to(tl.int64)
    rest = tl.arange(0, ROOM)
    at = tl.arange(0, LINES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    if FOLD:
        below = at[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        x = tl.max(numbers(tl.load(scores + row * count + below, mask=below < count, other=float("-inf"))), 2)
    else:
        home = level_at(scores, tops, row, rows, count, LEVELS, GROUP)
        x = numbers(tl.load(home + at, mask=at < length(count, LEVELS, GROUP), other=float("-inf")))
    line = tl.max(x, 1)
    high = key_of(tl.max(line, 0)) + 1
    low = tl.full([], {LOWEST}, tl.int64)
    if ROOM < TILE:  # as many runs as ROOM have this or more
        if LINES >= ROOM:
            least = tl.min(tl.max(tl.reshape(line, [LINES // ROOM, ROOM]), 0), 0)
        else:
            least = tl.min(tl.max(tl.reshape(x, [ROOM, TILE // ROOM]), 1), 0)
        low = tl.maximum(key_of(least), low)
    for down in tl.static_range(LEVELS):
        low, exact = level_of(x, low, high, K, SETS)
        picked, place, total = placed(x, low, exact, K)
        mine = chosen + (row * LEVELS + down) * ROOM
        tl.store(mine + place, at, mask=picked)
        tl.store(mine + rest, tl.full([ROOM], -1, tl.int32), mask=rest >= total)
        tl.debug_barrier()
        run = tl.load(mine + rest)[:, None]
        at = tl.maximum(run, 0) * GROUP + tl.arange(0, GROUP)[None, :]
        home = level_at(scores, tops, row, rows, count, LEVELS - 1 - down, GROUP)
        here = (run >= 0) & (at < length(count, LEVELS - 1 - down, GROUP))
        x = numbers(tl.load(home + at, mask=here, other=float("-inf")))
    low, exact = level_of(x, low, high, K, SETS)
    picked, place, total = placed(x, low, exact, K)
    if KEEPS:
        tl.store(kept + row * width + at, tl.full(at.shape, 1, tl.int8), mask=picked)
    if SIZE > 0:
        at = tl.load(lists + row * list_step + at // SIZE, mask=picked, other=0) * SIZE + at % SIZE
    tl.store(picks + row * room + place, at.to(tl.int64), mask=picked)
    tl.store(picks + row * room + rest, tl.full([ROOM], -1, tl.int64), mask=(rest >= total) & (rest < room))
'''
