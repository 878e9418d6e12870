"""front: a product with a weight matrix in front of what is done with whole rows, in one launch or two.

    program (tile, part)       TILE rows, COLUMNS columns of the result, GROUP runs of its terms
      for each run             terms in blocks, each block on tensor cores from zero; blocks added in order
                               sums of the run to `partials`, or added to the run before (all runs: KEPT 1)
      last to arrive           the rows of the tile, ROWS at a time: sums of runs in order, then the rest of the body
                               (or in a second launch: STEP)

So a sum has the same bits however rows, columns and runs are spread. Tensor cores cut what they add, which a block is
too short to show. Several runs are one loop to Triton (flatten), or each would wait for its first blocks anew.
"""

from __future__ import annotations

from v41.lowering.rowwise.dots import dot_lines
from v41.lowering.rowwise.expr import Expr
from v41.lowering.rowwise.held.emit import Lines, rows_lines
from v41.lowering.rowwise.held.index import Along
from v41.lowering.rowwise.held.read import Kept
from v41.lowering.rowwise.held.spaces import Space
from v41.lowering.rowwise.names import Names
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER


def front_lines(lines: Lines, kept: Kept, names: Names, order: list[Expr]) -> None:
    """The body of a kernel with a front, said to `lines`."""
    front = kept.front
    assert front is not None
    _, run = front.runs
    lines.say("tile = tl.program_id(0)", f"if STEP != {LATER}:")
    lines.indent += 1
    lines.say("if PDL:  # the second launch may come up while this one runs",
              "    tl.extra.cuda.gdc_launch_dependents()",
              f"across: tl.constexpr = ({front.columns} + COLUMNS - 1) // COLUMNS",
              "begin = (tl.program_id(1) % across) * COLUMNS",
              "part = tl.program_id(1) // across",
              "total = tl.zeros([COLUMNS, TILE], tl.float32)",
              "for outer in tl.range(GROUP, flatten=GROUP > 1):")  # fmt: skip
    lines.indent += 1
    lines.say("sums = tl.zeros([COLUMNS, TILE], tl.float32)",
              f"for inner in tl.range({run}, num_stages=STAGES):")  # fmt: skip
    lines.indent += 1
    block = f"((part * GROUP + outer) * {run} + inner) * {front.block}"
    lines.say(f"depth = ({block} + tl.arange(0, {front.block}))[None, :]")
    k, n = Along(front.depth, 0), Along(front.columns, 1)
    left = Lines(kept, names, Space({k: 1}, 2), "TILE")
    right = Lines(kept, names, Space({k: 1, n: 0}, 2, row=None))
    for side in (left, right):
        side.lines, side.indent = lines.lines, lines.indent
    lines.say("row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]", "live = row < T")
    left.compute([front.left])
    lines.say(f"column = tl.minimum(begin + tl.arange(0, COLUMNS)[:, None], {front.columns - 1})")
    right.compute([front.right])
    weights, rows = _name(right, front.right), f"tl.broadcast_to({_name(left, front.left)}, [TILE, {front.block}])"
    if front.right.lanes != {k, n}:
        lines.say(f"factors = tl.broadcast_to({weights}, [COLUMNS, {front.block}])")
        weights = "factors"
    lines.say("block = tl.zeros([COLUMNS, TILE], tl.float32)")
    lines.say(*dot_lines("block", weights, front.right.dtype, rows, front.left.dtype))
    lines.say("sums = sums + block")
    lines.indent -= 1
    place = f"partials + (tile * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :] * {front.stride}"
    columns = "(begin + tl.arange(0, COLUMNS))[:, None]"
    lines.say("total = total + sums",
              "if KEPT > 1:",
              f"    tl.store({place} + {columns} + (part * GROUP + outer) * step, sums)")  # fmt: skip
    lines.indent -= 1
    lines.say("if KEPT == 1:", f"    tl.store({place} + {columns}, total)")
    lines.indent -= 1
    lines.say("last = True", f"if STEP == {ALL}:",
              "    tl.debug_barrier()  # what other threads stored is read below", "    if PARTS > 1:",
              '        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")',
              "        last = arrived == PARTS - 1",
              f"if STEP != {FIRST}:")  # fmt: skip
    lines.indent += 1
    lines.say("if PDL:  # until all that the first launch stored is there", "    tl.extra.cuda.gdc_wait()", "if last:")
    lines.indent += 1
    lines.say(f"if (STEP == {ALL}) & (PARTS > 1):", "    tl.store(counters + tile, 0)",
              f"inside: tl.constexpr = TILE // ROWS if STEP == {ALL} else 1",
              "for sub in range(tl.minimum(inside, tl.cdiv(T - tile * inside * ROWS, ROWS))):")  # fmt: skip
    lines.indent += 1
    lines.say("first = (tile * inside + sub) * ROWS")
    rows_lines(lines, kept, order)
    lines.indent -= 3


def _name(side: Lines, x: Expr) -> str:
    """`x` as a tile, if only of one element."""
    return side.constant(x, x.dtype) if x.op == "const" else side.names[x]
