"""text: the Triton source of a selection, `select`: the k best of each tile of a row.

    x       scores, -inf where one is never picked (NaN, -inf), as lines of WIDE columns that a thread holds
    level   the k-th largest. Keys, int32 that order as scores do, are cut in thirds of [low, high), two counts in one
            sum, until one is left or exactly k scores lie at it or above
    picks   scores above the level, and of those equal to it the first, as many as are missing. Where k are at the level
            or above, ties do not matter and one count a line places them all

Unique pairs (score, lower column first) decide, so results do not depend on tiles, and a row has the same picks in any
batch. However scores cluster nothing is dropped: no buffer holds less than a tile. The search begins between the
largest score and the least of GROUPS >= k maxima of groups, above which k scores lie: some seven steps where they are
spread.
"""

LEAST = -(2**31)  # below the key of every number

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
def counts(x, a, b):
    """How many scores are at two keys or above."""
    both = tl.sum((x >= score_of(a)).to(tl.int32) + (x >= score_of(b)).to(tl.int32) * 65536)
    return both & 65535, both >> 16


@triton.jit
def put(x, at, picked, place, total, columns, next_scores, next_columns, picks, kept, lists, start, width, list_step,
        room, K: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, KEEPS: tl.constexpr,
        SIZE: tl.constexpr):
    """Writes what is picked to its places; what is left of K behind `total` is nothing."""
    row = tl.program_id(0).to(tl.int64)
    column = at
    if not FIRST:
        column = tl.load(columns + start + at, mask=picked, other=0)
    rest = tl.arange(0, GROUPS)
    if LAST:
        behind = (rest >= total) & (rest < room)
        if KEEPS:
            tl.store(kept + row * width + column, tl.full(at.shape, 1, tl.int8), mask=picked)
        if SIZE > 0:
            column = tl.load(lists + row * list_step + column // SIZE, mask=picked, other=0) * SIZE + column % SIZE
        tl.store(picks + row * room + place, column.to(tl.int64), mask=picked)
        tl.store(picks + row * room + rest, tl.full([GROUPS], -1, tl.int64), mask=behind)
    else:
        behind = (rest >= total) & (rest < K)
        home = (row * tl.num_programs(1) + tl.program_id(1)) * K
        tl.store(next_scores + home + place, x, mask=picked)
        tl.store(next_columns + home + place, column, mask=picked)
        tl.store(next_scores + home + rest, tl.full([GROUPS], float("-inf"), tl.float32), mask=behind)
        tl.store(next_columns + home + rest, tl.full([GROUPS], -1, tl.int32), mask=behind)


@triton.jit(do_not_specialize=["width", "list_step", "room"])
def select(scores, columns, next_scores, next_columns, picks, kept, lists, count, width, list_step, room,
           K: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr,
           LAST: tl.constexpr, KEEPS: tl.constexpr, SIZE: tl.constexpr):
    """The K best of tile program_id(1) of row program_id(0), whose columns are `count`: all if it is the FIRST round,
    else what is left of earlier tiles, `columns` of the row, ascending. The LAST round has one tile and writes picks,
    [rows, room] where there are at most so many columns, else room is K.
    KEEPS: marks them in kept [rows, width], too. SIZE > 0: column c stands for lists[row, c // SIZE] * SIZE + c % SIZE.
    """
    LINES: tl.constexpr = TILE // WIDE
    at = tl.program_id(1) * TILE + tl.arange(0, LINES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    start = tl.program_id(0).to(tl.int64) * count
    x = tl.load(scores + start + at, mask=at < count, other=float("-inf"))
    x = tl.where(x > float("-inf"), x, float("-inf"))
    line = tl.max(x, 1)
    high = key_of(tl.max(line, 0)) + 1  # fewer than K scores are above it
    low = tl.full([], {LEAST}, tl.int64)  # K scores are at it or above, or it is the least
    if GROUPS < TILE:
        if LINES >= GROUPS:
            least = tl.min(tl.max(tl.reshape(line, [LINES // GROUPS, GROUPS]), 0), 0)
        else:
            least = tl.min(tl.max(tl.reshape(x, [GROUPS, TILE // GROUPS]), 1), 0)
        low = tl.where(least > float("-inf"), key_of(least), {LEAST})
    exact = False  # whether K are at the level or above
    while high - low > 1:
        third = tl.maximum((high - low) // 3, 1)
        a, b = low + third, tl.maximum(high - third, low + third)
        above_a, above_b = counts(x, a, b)
        high = tl.where(above_b >= K, high, tl.where(above_a >= K, b, a))
        low = tl.where(above_b >= K, b, tl.where(above_a >= K, a, low))
        hit = (above_a == K) | (above_b == K)
        high = tl.where(hit, low + 1, high)
        exact = exact | hit
    level = tl.where(low > {LEAST}, score_of(low), float("-inf"))
    if exact & (level > float("-inf")):
        picked = x >= level
        taken = picked.to(tl.int32)
        each = tl.sum(taken, 1)
        place = tl.cumsum(taken, 1) + (tl.cumsum(each, 0) - each - 1)[:, None]
        put(x, at, picked, place, K, columns, next_scores, next_columns, picks, kept, lists, start, width, list_step,
            room, K, GROUPS, FIRST, LAST, KEEPS, SIZE)
    else:
        above, equal = x > level, (x == level) & (x > float("-inf"))
        both = above.to(tl.int32) * 65536 + equal.to(tl.int32)
        each = tl.sum(both, 1)
        through = tl.cumsum(both, 1) + (tl.cumsum(each, 0) - each)[:, None]
        whole = tl.sum(each, 0)
        missing = K - (whole >> 16)
        picked = above | (equal & ((through & 65535) <= missing))
        place = (through >> 16) + tl.minimum(through & 65535, missing) - 1
        total = (whole >> 16) + tl.minimum(whole & 65535, missing)
        put(x, at, picked, place, total, columns, next_scores, next_columns, picks, kept, lists, start, width,
            list_step, room, K, GROUPS, FIRST, LAST, KEEPS, SIZE)
'''
