"""phases: which part of the kernel computes what. A phase is a pass over the wide axis; what it totals is known to
the next.

    sum of squares -> rsqrt -> scaled row     phase 0 reads x and totals x * x; between, one rsqrt a row;
                                              phase 1 writes x * rsqrt

A tile needed again in a later phase is either computed again from what it was read from, or written down and read
back: the cheaper in bytes. It is written as it was before a cast that only widened it, into an output that holds it
anyway, or into an output of the same shape that is not yet written, else into scratch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from v41.lowering.rowwise.axes import WIDE
from v41.lowering.rowwise.expr import SUMS, Expr, reachable, widens
from v41.lowering.rowwise.read import Program


@dataclass(frozen=True)
class Place:
    """Where a tile lies in memory: in output number `output` (None: in scratch slot `slot`), `offset` elements into
    the row."""

    output: int | None
    slot: int
    stride: int
    offset: int


@dataclass
class Phase:
    """`numbers`: what is computed a row before the pass. `tiles`: what the pass computes, in order. `sums` are its
    totals."""

    numbers: list[Expr] = field(default_factory=list)
    tiles: list[Expr] = field(default_factory=list)
    sums: list[Expr] = field(default_factory=list)
    stores: list[tuple[Expr, Place]] = field(default_factory=list)
    reloads: dict[Expr, Place] = field(default_factory=dict)
    number_stores: list[tuple[Expr, Place]] = field(default_factory=list)


@dataclass
class Phases:
    program: Program
    each: list[Phase]
    depth: dict[Expr, int]
    scratch: list[Expr] = field(default_factory=list)  # one tile a slot, a whole row of each is kept


def assign_phases(program: Program) -> Phases:
    """The phases of `program`, with spills chosen."""
    roots = [item for _, value in program.outputs for item in value.items()]
    order = reachable(roots, program.builder.order)
    depth: dict[Expr, int] = {}
    for expr in order:
        depth[expr] = max((depth[arg] + (arg.op in SUMS) for arg in expr.args), default=0)
    count = 1 + max((depth[expr] for expr in order), default=0)
    phases = Phases(program, [Phase() for _ in range(count)], depth)
    _place_outputs(phases)
    for expr in order:
        if expr.op in SUMS:
            phases.each[depth[expr]].sums.append(expr)
        elif not expr.wide and expr.op != "const":
            phases.each[depth[expr]].numbers.append(expr)
    for index, phase in reversed(list(enumerate(phases.each))):  # later phases decide what earlier ones must write
        roots_here = [*(arg for total in phase.sums for arg in total.args), *(tile for tile, _ in phase.stores)]
        _collect(phases, index, roots_here, order)
    return phases


def _place_outputs(phases: Phases) -> None:
    width = phases.program.axes.width
    for number, (tensor, value) in enumerate(phases.program.outputs):
        wide = any(WIDE in factors for factors in value.dims)
        for i, item in enumerate(value.items()):
            place = Place(number, 0, tensor.stride, i * width if wide else i)
            phase = phases.each[phases.depth[item] + (item.op in SUMS)]
            (phase.stores if wide else phase.number_stores).append((item, place))


def _collect(phases: Phases, index: int, roots: Iterable[Expr], order: list[Expr]) -> None:
    """Fills in the tiles of phase `index`, and which of them it reads back."""
    phase, depth = phases.each[index], phases.depth
    need: set[Expr] = set()
    stack = [root for root in roots if root.wide]
    while stack:
        expr = stack.pop()
        if expr in need or expr in phase.reloads:
            continue
        once = expr.op == "load" and expr.data[0] == phases.program.once
        if depth[expr] < index and (expr.op != "load" or once) and _narrowest(expr) is expr:
            place = _spill(phases, index, expr)
            if place is not None:
                phase.reloads[expr] = place
                continue
        need.add(expr)
        stack.extend(arg for arg in expr.args if arg.wide)
    phase.tiles = [expr for expr in order if expr in need or expr in phase.reloads]


def _narrowest(expr: Expr) -> Expr:
    return expr.args[0] if expr.op == "cast" and widens(expr.args[0].dtype, expr.dtype) else expr


def _spill(phases: Phases, index: int, expr: Expr) -> Place | None:
    """Where `expr` is read back from in phase `index`, or None where computing it again moves fewer bytes."""
    earlier = phases.each[phases.depth[expr]]
    kept = next((place for tile, place in earlier.stores if tile is expr), None)
    loads = [load for load in reachable([expr], phases.program.builder.order) if load.op == "load"]
    again = sum(load.dtype.itemsize for load in loads if load.wide and load.row)
    once = any(load.data[0] == phases.program.once for load in loads)
    if not expr.row or (expr.dtype.itemsize * (1 if kept else 2) >= again and not once):
        return None
    if kept is None:
        kept = _free_output(phases, index, expr)
        if kept is None:
            kept = Place(None, len(phases.scratch), phases.program.axes.width, 0)
            phases.scratch.append(expr)
        earlier.stores.append((expr, kept))
    return kept


def _free_output(phases: Phases, index: int, expr: Expr) -> Place | None:
    """An output tile of the same dtype that phase `index`, or a later one, writes for good and nothing uses before."""
    taken = {place for phase in phases.each[:index] for _, place in phase.stores}
    for tile, place in phases.each[-1].stores if index == len(phases.each) - 1 else []:
        assert place.output is not None
        if place not in taken and phases.program.outputs[place.output][0].dtype == expr.dtype and tile is not expr:
            return place
    return None
