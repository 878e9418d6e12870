"""two_shots: the kernels that bring the sum of many rows to all ranks, as text; what reads the sum comes behind.

    scatter    unit of rows and columns: this rank's part, as it lies or as it is computed, to the unit's owner
    gather     the owner: adds the parts of all ranks, rounds, writes the sum to every rank

When a unit may be read or written, protocol.py says.
"""

from __future__ import annotations

from v41.lowering.rowwise.names import TRITON, Names
from v41.lowering.templates.all_reduce.front import SumOf


def shots_of_two(name: str, added: SumOf) -> str:
    """The two kernels in front of the rows of many: `name`_scatter and `name`_gather."""
    ranks, width, kind = added.ranks, added.source.elements, TRITON[added.source.dtype]
    every, names = range(ranks), Names()
    given = ", ".join(f"{name}_ptr" for name in added.sent)
    numbers = "\n".join(f"    {line}" for line in added.numbers(names))
    lines, value = added.tile(names, 0)
    tiles = "\n".join(f"        {line}" for line in lines)
    flags = ", ".join(f"flags_{r}" for r in every)
    inboxes = ", ".join(f"inbox_{r}" for r in every)
    homes = ", ".join(f"reduced_{r}" for r in every)

    def each(text: str) -> str:
        return "\n".join(text.format(r=r) for r in every)

    store = f"tl.store(inbox_{{r}} + place + cols, {value}, mask=live & columns)"
    puts = each("        if owner == {r}:\n            " + store)
    first = "tl.load(inbox + place + cols, mask=there, other=0.0, cache_modifier='.cg').to(tl.float32)"
    adds = "\n".join(
        f"        total = total + {first.replace('place', f'{r} * CAPACITY * {width} + place')}" for r in every[1:]
    )
    stores = each(f"        tl.store(reduced_{{r}} + row * {width} + cols, summed, mask=there)")
    return f'''

@triton.jit(do_not_specialize=["rank", "T"])
def {name}_scatter({given}, {inboxes}, {flags}, epochs, rank, T,
        ROWS: tl.constexpr, SHARES: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr):
    """Unit (block of ROWS rows, share of SPAN columns): this rank's part into the inbox of the block's owner."""
    block = tl.program_id(0)
    unit = block * SHARES + tl.program_id(1)
    epoch = tl.load(epochs + unit) + 1
    owner = block % {ranks}
    lane = tl.arange(0, ROWS)[:, None]
    row = (block * ROWS + lane).to(tl.int64)
    live = row < T
    place = (rank * CAPACITY + block // {ranks} * ROWS + lane).to(tl.int64) * {width}
{numbers}
    for start in range(0, SPAN, COLUMNS):
        across = start + tl.arange(0, COLUMNS)[None, :]
        cols = tl.program_id(1) * SPAN + across
        columns = (across < SPAN) & (cols < {width})
{tiles}
{puts}
    signal({flags}, unit * {ranks} + rank, epoch, owner, owner)
    tl.store(epochs + unit, epoch)


@triton.jit(do_not_specialize=["rank", "T", "limit", "site"])
def {name}_gather(inbox, {homes}, arrived, {flags}, epochs, record, failed, limit, site, rank, T,
        ROWS: tl.constexpr, SHARES: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr):
    """Unit of a block that this rank owns: the sum of all ranks' parts to every rank."""
    block = tl.program_id(0) * {ranks} + rank
    unit = block * SHARES + tl.program_id(1)
    epoch = tl.load(epochs + unit)
    each = tl.arange(0, {1 << (ranks - 1).bit_length()})
    wait(arrived + unit * {ranks} + tl.minimum(each, {ranks - 1}), each < {ranks}, each * 0 + epoch, each,
         patience(failed, limit), record, failed, site)
    lane = tl.arange(0, ROWS)[:, None]
    row = (block * ROWS + lane).to(tl.int64)
    place = (tl.program_id(0) * ROWS + lane).to(tl.int64) * {width}
    for start in range(0, SPAN, COLUMNS):
        across = start + tl.arange(0, COLUMNS)[None, :]
        cols = tl.program_id(1) * SPAN + across
        there = (row < T) & (across < SPAN) & (cols < {width})
        total = {first}
{adds}
        summed = total.to({kind})
{stores}
    signal({flags}, unit, epoch, 0, {ranks - 1})
'''
