"""attention: a region of this kind becomes a Triton kernel made from its attributes, or is refused with the reason.

    generate(body)     body: one region `attention` of a piece        an AttentionKernel, or Unsupported

What the region computes is in form.py, the kernel's text in text.py, its launches in launch.py.
"""

from __future__ import annotations

from torch.fx import GraphModule

from v41.lowering.rowwise import Unsupported, digest
from v41.lowering.rowwise.read import described, outputs_of
from v41.lowering.templates.attention.form import AS_IS, KIND, Form, described_operand, form_of, roles_of
from v41.lowering.templates.attention.header import header
from v41.lowering.templates.attention.keys import counted, size_of
from v41.lowering.templates.attention.launch import AttentionKernel, Spread
from v41.lowering.templates.attention.text import all_blocks, text, tile_of_heads, tiles_of
from v41.lowering.templates.lone import NotTaken, lone_region

__all__ = ["KIND", "AttentionKernel", "Form", "Spread", "generate"]


def generate(body: GraphModule, name: str = "attention") -> AttentionKernel | Unsupported:
    """The kernel of `body`, whose text is called `name` and a hash of what it computes."""
    try:
        return _generate(body, name)
    except NotTaken as refusal:
        return Unsupported(refusal.node.name, str(refusal.node.target), refusal.reason)


def _generate(body: GraphModule, name: str) -> AttentionKernel:
    call = lone_region(body, KIND)
    form = form_of(call)
    roles = roles_of(call)
    given = [node for node in body.graph.nodes if node.op == "placeholder"]
    inputs = [described_operand(roles[node], node, form) if node in roles else None for node in given]
    (output,) = outputs_of(body)
    outputs = [described("out", output)]
    operands = [tensor.name for tensor in inputs if tensor is not None]
    full = f"{name}_{digest(text(form, 'kernel', operands))}"
    source = header(full, form, [tensor for tensor in inputs if tensor is not None], outputs)
    heads, tiles = tile_of_heads(form)
    return AttentionKernel(
        full,
        source + text(form, full, operands),
        inputs,
        outputs,
        heads,
        tiles,
        (sum(tiles_of(branch, form) for branch in form.branches), all_blocks(form)),
        form.width,
        max(branch.group for branch in form.branches),
        {operand: size_of(branch) for branch in form.branches if branch.values != AS_IS for operand in branch.records},
        tuple(counted(form).values()),
    )
