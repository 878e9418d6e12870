"""rowwise: any region whose nodes work on each row by itself becomes one Triton kernel, or is refused with the reason.

    generate(body)     rows that fit a program's registers     held/: read -> emit                 a HeldKernel
                       long ones, in passes over chunks        read -> fuse -> phases -> emit      a GeneratedKernel
                       what neither can read                                                       Unsupported

A compiler, not a shelf of kernels: it sees shapes and ops. What it can read is in the two read.py; what it makes of it
in the two emit.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule

from v41.lowering.rowwise.emit import Emitter
from v41.lowering.rowwise.fuse import fuse
from v41.lowering.rowwise.header import header, header_of_held
from v41.lowering.rowwise.held import emit as held_emit
from v41.lowering.rowwise.held import read as held_read
from v41.lowering.rowwise.held.launch import HeldKernel, front_facts
from v41.lowering.rowwise.launch import GeneratedKernel, Kernel
from v41.lowering.rowwise.phases import assign_phases
from v41.lowering.rowwise.read import NotRowwise, read, row_shapes
from v41.lowering.rowwise.schedule import Schedule, schedules

__all__ = ["GeneratedKernel", "HeldKernel", "Kernel", "Schedule", "Unsupported", "generate", "hold", "pass_over"]

BLOCK = 64  # columns of a chunk: fixed, since the order of every sum follows from it
LONG = 20_480  # elements of a row's largest tensor (or of a part of it, where all results fall into parts), above
# which programs share the row


@dataclass(frozen=True)
class Unsupported:
    """Why a body is none for this generator: the node, its op, and `reason`, which completes "refused because it
    ..."."""

    node: str
    op: str
    reason: str


def generate(body: GraphModule, name: str = "rowwise", block: int = BLOCK) -> Kernel | Unsupported:
    """The kernel of `body`, whose text is called `name` and a hash of what it computes. Rows that are short are held,
    long ones passed over; where that way refuses, the other is asked, and the refusal is that of the first."""
    elements = max((int(np.prod(shape[1:])) for shape in row_shapes(body)), default=0)
    long = elements > LONG * held_read.parts_of(body)
    ways: list[Callable[[], Kernel]] = [lambda: hold(body, name), lambda: pass_over(body, name, block)]
    refusals = []
    for way in reversed(ways) if long else ways:
        try:
            return way()
        except NotRowwise as refusal:
            refusals.append(refusal)
    first = refusals[0]
    return Unsupported(first.node.name, str(first.node.target), first.reason)


def hold(body: GraphModule, name: str = "rowwise") -> HeldKernel:
    """The kernel in which programs hold whole rows, or NotRowwise."""
    kept = held_read.read(body)
    full = f"{name}_{digest(held_emit.text(kept, 'kernel'))}"
    source = header_of_held(full, body, kept) + held_emit.text(kept, full)
    return HeldKernel(full, source, kept.inputs, kept.outputs, kept.elements, front_facts(kept.front), kept.parts)


def pass_over(body: GraphModule, name: str = "rowwise", block: int = BLOCK) -> GeneratedKernel:
    """The kernel that passes over chunks of its rows, or NotRowwise."""
    program = read(body)
    phases = assign_phases(fuse(program))
    full = f"{name}_{digest(Emitter(phases, block).kernel('kernel'))}"
    emitter = Emitter(phases, block)
    return GeneratedKernel(
        full,
        header(full, body, program.inputs, program, phases, block) + emitter.kernel(full),
        program.inputs,
        [tensor for tensor, _ in program.outputs],
        [(tile.dtype, program.axes.width) for tile in phases.scratch],
        emitter.partial_width,
        emitter.total_width,
        (emitter.runs, emitter.run),
        program.axes.width,
        emitter.shareable,
        schedules(emitter.runs, emitter.run, program.axes.width),
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
