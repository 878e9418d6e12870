"""rowwise: any region whose nodes work on each row by itself becomes one Triton kernel, or is refused with the reason.

    generate(body)  read -> fuse -> assign_phases -> emit       a GeneratedKernel, or Unsupported

A compiler, not a shelf of kernels: it sees shapes and ops. What it can read is in read.py; what it makes of it in
emit.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch.fx import GraphModule

from v41.lowering.rowwise.emit import Emitter
from v41.lowering.rowwise.fuse import fuse
from v41.lowering.rowwise.header import header
from v41.lowering.rowwise.launch import GeneratedKernel
from v41.lowering.rowwise.phases import assign_phases
from v41.lowering.rowwise.read import NotRowwise, read
from v41.lowering.rowwise.schedule import Schedule, schedules

__all__ = ["GeneratedKernel", "Schedule", "Unsupported", "generate"]

BLOCK = 64  # columns of a chunk: fixed, since the order of every sum follows from it


@dataclass(frozen=True)
class Unsupported:
    """Why a body is none for this generator: the node, its op, and `reason`, which completes "refused because it
    ..."."""

    node: str
    op: str
    reason: str


def generate(body: GraphModule, name: str = "rowwise", block: int = BLOCK) -> GeneratedKernel | Unsupported:
    """The kernel of `body`, whose text is called `name` and a hash of what it computes."""
    try:
        program = read(body)
    except NotRowwise as refusal:
        return Unsupported(refusal.node.name, str(refusal.node.target), refusal.reason)
    phases = assign_phases(fuse(program))
    emitter = Emitter(phases, block)
    digest = hashlib.sha256(emitter.kernel("kernel").encode()).hexdigest()[:6]
    emitter = Emitter(phases, block)
    full = f"{name}_{digest}"
    return GeneratedKernel(
        full,
        header(full, body, program, phases, block) + emitter.kernel(full),
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
