"""disturb: changes a program in ways that mean nothing: views and copies in between, operands swapped, other names."""

from __future__ import annotations

import random

from torch import Tensor, ops
from torch.fx import GraphModule, Node

from v41.passes.analysis.effects import viewed_args, written_inputs
from v41.passes.canonicalize import is_contiguous

aten = ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def disturb(gm: GraphModule, seed: int, share: float = 0.3) -> GraphModule:
    """Disturbs about `share` of the nodes of `gm`, in place. Its values keep every bit."""
    draw = random.Random(seed)
    owned = {*written_inputs(gm), *returned_memory(gm)}  # a copy is not what is to be written, or shared
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and draw.random() < share:
            _swap(node)
            node._rename(f"n{draw.randrange(10**9)}")
        value = node.meta.get("val")
        plain = node.op in ("call_function", "placeholder") and isinstance(value, Tensor) and is_contiguous(value)
        if plain and node not in owned and node.users and draw.random() < share:
            draw.choice((_copy, _look_around, _look_flat))(gm, node)
    gm.recompile()
    return gm


def returned_memory(gm: GraphModule) -> set[Node]:
    """Values whose memory is returned, whole or in part."""
    found = set(gm.graph.output_node().all_input_nodes)
    for node in reversed(gm.graph.nodes):
        if node in found:
            found.update(viewed_args(node))
    return found


def _swap(node: Node) -> None:
    if node.target in COMMUTATIVE and len(node.all_input_nodes) == 2 and not node.kwargs:
        node.args = node.args[::-1]


def _insert(gm: GraphModule, after: Node, target: object, *args: object) -> Node:
    with gm.graph.inserting_after(after), after.meta["val"].fake_mode:
        node = gm.graph.call_function(target, (after, *args))  # type: ignore[arg-type]
        node.meta["val"] = target(after.meta["val"], *args)  # type: ignore[operator]
    return node


def _redirect(node: Node, last: Node, new: set[Node]) -> None:
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in new and user.op != "output")


def _copy(gm: GraphModule, node: Node) -> None:
    clone = _insert(gm, node, aten.clone.default)
    _redirect(node, clone, {clone})


def _look_around(gm: GraphModule, node: Node) -> None:
    """A new axis in front and away again."""
    there = _insert(gm, node, aten.unsqueeze.default, 0)
    back = _insert(gm, there, aten.squeeze.dim, 0)
    _redirect(node, back, {there, back})


def _look_flat(gm: GraphModule, node: Node) -> None:
    """The last two axes made one, and two again; an expand to itself where there are none, or they are no numbers."""
    shape = node.meta["val"].shape
    if len(shape) < 3 or not all(isinstance(size, int) for size in shape[1:]):
        same = _insert(gm, node, aten.expand.default, [-1] * len(shape))
        _redirect(node, same, {same})
        return
    flat = _insert(gm, node, aten.view.default, [-1, *shape[1:-2], shape[-2] * shape[-1]])
    back = _insert(gm, flat, aten.view.default, [-1, *shape[1:]])
    _redirect(node, back, {flat, back})
