"""all_reduce: a sum over ranks and what reads it become one kernel, made by rowwise/ from the body behind the sum.

    before   part -> all_reduce -> wait_tensor -> casts, views -> post map, collapse, norm (or whatever works by rows)
    after    a SummingKernel: one launch for few rows, a handful for many (launch.py)

    before   rows of experts, shared expert -> part -> all_reduce ...
    after    the same kernel, which makes the part as it sends it (front.py)

The body is any whose rows are independent, or it is refused with the reason. How ranks hand each other rows, and why it
is right, is in protocol.py. The sum is added in the order of ranks, in fp32, and rounded as the collective rounds its
result, so all ranks hold the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from v41.lowering.rowwise import BLOCK, Unsupported, digest
from v41.lowering.rowwise.axes import Refused
from v41.lowering.rowwise.fuse import fuse
from v41.lowering.rowwise.header import header
from v41.lowering.rowwise.phases import assign_phases
from v41.lowering.rowwise.read import NotRowwise, Program, described, read
from v41.lowering.templates.all_reduce.front import Front, SumOf, Table, read_front
from v41.lowering.templates.all_reduce.launch import SummingKernel
from v41.lowering.templates.all_reduce.text import ROWS_OF_SUM, SummingEmitter
from v41.lowering.templates.all_reduce.two_shots import shots_of_two
from v41.regions import behind_sum, flatten, front_of_sum

__all__ = ["SummingKernel", "generate", "group_of"]

functional = torch.ops._c10d_functional
COLLECTIVES = ("_c10d_functional",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def group_of(body: GraphModule) -> str | None:
    """The name of the group that `body`, regions included, talks to first: then it is for this generator or none."""
    calls = (node for node in flatten(body).graph.nodes if getattr(node.target, "namespace", None) in COLLECTIVES)
    return next((arg for node in calls for arg in reversed(node.args) if isinstance(arg, str)), None)


def generate(
    body: GraphModule, ranks: int, name: str = "all_reduce", block: int = BLOCK
) -> SummingKernel | Unsupported:
    """The kernel of `body` for a group of `ranks`, whose text is called `name` and a hash of what it computes."""
    try:
        return _generate(body, ranks, name, block)
    except NotRowwise as refusal:
        return Unsupported(refusal.node.name, str(refusal.node.target), refusal.reason)
    except Refused as refusal:
        return Unsupported("output", "output", refusal.reason)


def _generate(body: GraphModule, ranks: int, name: str, block: int) -> SummingKernel:
    flat = flatten(body)
    part = _part_of(flat)
    source = described(part.name, part)
    _check_part(part, source, ranks)
    behind, before = behind_sum(flat), front_of_sum(flat)
    program = read(behind)
    placeholders = [node.name for node in flat.graph.find_nodes(op="placeholder")]
    number = program.once = 0 if before is not None else placeholders.index(part.name)
    loads = [expr for expr in program.builder.order if expr.op == "load" and expr.data[0] == number]
    if not loads or not all(expr.wide and expr.row for expr in loads):
        raise NotRowwise(part, "is short beside other rows, so programs do not share its columns")
    if any(expr.data[3] != 1 for expr in loads):  # as [T, D, 4] beside rows of D: what is sent lies side by side
        raise NotRowwise(part, "has columns that do not lie side by side")
    front = None if before is None else read_front(before, program.axes)
    inputs = program.inputs if front is None else _inputs_of_both(flat, behind, program, front)
    phases = assign_phases(fuse(program))
    sum_of = SumOf(number, source, ranks, inputs, front)
    stem = f"{name}_{digest(_text(SummingEmitter(phases, block, sum_of), 'kernel'))}"
    emitter = SummingEmitter(phases, block, sum_of)
    source_text = header(stem, body, inputs, program, phases, block) + _text(emitter, stem)
    folded = {} if front is None else front.folded
    return SummingKernel(
        stem,
        source_text,
        inputs,
        [tensor for tensor, _ in program.outputs],
        [(tile.dtype, program.axes.width) for tile in phases.scratch],
        emitter.partial_width,
        emitter.total_width,
        (emitter.runs, emitter.run),
        program.axes.width,
        emitter.shareable,
        (),
        source,
        None if front is not None else number,
        tuple(i for i, name in enumerate(placeholders) if name in sum_of.sent),
        {i: folded[name] for i, name in enumerate(placeholders) if name in folded},
        ranks,
        len(emitter.offsets),
        block,
    )


def _inputs_of_both(flat: GraphModule, behind: GraphModule, program: Program, front: Front) -> list[Any]:
    """The inputs of a body that makes its part, by their place in the body."""
    read_behind = [node.name for node in behind.graph.find_nodes(op="placeholder")]
    known = front.inputs | dict(zip(read_behind, program.inputs, strict=True))
    placeholders = flat.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if isinstance(front.inputs.get(node.name), Table) and node.name in read_behind:
            raise NotRowwise(node, "is a table in front of the sum, and has rows behind it")  # of which a call has some
    return [known.get(node.name) for node in placeholders]


def _text(emitter: SummingEmitter, name: str) -> str:
    emitter.helpers += ROWS_OF_SUM
    return emitter.kernel(name) + shots_of_two(name, emitter.sum)


def _part_of(flat: GraphModule) -> Node:
    """What `flat` adds over ranks, or NotRowwise. Others may ask for its sizes."""
    found = [node for node in flat.graph.nodes if getattr(node.target, "namespace", None) in COLLECTIVES]
    begun: list[Any] = [node for node in found if node.target is functional.all_reduce.default]
    ended = [node for node in found if node.target is functional.wait_tensor.default]
    if len(begun) != 1 or len(ended) != 1 or len(found) != 2:
        raise NotRowwise(found[0], f"has {len(found)} collectives and waits, not one all_reduce and its wait")
    (begin,), (end,) = begun, ended
    part = begin.args[0]
    if end.args[0] is not begin or set(begin.users) != {end}:
        raise NotRowwise(begin, "is read before it was waited for")
    if begin.args[1] != "sum":
        raise NotRowwise(begin, f"reduces by {begin.args[1]}")
    if any(user is not begin and isinstance(user.meta.get("val"), torch.Tensor) for user in part.users):
        raise NotRowwise(part, "is read as one rank's part too, not in the sum alone")
    return part


def _check_part(part: Node, source: Any, ranks: int) -> None:
    if source.dtype not in DTYPES:
        raise NotRowwise(part, f"is of dtype {source.dtype}")
    if not source.per_row:
        raise NotRowwise(part, "has no row axis")
    inner = 1
    for size, step in reversed(list(zip(source.shape[1:], source.steps[1:], strict=True))):
        if size != 1 and step != inner:
            raise NotRowwise(part, f"has rows that do not lie in one piece: strides {source.steps}")
        inner *= size
    if not 2 <= ranks <= 64:
        raise NotRowwise(part, f"is added over {ranks} ranks")
