"""index_scores: a region of this kind becomes Triton kernels made from its attributes, or is refused with the reason.

    generate(body)     body: one region `index_scores` of a piece        an IndexKernel, or Unsupported

What the region computes is in form.py, the text of the scores in text.py, that of the selection in topk/, the launches
of both in launch.py.
"""

from __future__ import annotations

from torch.fx import GraphModule

from v41.lowering.rowwise import Unsupported, digest
from v41.lowering.templates.index_scores.form import KIND, Form, form_of, roles_of
from v41.lowering.templates.index_scores.header import header
from v41.lowering.templates.index_scores.launch import IndexKernel, Spread
from v41.lowering.templates.index_scores.text import text
from v41.lowering.templates.lone import NotTaken, lone_region

__all__ = ["KIND", "Form", "IndexKernel", "Spread", "generate", "kernel_of"]


def generate(body: GraphModule, name: str = KIND) -> IndexKernel | Unsupported:
    """The kernels of `body`, in a text that is called `name` and a hash of what it computes."""
    try:
        call = lone_region(body, KIND)
        form, roles = form_of(call), roles_of(call)
    except NotTaken as refusal:
        return Unsupported(refusal.node.name, str(refusal.node.target), refusal.reason)
    given = [node for node in body.graph.nodes if node.op == "placeholder"]
    return kernel_of(form, tuple(roles.get(node) for node in given), name)


def kernel_of(form: Form, roles: tuple[str | None, ...], name: str = KIND) -> IndexKernel:
    """The kernels of `form`. roles: what each argument of a call is to the region; None: nothing to a kernel."""
    source = text(form)
    full = f"{name}_{digest(source)}"
    return IndexKernel(full, header(full, form) + source, [], [], form, roles)
