"""text: a kernel in passes (rowwise/emit.py) whose rows of one input are the sum over ranks.

    SHOTS 1      program: sends its columns of its rows, in words, then computes, receiving the sum chunk by chunk;
                 what it sends it loads, or makes (front.py)
    SHOTS 2      program: waits for the rows that gather has put into `reduced`, then computes, reading them there

The sum is read in the first phase alone, where the columns that a program sends are those that it receives; what later
phases need of it is spilled (Program.once). All else is what rowwise/ makes of the body behind the sum.
"""

from __future__ import annotations

from v41.lowering.rowwise.emit import Emitter
from v41.lowering.rowwise.expr import Expr
from v41.lowering.rowwise.names import TRITON
from v41.lowering.rowwise.phases import Phases
from v41.lowering.rowwise.read import Tensor
from v41.lowering.rowwise.schedule import LATER
from v41.lowering.templates.all_reduce import protocol
from v41.lowering.templates.all_reduce.front import SumOf

CONSTANTS = ("SHOTS", "BLOCK_ROWS", "SHARES")  # of the units whose flags a program of two shots waits for


class SummingEmitter(Emitter):
    """`sum`: what is added up; it is read at the element offsets `offsets` of its row."""

    more_constants = CONSTANTS

    def __init__(self, phases: Phases, block: int, sum_of: SumOf) -> None:
        super().__init__(phases, block)
        self.sum, self.ranks, self.source = sum_of, sum_of.ranks, sum_of.source
        loads = [expr for expr in self.program.builder.order if expr.op == "load" and expr.data[0] == sum_of.number]
        self.offsets = sorted({int(str(expr.data[2])) for expr in loads})
        self.mails = [f"mail_{r}" for r in range(self.ranks)]
        self.more = (*self.mails, "mail", "reduced", "settled", "epochs", "record", "failed", "slots", "limit", "site",
                     "rank")  # fmt: skip
        self.any_value = ("limit", "site", "rank")
        self.helpers = protocol.helpers(self.ranks, self.source.dtype.itemsize == 4)

    def _inputs(self) -> list[Tensor]:
        return [tensor for tensor in self.sum.inputs if tensor is not None]

    @property
    def kind(self) -> str:
        return TRITON[self.source.dtype]

    def _before(self) -> None:
        tile = f"ROWS * {self.block}"
        size = f"{self.ranks * len(self.offsets)} * GROUP * {tile}"
        self.say(f"if STEP != {LATER}:")
        self.indent += 1
        self.say("patient = patience(failed, limit)", "if SHOTS == 1:")
        self.indent += 1
        self.say("slot = tile * PARTS + part",
                 "epoch = tl.load(epochs + slot) + 1",
                 f"apart = {len(self.offsets)} * GROUP * {tile}",
                 f"inside = lane * {self.block} + tl.arange(0, {self.block})[None, :]",
                 f"half = ((epoch & 1) * slots + slot) * ({size})",
                 *self.sum.numbers(self.names),
                 "for step in range(GROUP):")  # fmt: skip
        self.indent += 1
        self.say(f"cols = (part * GROUP + step) * {self.block} + tl.arange(0, {self.block})[None, :]",
                 f"columns = cols < {self.width}")  # fmt: skip
        for number, offset in enumerate(self.offsets):
            place = f"half + rank * apart + ({number} * GROUP + step) * ({tile}) + inside"
            lines, mine = self.sum.tile(self.names, offset)
            self.say(*lines, f"send({', '.join(self.mails)}, {place}, {mine}, epoch)")
        self.indent -= 1
        self.say("tl.debug_barrier()  # all threads have read the epoch", "tl.store(epochs + slot, epoch)")
        self.indent -= 1
        self.say("else:")
        self.indent += 1
        self.say(f"COUNT: tl.constexpr = ROWS // BLOCK_ROWS * SHARES if SHOTS == 2 else {self.ranks}",
                 "unit = tile * COUNT + tl.arange(0, COUNT)",
                 "known = unit < (T + BLOCK_ROWS - 1) // BLOCK_ROWS * SHARES",
                 "due = tl.load(epochs + unit, mask=known, other=0)",
                 f"owner = unit // SHARES % {self.ranks}",
                 "wait(settled + tl.where(known, unit, 0), known, due, owner, patient, record, failed, site)",
                 "epoch = 0", "half = 0", "apart = 0", "inside = 0")  # fmt: skip
        self.indent -= 2

    def _early(self, expr: Expr) -> bool:
        """What else is read from memory is on its way while a program waits for other ranks."""
        return expr.op == "load" and expr.row and expr.data[0] != self.sum.number

    def _load(self, expr: Expr, masked: bool) -> str:
        if expr.data[0] != self.sum.number:
            return super()._load(expr, masked)
        offset = int(str(expr.data[2]))
        number, place = self.offsets.index(offset), f"row * {self.source.elements} + {offset} + cols"
        mask = "live & columns" if masked else "live"
        chunk = f"({number} * GROUP + chunk - part * GROUP) * (ROWS * {self.block})"
        return (f"rows_of_sum(mail, half + {chunk} + inside, apart, epoch, reduced + {place}, {mask}, patient, record, "
                f"failed, site, SHOTS, {self.kind})")  # fmt: skip


ROWS_OF_SUM = '''

@triton.jit
def rows_of_sum(mail, where, apart, epoch, home, there, limit, record, failed, site,
                SHOTS: tl.constexpr, KIND: tl.constexpr):
    """A tile of the sum over ranks."""
    if SHOTS == 1:
        return received(mail + where, apart, epoch, limit, record, failed, site, KIND)
    else:
        return tl.load(home, mask=there, other=0.0, cache_modifier=".cg")
'''
