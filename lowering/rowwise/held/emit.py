"""emit: what is kept of a body becomes the text of one Triton kernel.

    program tile               ROWS whole rows
      lanes                    the axes of its tiles
      one line an expression   loads, arithmetic, folds; each result stored as soon as it is known

All batches run the same code, with the same ROWS and warps, so a row has the same bits in each. With a product in front
(front.py) the same lines read its sums, in code that varies with the batch: sums are folded in pairs there, in an order
that hangs on no layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from v41.lowering.rowwise.elementwise import FP8, TEXT
from v41.lowering.rowwise.expr import Expr, reachable
from v41.lowering.rowwise.held.index import Along, Digit, Index, Lane, Taken
from v41.lowering.rowwise.held.prelude import HELPERS
from v41.lowering.rowwise.held.read import Kept, Store
from v41.lowering.rowwise.held.spaces import Space, assign, in_tiles
from v41.lowering.rowwise.names import TRITON, Names
from v41.lowering.rowwise.prelude import PRELUDE

FOLDS = {"add": 0, "maximum": 1, "minimum": 2}
BIG = 1 << 30  # above every place of a row
FAR = 1 << 31  # from where on an index is no int32, as all that is computed with lanes is


class Lines:
    """Text, and the names of what it has computed, in one Space."""

    def __init__(self, kept: Kept, names: Names, space: Space, rows: str = "ROWS") -> None:
        self.kept, self.names, self.space, self.rows = kept, names, space, rows
        self.lines: list[str] = []
        self.indent = 1
        self.done: set[Expr] = set()
        self.order = {expr: i for i, expr in enumerate(kept.builder.order)}

    def say(self, *lines: str) -> None:
        self.lines += ["    " * self.indent + line for line in lines]

    def lanes(self, lanes: Iterable[Lane]) -> None:
        """Declares `lanes`, and which of their elements are there."""
        for lane in sorted(lanes):
            self.say(f"{lane.name} = tl.arange(0, {lane.padded}){self.space.across(self.space.axis[lane])}")
            if lane.padded != lane.size:
                self.say(f"{lane.name}_there = {lane.name} < {lane.size}")

    # ---- indices and masks

    def index(self, index: Index) -> str:
        far = max(index.highest, -index.lowest) >= FAR
        terms = list[str]()
        for factor, atom in index.terms:
            text = self._atom(atom)
            if far and not is_long(atom) and abs(factor) * atom.size >= FAR // len(index.terms):
                text = f"{text}.to(tl.int64)"
            terms.append(self._times(text, factor))
        return " + ".join(terms + [str(index.const)] * (index.const != 0 or not terms)).replace("+ -", "- ")

    def _atom(self, atom: Any) -> str:
        if isinstance(atom, Lane):
            return atom.name
        if isinstance(atom, Digit):
            text = self.index(atom.inner)
            text = f"({text}) // {atom.by}" if atom.by != 1 else text
            return f"tl.minimum(tl.maximum({text}, 0), {atom.limit - 1})" if atom.limit else f"({text})"
        return self.names[atom.expr]

    def _times(self, text: str, factor: int) -> str:
        return text if factor == 1 else f"{text} * {factor}" if factor >= 0 else f"{text} * ({factor})"

    def mask(self, row: bool, lanes: Iterable[Lane]) -> str:
        """What of a tile is there; nothing if all is."""
        partly = sorted(lane for lane in lanes if type(lane) is Lane and lane.padded != lane.size)
        parts = ["live"] * row + [f"{lane.name}_there" for lane in partly]
        return " & ".join(parts)

    # ---- expressions

    def compute(self, roots: Iterable[Expr]) -> None:
        """Lines for all that `roots` need and that is not there yet."""
        for expr in sorted(reachable(roots, self.kept.builder.order), key=self.order.__getitem__):
            if expr.op != "const" and expr not in self.done:
                self.done.add(expr)
                self._one(expr)

    def _one(self, expr: Expr) -> None:
        if expr.op == "rank":
            self._rank(expr)
        elif expr.op == "ranked":
            self.names.alias(expr, f"{self.names[expr.args[0]]}_{expr.data[0]}")
        else:
            self.say(f"{self.names[expr]} = {self._text(expr)}")

    def _text(self, expr: Expr) -> str:
        names = [self.names[arg] for arg in expr.args]
        if names and all(arg.op == "const" for arg in expr.args) and expr.op != "cast":
            names[0] = self.constant(expr.args[0], expr.args[0].dtype)  # else Python computes it, by its own rules
        for i, arg in enumerate(expr.args):  # nor may Triton take a type of its own, where no operand says which
            if arg.op == "const" and (arg.dtype == torch.bool or (is_choice(expr) and i == 1)):
                names[i] = self.constant(arg, arg.dtype)
        match expr.op:
            case "fetch":
                return self._fetch(expr)
            case "summed":
                stride, offset = expr.data
                place = f"partials + row * {stride} + {self.index(offset)}"  # type: ignore[arg-type]
                return f"add_up({place}, live{self._and_there(expr.lanes)}, KEPT, step)"
            case "index":
                return f"({self.index(expr.data[0])}).to({TRITON[expr.dtype]})"  # type: ignore[arg-type]
            case "below":
                bound, index = expr.data
                return f"({self.index(index)}) < {bound}"  # type: ignore[arg-type]
            case "fold":
                return self._fold(expr)
            case "bits":
                return f"{names[0]}.to({TRITON[expr.dtype]}, bitcast=True)"
            case "cast":
                if expr.args[0].op == "const":
                    return self.constant(expr.args[0], expr.dtype)
                return f"{names[0]}.to({TRITON[expr.dtype]})"
            case "ordered" | "unordered":
                return f"{expr.op}({names[0]})"
        return TEXT[expr.op].format(**dict(zip("abc", names, strict=False)))

    def constant(self, expr: Expr, dtype: torch.dtype) -> str:
        return f"tl.full([{', '.join(['1'] * self.space.rank)}], {self.names[expr]}, {TRITON[dtype]})"

    def _and_there(self, lanes: Iterable[Lane]) -> str:
        mask = self.mask(False, lanes)
        return f" & {mask}" if mask else ""

    def _fetch(self, expr: Expr) -> str:
        source, row, offset = expr.data
        assert isinstance(source, int) and isinstance(offset, Index)
        tensor = self.kept.inputs[source]
        assert tensor is not None
        terms = [f"{tensor.name}_ptr"] + [f"row * {row}"] * bool(row) + [self.index(offset)]
        mask = self.mask(bool(row), expr.lanes)
        other = "0.0" if expr.dtype in FP8 else "0"
        return f"tl.load({' + '.join(terms)}{f', mask={mask}, other={other}' if mask else ''})"

    def _fold(self, expr: Expr) -> str:
        (x,), (op, over) = expr.args, expr.data
        text, given = self.names[x], self.mask(False, over)  # type: ignore[arg-type]
        floating = expr.dtype.is_floating_point
        if op != "add" and floating:
            text = f"{'ordered' if op == 'maximum' else 'ordered_down'}({text})"
        if given:
            text = f"tl.where({given}, {text}, {_neutral(str(op), expr, floating)})"
        sizes = self.space.shape(x.lanes, self.rows if x.row else "1")
        for lane in sorted(over, key=lambda lane: -self.space.axis[lane]):  # type: ignore[call-overload]
            axis = self.space.axis[lane]
            if op == "add" and (self.kept.front is None or not floating):
                text = f"tl.sum({text}, {axis}, keep_dims=True)"
            elif op == "add":
                front, behind = " * ".join(sizes[:axis]), " * ".join(sizes[axis + 1 :]) or "1"
                levels = lane.padded.bit_length() - 1
                text = f"fold_axis({text}, {front}, {lane.padded}, {behind}, {levels})"
                sizes[axis] = "1"
                text = f"anchored({text}, [{', '.join(sizes)}], {axis})"
            else:
                text = f"tl.{'max' if op == 'maximum' else 'min'}({text}, {axis}, keep_dims=True)"
        text = f"unordered({text})" if op != "add" and floating else text
        if op != "add" and expr.dtype.itemsize < 4 and not floating:
            text = f"{text}.to({TRITON[expr.dtype]})"  # Triton folds short ones as int32
        return text if in_tiles(expr.lanes) else f"bare({text})"

    def _rank(self, expr: Expr) -> None:
        """The picks one after the other, `best` and, unless the keys tell, `place`, in the lane of the picks."""
        (keys,), (over, place, picks, tells) = expr.args, expr.data
        assert isinstance(picks, Lane) and isinstance(place, Index) and isinstance(over, tuple)
        name, kind = self.names[expr], TRITON[expr.dtype]
        low = -(1 << (8 * expr.dtype.itemsize - 1))
        wide = ", ".join(self.space.shape(keys.lanes | set(over), self.rows if keys.row else "1"))
        shape = ", ".join(self.space.shape(expr.lanes, self.rows if keys.row else "1"))
        there, at = self.mask(False, over) or "True", self.index(place)
        self.say(f"{name}_there = tl.broadcast_to({there if there != 'True' else f'({at}) >= 0'}, [{wide}])",
                 f"{name}_left = tl.where({name}_there, {self.names[keys]}, tl.full([{wide}], {low}, {kind}))",
                 f"{name}_best = tl.full([{shape}], {low}, {kind})",
                 f"{name}_place = tl.full([{shape}], 0, tl.int32)",
                 f"for turn in tl.static_range({picks.size}):")  # fmt: skip
        axes = sorted((self.space.axis[lane] for lane in over), reverse=True)
        top, where = f"{name}_left", f"tl.where({name}_there & ({name}_left == {name}_top), {at}, {BIG})"
        for axis in axes:
            top, where = f"tl.max({top}, {axis}, keep_dims=True)", f"tl.min({where}, {axis}, keep_dims=True)"
        here = f"{picks.name} == turn"
        self.say(f"    {name}_top = {top}", f"    {name}_best = tl.where({here}, {name}_top, {name}_best)")
        if tells:
            self.say(f"    {name}_left = tl.where({name}_left == {name}_top, {low}, {name}_left)")
        if not tells or any(reader.op == "ranked" and reader.data[0] == "place" and reader.args[0] is expr
                            for reader in self.kept.builder.order):  # fmt: skip
            self.say(f"    {name}_at = {where}", f"    {name}_place = tl.where({here}, {name}_at, {name}_place)")
        if not tells:
            self.say(f"    {name}_there = {name}_there & ({at} != {name}_at)",
                     f"    {name}_left = tl.where({name}_there, {name}_left, {low})")  # fmt: skip

    def store(self, store: Store) -> None:
        tensor = self.kept.outputs[store.output]
        self.compute([store.value])
        where = f"{tensor.name}_ptr + row * {tensor.stride} + {self.index(store.offset)}"
        self.say(f"tl.store({where}, {self.names[store.value]}, mask={self.mask(True, store.lanes)})")


def is_long(atom: Any) -> bool:
    """Whether the kernel has `atom` as an int64."""
    if isinstance(atom, Digit):
        return any(is_long(inner) for _, inner in atom.inner.terms)
    return isinstance(atom, Taken) and atom.expr.dtype == torch.int64


def is_choice(expr: Expr) -> bool:
    """Whether `expr` is one of two constants that are no floats."""
    return expr.op == "where" and not expr.dtype.is_floating_point and {x.op for x in expr.args[1:]} == {"const"}


def _neutral(op: str, expr: Expr, floating: bool) -> str:
    """What changes nothing when it is folded in; extremes of floats are folded as int32."""
    if op == "add":
        return "0.0" if floating else "0"
    bits = 32 if floating else 8 * expr.dtype.itemsize
    signed = floating or expr.dtype.is_signed
    if op == "maximum":
        return str(-(1 << (bits - 1)) if signed else 0)
    return str((1 << (bits - 1)) - 1 if signed else (1 << bits) - 1)


def text(kept: Kept, name: str) -> str:
    """The kernel's file, but for its first lines."""
    from v41.lowering.rowwise.held.front import front_lines

    names = Names()
    values = [store.value for store in kept.stores]
    order = reachable(values, kept.builder.order)
    space = assign(order, [(store.offset, store.lanes) for store in kept.stores])
    lines = Lines(kept, names, space)
    pointers = [f"{tensor.name}_ptr" for tensor in [*filter(None, kept.inputs), *kept.outputs]]
    front = kept.front is not None
    arguments = ", ".join([*pointers, *["partials", "counters", "step"] * front, "T"])
    tuned = ["ROWS"] + ["TILE", "COLUMNS", "GROUP", "KEPT", "PARTS", "STAGES", "STEP", "PDL"] * front
    lines.indent = 0
    lines.say(f'@triton.jit(do_not_specialize=["T"{", " + chr(34) + "step" + chr(34) if front else ""}])',
              f"def {name}({arguments}, {', '.join(f'{each}: tl.constexpr' for each in tuned)}):")  # fmt: skip
    lines.indent = 1
    if kept.front is None:
        lines.say("first = tl.program_id(0) * ROWS")
        if kept.parts > 1:
            lines.say("part = tl.program_id(1)")
        rows_lines(lines, kept, order)
    else:
        front_lines(lines, kept, names, order)
    return PRELUDE + HELPERS + "\n\n" + "\n".join(lines.lines) + "\n"


def rows_lines(lines: Lines, kept: Kept, order: list[Expr]) -> None:
    """What is done with the rows from `first` on."""
    across = lines.space.across(0)
    lines.say("if ROWS == 1:  # a scalar, as all numbers of a row then: no layout that tiles could take from them",
              "    row = first.to(tl.int64)", "else:", f"    row = (first + tl.arange(0, ROWS)).to(tl.int64){across}",
              "live = row < T")  # fmt: skip
    lines.lanes(lane for lane in lines.space.axis if not isinstance(lane, Along))
    lines.compute(expr for expr in order if expr.op in ("fetch", "summed") and not expr.args)  # before stores, which
    place = {expr: i for i, expr in enumerate(order)}  # no load may pass: each would wait for the one before
    for store in sorted(kept.stores, key=lambda store: place.get(store.value, -1)):
        lines.store(store)
