"""row_rules: which rows of its operands an operator reads for a row of its result. An operator not in here mixes rows.

    RULES[target](node, look) -> (what is known of each result, which rows of each operand it reads), or why it mixes

Sums over ranks add row to row: all ranks run one program on batches of one size, which they compare line by line before
the first step, so what is decided here is decided on all of them.

Absent on purpose: `as_strided` and `resize_` (memory, not rows), `nonzero`, `unique` and x[mask] (rows become sizes),
`index_add` and `scatter` on rows (places by value), `reduce_scatter` and `all_to_all` (rows go to other ranks),
`dropout` and all that draws numbers (a row's number is that of its place).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import ops
from torch.fx import Node

from v41._compat import OpOverload
from v41.passes.analysis import layouts, row_gathers
from v41.passes.analysis.algebra import sizes
from v41.passes.analysis.effects import written_args
from v41.passes.analysis.layouts import ROWS, SORTED, Found, Layout, Space
from v41.passes.analysis.meanings import Meaning
from v41.passes.analysis.row_flows import (
    SAME,
    Flow,
    Look,
    Made,
    Rule,
    Value,
    argument,
    dims_of,
    local,
    ndim,
    steps,
    tensors,
)
from v41.passes.matching import shape

aten, prims, c10d = ops.aten, ops.prims, ops._c10d_functional
LONGEST_WINDOW = 4096  # of which each offset is known


def pointwise(node: Node, look: Look) -> Made | str:
    operands = [(look.layout(arg), sizes(arg)) for arg in tensors(node)]
    layout = operands[0][0] if len(operands) == 1 else None
    if layout is not None and not layout.dims and look.meant(node) == look.meaning(tensors(node)[0]):
        return local(layout, node, look)  # a cast or a copy of what sums all rows up
    return local(layouts.aligned(sizes(node), operands), node, look)


def of_first(move: Callable[[Layout, Node], Found]) -> Rule:
    """The rule of an operator whose first argument alone has rows, which `move` finds again in the result."""

    def rule(node: Node, look: Look) -> Made | str:
        layout = look.layout(node.args[0])
        if any(look.layout(arg) is not None for arg in tensors(node) if arg is not node.args[0]):
            return "reads rows to place rows"
        return local(layout if layout is None else move(layout, node), node, look)

    return rule


def along(position: int, name: str = "dim", default: Any = -1) -> Rule:
    """Works along dimensions and keeps them."""
    return of_first(
        lambda layout, node: layouts.apart(layout, dims_of(argument(node, position, name, default)), ndim(node))
    )


def reduction(position: int, keep_position: int, name: str = "dim") -> Rule:
    def move(layout: Layout, node: Node) -> Found:
        keep = bool(argument(node, keep_position, "keepdim", False))
        return layouts.reduced(layout, dims_of(argument(node, position, name)), ndim(node), keep)

    return of_first(move)


def _view(layout: Layout, node: Node) -> Found:
    return layouts.reshaped(layout, sizes(cast("Node", node.args[0])), sizes(node))


def _permute(layout: Layout, node: Node) -> Found:
    order = list(range(ndim(node)))
    if node.target is aten.permute.default:
        order = list(cast("Sequence[int]", node.args[1]))
    else:
        a, b = node.args[1:3] if node.target is aten.transpose.int else (0, len(order) - 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return layouts.permuted(layout, order)


def _expand(layout: Layout, node: Node) -> Found:
    old, new = sizes(cast("Node", node.args[0])), sizes(node)
    moved = layout.by(len(new) - len(old))
    return moved if all(new[dim] == old[dim - len(new)] for dim in moved.dims) else "repeats rows"


def _bits(layout: Layout, node: Node) -> Found:  # another size of element changes the last dimension
    return layout if ndim(node) - 1 not in layout.dims else "views rows as something else"


def _pad(layout: Layout, node: Node) -> Found:
    padded = len(cast("Sequence[int]", node.args[1])) // 2
    return layouts.apart(layout, range(ndim(node) - padded, ndim(node)), ndim(node))


def _select(layout: Layout, node: Node) -> Found:
    return layouts.reduced(layout, [cast("int", argument(node, 1, "dim", 0))], ndim(node), keep=False)


def _split(node: Node, look: Look) -> Made | str:
    layout, dim = look.layout(node.args[0]), argument(node, 2, "dim", 0)
    return local(layout if layout is None else layouts.apart(layout, [dim], ndim(node)), node, look)


def _unbind(layout: Layout, node: Node) -> Found:
    return layouts.reduced(layout, [argument(node, 1, "dim", 0)], ndim(node), keep=False)


def _cat(node: Node, look: Look) -> Made | str:
    parts, dim = cast("Sequence[Node]", node.args[0]), argument(node, 1, "dim", 0)
    result = list(sizes(node))
    known = [(layout, sizes(part)) for part in parts if (layout := look.layout(part)) is not None]
    if not known:
        return local(None, node, look)
    layout = known[0][0]
    if any(other != layout for other, _ in known):
        return "pairs rows with others"
    if len(known) < len(parts) and layout.space.kind == SORTED:
        return "pairs sorted rows with their places"
    return local(layouts.apart(layout, [dim], len(result)), node, look)


def _all_gather(node: Node, look: Look) -> Made | str:
    """[ranks * rows, ..]: the rows of each rank behind those of the one before. What views them apart finds them."""
    layout = look.layout(node.args[0])
    if layout is None:
        return local(None, node, look)
    if layout.space.kind != ROWS or layout.dims != (0,) or not isinstance(node.args[1], int):
        return "gathers rows in an order unknown"
    why = "is put beside those of other ranks"
    return Value(None, Meaning("ranks", node.args[1])), [(cast("Node", node.args[0]), Flow("every", why=why))]


def _wait(node: Node, look: Look) -> Made | str:
    (source,) = tensors(node)
    return Value(look.layout(source), look.meaning(source)), [(source, SAME)]


def _view_of(node: Node, look: Look) -> Made | str:
    meant, new = look.meaning(node.args[0]), sizes(node)
    if meant is not None and meant.of == "ranks" and new[:2] == (meant.low, look.rows):
        return Value(Layout(Space(ROWS, (look.rows,)), (1,))), [(tensors(node)[0], SAME)]
    return of_first(_view)(node, look)


def _product(node: Node, look: Look) -> Made | str:
    *others, left, right = node.args[:3] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args[:2]
    if any(look.layout(other) is not None for other in others):
        return "adds rows to a product"
    found = layouts.multiplied(look.layout(left), look.layout(right), batches=len(shape(node)) - 2)
    return local(found, node, look)


def _iota(node: Node, look: Look) -> Made | str:
    length, (start, step) = sizes(node)[0], steps(node)
    if length == look.rows and step == 1 and isinstance(start, int):
        return Value(Layout(Space(ROWS, (length,)), (0,)), Meaning("row", start, start, start >= 0)), []
    if not (length.is_Integer and isinstance(start, int) and isinstance(step, int) and length > 0):
        return Value(), []
    ends = sorted((start, start + (int(length) - 1) * step))
    each = tuple(start + i * step for i in range(int(length))) if length <= LONGEST_WINDOW else ()
    return Value(None, Meaning("number", ends[0], ends[1], ends[0] >= 0, offsets=each)), []


def rule_of(node: Node) -> Rule | None:
    """The rule of an operator; None for one that is not known."""
    if node.target in RULES:
        return RULES[node.target]
    is_pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return pointwise if is_pointwise and not random and not written_args(node) else None


RULES: dict[object, Rule] = {
    prims.iota.default: _iota,
    aten.full.default: lambda node, look: local(None, node, look),
    aten.scalar_tensor.default: lambda node, look: local(None, node, look),
    **{op: _view_of for op in (aten.view.default, aten._unsafe_view.default)},
    aten.unsqueeze.default: of_first(_view),
    **{op: of_first(_view) for op in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)},
    **{op: of_first(_permute) for op in (aten.permute.default, aten.transpose.int, aten.t.default)},
    aten.expand.default: of_first(_expand),
    aten.repeat.default: of_first(_expand),
    aten.view.dtype: of_first(_bits),
    aten.alias.default: pointwise,
    aten.detach.default: pointwise,
    aten._to_copy.default: pointwise,
    aten.constant_pad_nd.default: of_first(_pad),
    aten.slice.Tensor: along(1, default=0),
    aten.select.int: of_first(_select),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: of_first(_unbind),
    aten.cat.default: _cat,
    **{op: along(1) for op in (aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default)},
    **{op: along(1) for op in (aten._softmax.default, aten._log_softmax.default)},
    **{op: along(1, "dims") for op in (aten.flip.default, prims.rev.default)},
    aten.topk.default: along(2),
    aten.sort.default: row_gathers.sort,
    aten.sort.stable: row_gathers.sort,
    **{op: reduction(1, 2) for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)},
    **{op: reduction(1, 2) for op in (aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims, aten.prod.dim_int)},
    **{op: reduction(1, 2) for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)},
    aten.logsumexp.default: reduction(1, 2),
    aten.linalg_vector_norm.default: reduction(2, 3),
    **{op: _product for op in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)},
    c10d.all_reduce.default: of_first(lambda layout, node: layout),
    c10d.wait_tensor.default: _wait,
    c10d.all_gather_into_tensor.default: _all_gather,
    aten._grouped_mm.default: row_gathers.grouped_product,
    aten.embedding.default: row_gathers.embedding,
    aten.index.Tensor: row_gathers.index,
    aten.index_select.default: row_gathers.index_select,
    aten.gather.default: row_gathers.gather,
    aten.searchsorted.Tensor: row_gathers.searchsorted,
    aten.index_put.default: row_gathers.index_put,
    aten.index_put_.default: row_gathers.index_put,
    aten.copy_.default: row_gathers.copy,
}
