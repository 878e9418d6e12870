"""emit: phases become the text of one Triton kernel.

    program (tile, part)      ROWS rows, GROUP chunks of BLOCK columns
      numbers of phase 0      loads that have no column
      for each chunk          tiles of phase 0; results and spills stored; totals of it or its run to `partials`
      last to arrive          the totals of the row out of `partials`
                              numbers of phase 1, pass over all columns, numbers of phase 2, ...
                              (or in a second launch, whose programs share the columns: STEP, SHARE)

Totals are bitwise the same for every ROWS, GROUP and number of programs: a chunk is always BLOCK columns, folded in
pairs (`fold_last`) or by tensor cores with k ascending; a run of RUN chunks is added one after the other; runs are
folded in pairs. Who adds a run may differ: a program that has all of its chunks (WHOLE), or the last to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from v41.lowering.rowwise.dots import dot_lines
from v41.lowering.rowwise.expr import Expr, Weights, reachable
from v41.lowering.rowwise.lines import Lines, times
from v41.lowering.rowwise.names import TRITON, constant
from v41.lowering.rowwise.phases import Phase, Phases, Place
from v41.lowering.rowwise.prelude import PRELUDE
from v41.lowering.rowwise.read import Tensor
from v41.lowering.rowwise.roll import Loop, roll
from v41.lowering.rowwise.schedule import ALL, FIRST, LATER, runs
from v41.lowering.rowwise.sections import sections
from v41.lowering.rowwise.sums import Sums, group_sums

FOLD = {"add": 0, "maximum": 1, "minimum": 2}


class Emitter(Lines):
    """Writes one kernel. `block` is BLOCK, the columns of a chunk: part of what the kernel computes, not of its
    schedule."""

    more: tuple[str, ...] = ()  # arguments of a kernel that does more than this one writes; `any_value` of them are
    any_value: tuple[str, ...] = ()  # numbers that Triton must not specialise for
    more_constants: tuple[str, ...] = ()
    helpers = ""  # functions behind those of the prelude

    def __init__(self, phases: Phases, block: int) -> None:
        super().__init__(phases.program)
        self.phases, self.block = phases, block
        self.width = self.program.axes.width
        self.runs, self.run = runs(-(-self.width // block))
        self.chunks = self.runs * self.run
        self.section = sections(phases).__getitem__  # of a number
        self.tiles: dict[tuple[Sums, int], str] = {}  # names of weights of a product's terms
        self.sums: list[list[Sums]] = [group_sums(phase.sums, i) for i, phase in enumerate(phases.each)]
        self.partial_width = sum(group.width for group in self.sums[0])
        self.total_width = sum(group.width for groups in self.sums for group in groups)
        self.masked = self.width != self.chunks * block
        self.shareable = bool(self.sums[0]) and len(phases.each) == 2 and not self.sums[1]

    def kernel(self, name: str) -> str:
        """The function's text, imports and helpers in front."""
        pointers = [f"{tensor.name}_ptr" for tensor in [*self._inputs(), *self._outputs()]]
        scratch = [f"scratch_{slot}_ptr" for slot in range(len(self.phases.scratch))]
        arguments = ", ".join([*pointers, *scratch, "partials", "totals", "counters", *self.more, "T"])
        names = ("ROWS", "GROUP", "PARTS", "TAIL", "STAGES", "STEP", "SHARE", "PDL", *self.more_constants)
        tuned = ", ".join(f"{c}: tl.constexpr" for c in names)
        self.lines = [f"@triton.jit(do_not_specialize={['T', *self.any_value]})".replace("'", '"'),
                      f"def {name}({arguments},", f"{' ' * 8}{tuned}):"]  # fmt: skip
        self.say("tile = tl.program_id(0)", "part = tl.program_id(1)", "lane = tl.arange(0, ROWS)[:, None]",
                 "row = (tile * ROWS + lane).to(tl.int64)", "live = row < T",
                 "across = tl.arange(0, ROWS)[None, :]")  # fmt: skip
        for groups in self.sums:
            for group in groups:
                self.say(f"{group.name}_slot = tl.arange(0, {group.width})[:, None]")
                if group.project is not None:
                    self.say(f"{group.name}_inside = settle({group.name}_slot) < {group.outputs}")
        self._before()
        self._first_phase()
        self._rest()
        return PRELUDE + self.helpers + "\n\n" + "\n".join(self.lines) + "\n"

    def _before(self) -> None:
        """What a program does before its first phase: nothing here."""

    def _inputs(self) -> list[Tensor]:
        return [tensor for tensor in self.program.inputs if tensor is not None]

    def _outputs(self) -> list[Tensor]:
        return [tensor for tensor, _ in self.program.outputs]

    # ---- the parts of the kernel

    def _first_phase(self) -> None:
        phase = self.phases.each[0]
        self._numbers([expr for expr in phase.numbers if self.section(expr) == 0])
        if not self.width:
            return
        early = self._early_loads()
        self.say(f"WHOLE: tl.constexpr = GROUP % {self.run} == 0  # runs are not shared with other programs",
                 f"KEPT: tl.constexpr = {self.runs} if WHOLE else {self.chunks}  # totals kept of a tile",
                 f"SPAN: tl.constexpr = {self.run} if WHOLE else GROUP",
                 f"if STEP != {LATER}:",
                 "    if PDL:  # the second launch may come up while this one runs",
                 "        tl.extra.cuda.gdc_launch_dependents()")  # fmt: skip
        self.indent += 1
        if early:
            self.say(f"if (STEP == {ALL}) & (PARTS > 1):  # asked for now, used by the last program")
            self.say(*(f"    {self.names[expr]} = {self._text(expr)}" for expr in early))
        self.say("for outer in range(GROUP // SPAN):")
        self.indent += 1
        self._start_sums(0)
        self.say("for inner in tl.range(SPAN, num_stages=STAGES):")
        self.indent += 1
        self.say(
            "chunk = part * GROUP + outer * SPAN + inner",
            f"cols = chunk * {self.block} + tl.arange(0, {self.block})[None, :]",
        )
        if self.masked:
            self.say(f"columns = cols < {self.width}")
        self._weights_first()
        self._pass(0, phase, self.masked)
        for group, offset in self._offsets():
            self.say("if WHOLE:", f"    {group.name} = {group.add(group.name, f'{group.name}_part')}", "else:",
                     f"    {self._keep(group, offset, 'chunk', f'{group.name}_part')}")  # fmt: skip
        self.indent -= 1
        for group, offset in self._offsets():
            kept = self._keep(group, offset, f"(part * (GROUP // {self.run}) + outer)", group.name)
            self.say("if WHOLE:", f"    {kept}")
        self.indent -= 2

    def _weights_first(self) -> None:
        """Asks for all weights of a chunk at once, unless a pipeline does: behind a store, which might be to the same
        memory, no load may move up, and each would wait for the one before."""
        terms = [(group, s) for group in self.sums[0] if group.project is not None
                 for s in range(len(group.project.args))]  # fmt: skip
        if terms:
            self.say("if STAGES == 1:")
            self.indent += 1
            for group, s in terms:
                self.say(self._weights(group, s, self.masked))
            self.indent -= 1

    def _offsets(self) -> list[tuple[Sums, int]]:
        """The vectors of phase 0's totals, each with where it begins among them."""
        groups = self.sums[0]
        return [(group, sum(other.width for other in groups[:i])) for i, group in enumerate(groups)]

    def _keep(self, group: Sums, offset: int, index: str, value: str) -> str:
        """Stores totals number `index` of the tile's rows: [tile, index, vector, slot, row of the tile]."""
        home = f"partials + (tile * KEPT + {index}) * (ROWS * {self.partial_width})"
        return f"tl.store({home} + ROWS * ({offset} + {group.name}_slot) + across, {value})"

    def _rest(self) -> None:
        self.say(f"if STEP != {FIRST}:")
        self.indent += 1
        self.say("if PDL:  # until all that the first launch stored is there", "    tl.extra.cuda.gdc_wait()",
                 "last = part == PARTS - 1")  # fmt: skip
        if self.sums[0]:
            self.say(f"if STEP == {LATER}:", "    last = part >= 0", "else:",
                     "    tl.debug_barrier()  # what other threads stored is read below", "    if PARTS > 1:",
                     "        arrived = tl.atomic_add(counters + tile, 1, sem=\"acq_rel\")",
                     "        last = arrived == PARTS - 1")  # fmt: skip
        if self.shareable:
            self.say(f"if STEP == {LATER}:", "    share = part", "else:", "    share = 0")
        self.say("if last:")
        self.indent += 1
        if self.sums[0]:
            self.say(f"if (STEP == {ALL}) & (PARTS > 1):", "    tl.store(counters + tile, 0)",
                     f"STEPS: tl.constexpr = 1 if WHOLE else {self.run}")  # fmt: skip
        for group, offset in self._offsets():
            home = f"partials + tile * KEPT * (ROWS * {self.partial_width}) + ROWS * {offset}"
            element = f"tl.arange(0, ROWS * {group.width})[:, None]"
            self.say(f"{group.name} = row_totals({home}, {element}, {FOLD[group.op]}, "
                     f"{constant(group.start)}, {group.width}, ROWS, {self.runs}, {self.runs.bit_length() - 1}, STEPS, "
                     f"ROWS * {self.partial_width})")  # fmt: skip
        for index in range(1, max(len(self.phases.each), 2)) if self.width else [0]:
            self._later(index)
        self.say("pass")
        self.indent -= 2

    def _later(self, index: int) -> None:
        """Phase `index`, but for what phase 0 did: numbers its pass reads, the pass, all other numbers."""
        phase = self.phases.each[index] if index < len(self.phases.each) else Phase()
        numbers = (
            [expr for other in self.phases.each for expr in other.numbers if self.section(expr) == index]
            if index
            else []
        )
        early = self._early_loads() if index == 1 and self.width else []
        if early:
            self.say(f"if (STEP == {LATER}) | (PARTS == 1):")
            self.say(*(f"    {self.names[expr]} = {self._text(expr)}" for expr in early))
            numbers = [expr for expr in numbers if expr not in set(early)]
        roots = [*phase.tiles, *phase.sums, *(tile for tile, _ in phase.stores)]
        needed = set(reachable(roots, self.program.builder.order))
        self._numbers([expr for expr in numbers if expr in needed], index)
        if index and roots:
            self._later_pass(index)
        rest = [expr for expr in numbers if expr not in needed]
        stores = [*(self.phases.each[0].number_stores if index == 1 else []), *phase.number_stores]
        once = self.shareable and index == 1 and bool(rest or stores)
        if once:
            self.say("if share == 0:  # of those that share the columns, one")
        self.indent += once
        self._numbers(rest)
        for expr, place in stores:
            self.say(f"tl.store({self._address(place)}, {self.names[expr]}, mask=live)")
        self.indent -= once

    def _early_loads(self) -> list[Expr]:
        """Numbers that all rows share and phase 1 reads: asked for early, their latency hides behind phase 0."""
        return [
            expr
            for expr in self.phases.each[0].numbers
            if expr.op == "load" and not expr.row and self.section(expr) == 1
        ]

    def _later_pass(self, index: int) -> None:
        block = str(self.block) if self.sums[index] else "TAIL"
        self._start_sums(index)
        self.say(f"for start in range(0, {'SHARE' if self.shareable else self.width}, {block}):")
        self.indent += 1
        begin = "share * SHARE + " if self.shareable else ""
        self.say(f"cols = {begin}start + tl.arange(0, {block})[None, :]")
        masked = block == "TAIL" or self.masked
        if masked:
            self.say(f"columns = cols < {self.width}")
        self._pass(index, self.phases.each[index], masked)
        for group in self.sums[index]:
            self.say(f"{group.name} = {group.add(group.name, f'{group.name}_part')}")
        self.indent -= 1

    def _start_sums(self, index: int) -> None:
        for group in self.sums[index]:
            self.say(f"{group.name} = tl.full([{group.width}, ROWS], {constant(group.start)}, tl.float32)")

    # ---- numbers: one a row

    def _numbers(self, numbers: list[Expr], read_sums_before: int = 0) -> None:
        """`numbers` in order, runs of equal steps as loops."""
        inside = set(numbers)
        readers = [expr for expr in self.program.builder.order if expr not in inside]
        used = {arg for expr in readers for arg in expr.args}
        used |= {item for _, value in self.program.outputs for item in value.items()}
        if read_sums_before:
            self._read_sums(read_sums_before)
        for item in roll([expr for expr in numbers if expr.op != "pick"], used):
            if isinstance(item, Loop):
                self._loop(item)
            else:
                self.say(f"{self.names[item]} = {self._text(item)}")

    def _read_sums(self, index: int) -> None:
        """The totals of the phase before, out of the vectors that hold them."""
        groups = self.sums[index - 1] if index else []
        if not groups:
            return
        for group in groups:
            home = f"totals + (tile * {self.total_width} + {self._home(group)}) * ROWS"
            self.say(f"tl.store({home} + {group.name}_slot * ROWS + across, {group.name})")
        self.say("tl.debug_barrier()")
        for group in groups:
            home = f"totals + (tile * {self.total_width} + {self._home(group)}) * ROWS"
            slots = [(slot, expr) for slot, expr in group.slots.items()]
            slots += [(int(str(expr.data[0])), expr) for expr in self.program.builder.order if expr.op == "pick" and
                      expr.args[0] is group.project]  # fmt: skip
            for slot, expr in slots:
                self.say(f"{self.names[expr]} = pick({home}, lane, {slot}, ROWS)")

    def _home(self, group: Sums) -> int:
        groups = [other for groups in self.sums for other in groups]
        return sum(other.width for other in groups[: groups.index(group)])

    def _loop(self, loop: Loop) -> None:
        names = {at: self.names.new(f"{loop.first[at].name}_carried") for at in loop.carried}
        for at, before in loop.carried.items():
            self.say(f"{names[at]} = {self.names[before]}")
        inputs = {before: names[at] for at, before in loop.carried.items()}
        outside = {expr: self.names[expr] for expr in inputs}
        self.say(f"for _ in range({loop.times}):")
        self.indent += 1
        for before, name in inputs.items():
            self.names.alias(before, name)
        for expr in loop.first:
            self.say(f"{self.names[expr]} = {self._text(expr)}")
        for at, name in names.items():
            self.say(f"{name} = {self.names[loop.first[at]]}")
        self.indent -= 1
        for before, name in outside.items():
            self.names.alias(before, name)
        for first, final in zip(loop.first, loop.last, strict=True):
            self.names.alias(final, self.names[first])
        for at, name in names.items():
            self.names.alias(loop.last[at], name)

    # ---- tiles: one a row and column

    def _pass(self, index: int, phase: Phase, masked: bool) -> None:
        """Tiles as they are needed: each result is stored, each term of a product taken, as soon as it is known."""
        place = {expr: i for i, expr in enumerate(self.program.builder.order)}
        for group in self.sums[index]:
            self.say(f"{group.name}_part = tl.full([{group.width}, ROWS], {constant(group.start)}, tl.float32)")
        steps: list[tuple[Expr, Callable[[], None]]] = [
            (expr, partial(self._store, expr, where, masked)) for expr, where in phase.stores
        ]
        for group in self.sums[index]:
            steps += [
                (expr.args[0], partial(self._total, group, slot, expr, masked)) for slot, expr in group.slots.items()
            ]
            if group.project is not None:
                steps += [(x, partial(self._term, group, s, index, masked)) for s, x in enumerate(group.project.args)]
        done: set[Expr] = set()
        overwritten = {where for _, where in phase.stores}
        for expr in phase.tiles:
            if phase.reloads.get(expr) in overwritten or self._early(expr):  # before any store of this pass
                self._tiles(expr, phase, done, masked)
        for expr, act in sorted(steps, key=lambda step: place[step[0]]):
            self._tiles(expr, phase, done, masked)
            act()

    def _early(self, expr: Expr) -> bool:
        """Whether a pass begins with this tile."""
        return False

    def _tiles(self, expr: Expr, phase: Phase, done: set[Expr], masked: bool) -> None:
        """`expr` and what it needs that is not there yet."""
        if expr in done or not expr.wide:
            return
        done.add(expr)
        place = phase.reloads.get(expr)
        if place is not None:
            mask = "live & columns" if masked else "live"
            text = f'tl.load({self._address(place)} + cols, mask={mask}, other=0.0, cache_modifier=".cg")'
        else:
            for arg in expr.args:
                self._tiles(arg, phase, done, masked)
            text = self._text(expr, masked)
        self.say(f"{self.names[expr]} = {text}")

    def _store(self, expr: Expr, place: Place, masked: bool) -> None:
        mask = "live & columns" if masked else "live"
        self.say(f"tl.store({self._address(place)} + cols, {self.names[expr]}, mask={mask})")

    def _total(self, group: Sums, slot: int, expr: Expr, masked: bool) -> None:
        (x,) = expr.args
        item = f"tl.where(columns, {self.names[x]}, {constant(group.start)})" if masked else self.names[x]
        levels = (self.block - 1).bit_length()
        folded = (
            f"fold_last(tl.broadcast_to({item}, [ROWS, {self.block}]), {FOLD[group.op]}, ROWS, {self.block}, {levels})"
        )
        self.say(f"{group.name}_part = tl.where({group.name}_slot == {slot}, {folded}.trans(), {group.name}_part)")

    def _weights(self, group: Sums, s: int, masked: bool) -> str:
        """The line that loads the weights of part `s` of the row."""
        assert group.project is not None
        weights = group.project.data[0]
        assert isinstance(weights, Weights)
        source = self.program.inputs[weights.source]
        assert source is not None
        if (group, s) not in self.tiles:
            self.tiles[group, s] = self.names.new(f"{source.name}_tile")
        inside = f"{group.name}_inside" + (" & columns" if masked else "")
        lines = f"{source.name}_ptr + tl.minimum({group.name}_slot, {weights.outputs - 1}) * {weights.stride}"
        address = f"{lines} + {weights.offsets[s]} + {times('cols', weights.column)}"
        guard = ", mask=columns, other=0.0" if masked else ""
        return f"{self.tiles[group, s]} = tl.where({inside}, tl.load({address}{guard}), 0.0)"

    def _term(self, group: Sums, s: int, index: int, masked: bool) -> None:
        """Weights times rows on tensor cores, for part `s` of the row."""
        assert group.project is not None
        weights, x = group.project.data[0], group.project.args[s]
        assert isinstance(weights, Weights)
        load = self._weights(group, s, masked)
        self.say(*([load] if index else ["if STAGES > 1:", f"    {load}"]))
        row = f"tl.broadcast_to({self.names[x]}, [ROWS, {self.block}])"
        if masked:
            row = f"tl.where(columns, {row}, 0.0).to({TRITON[x.dtype]})"
        self.say(*dot_lines(f"{group.name}_part", self.tiles[group, s], weights.dtype, row, x.dtype))
