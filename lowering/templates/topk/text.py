"""text: the Triton source of a selection, `select`: the k best of each tile of a row.

    key     scores as int32 that order as they do; the least one where a score is never picked
    low     the k-th largest key: halving [low, high) until one key is left, or exactly k keys lie above low
    picks   keys above low, and of those equal to it the first, as many as are missing; one scan places them

Unique pairs (key, lower column first) decide, so results do not depend on tiles, and a row has the same picks in any
batch. However keys cluster nothing is dropped: no buffer holds less than a tile. Halving begins between the largest key
and the least of GROUPS >= k maxima of groups, above which k keys lie: some ten steps where scores are spread.
"""

LEAST = -(2**31)  # the key of what is never picked: below that of every number

TEXT = f'''@triton.jit
def ranked(x):
    """int32 that order as the numbers do, -0 as 0; the least one for -inf and NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x > float("-inf"), tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), {LEAST})


@triton.jit(do_not_specialize=["width", "list_step"])
def select(scores, keys, columns, next_keys, next_columns, picks, kept, lists, count, width, list_step,
           K: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
           KEEPS: tl.constexpr, SIZE: tl.constexpr):
    """The K best of tile program_id(1) of row program_id(0), whose columns are `count`: scores if it is the FIRST
    round, else pairs of what is left of earlier tiles, columns ascending. The LAST round has one tile and writes picks.
    KEEPS: marks them in kept [rows, width], too. SIZE > 0: column c stands for lists[row, c // SIZE] * SIZE + c % SIZE.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there, start = at < count, row * count
    if FIRST:
        key = ranked(tl.load(scores + start + at, mask=there, other=float("-inf")))
    else:
        key = tl.load(keys + start + at, mask=there, other={LEAST})
    high = tl.max(key, 0).to(tl.int64) + 1  # fewer than K keys are this large
    low = tl.full([], {LEAST}, tl.int64)  # K keys are, or it is the least
    if GROUPS < TILE:
        low = tl.min(tl.max(tl.reshape(key, [GROUPS, TILE // GROUPS]), 1), 0).to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        low = tl.where(found >= K, middle, low)
        high = tl.where(found > K, high, tl.where(found == K, middle + 1, middle))
    level = low.to(tl.int32)
    above = (key > level).to(tl.int32)
    equal = ((key == level) & (key > {LEAST})).to(tl.int32)
    through = tl.cumsum(above * 65536 + equal, 0).to(tl.int32)
    all_above = tl.sum(above, 0)
    missing = K - all_above
    taken = tl.minimum(through & 65535, missing)
    picked = (above > 0) | ((equal > 0) & ((through & 65535) <= missing))
    place = (through >> 16) + taken - 1
    total = all_above + tl.minimum(tl.sum(equal, 0), missing)
    column = at
    if not FIRST:
        column = tl.load(columns + start + at, mask=picked, other=0)
    rest = tl.arange(0, GROUPS)
    behind = (rest >= total) & (rest < K)
    if LAST:
        if KEEPS:
            tl.store(kept + row * width + column, tl.full([TILE], 1, tl.int8), mask=picked)
        if SIZE > 0:
            column = tl.load(lists + row * list_step + column // SIZE, mask=picked, other=0) * SIZE + column % SIZE
        tl.store(picks + row * K + place, column.to(tl.int64), mask=picked)
        tl.store(picks + row * K + rest, tl.full([GROUPS], -1, tl.int64), mask=behind)
    else:
        home = (row * tl.num_programs(1) + tl.program_id(1)) * K
        tl.store(next_keys + home + place, key, mask=picked)
        tl.store(next_columns + home + place, column, mask=picked)
        tl.store(next_keys + home + rest, tl.full([GROUPS], {LEAST}, tl.int32), mask=behind)
        tl.store(next_columns + home + rest, tl.full([GROUPS], -1, tl.int32), mask=behind)
'''
