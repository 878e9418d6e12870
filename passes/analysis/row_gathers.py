"""row_gathers: rows taken by number, and written by place: where the numbers say which rows, those; else all, or none.

    keys = records[row - back]          each row and so many before it
    x[order // k], y[inverse of order]  each row its own: picks in the order of their experts, and back
    q[grid], scores[request, column]    each row its own
    h[logit_rows]                       the rows that logit_rows says
    keys[(row - back)[logit_rows]]      and so many before each
    ring[slot or nobody's] = records    the rows that the ring keeps
    entries[...] = latent               all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import ops
from torch.fx import Node

from v41.passes.analysis import layouts
from v41.passes.analysis.algebra import sizes
from v41.passes.analysis.layouts import GRID, ROWS, SORTED, Layout, Space
from v41.passes.analysis.meanings import Meaning
from v41.passes.analysis.row_flows import SAME, Flow, Look, Made, Value, argument, local, ndim, steps, tensors
from v41.passes.matching import fake, shape

aten, prims = ops.aten, ops.prims


def embedding(node: Node, look: Look) -> Made | str:
    table, index = cast("tuple[Node, Node]", node.args[:2])
    return local(look.layout(index) if look.layout(table) is None else "reads rows of a table of rows", node, look)


def index_select(node: Node, look: Look) -> Made | str:
    source, dim, index = cast("tuple[Node, int, Node]", node.args)
    indices: list[Node | None] = [*[None] * (dim % ndim(node)), index]
    return _taken(node, source, indices, look)


def gather(node: Node, look: Look) -> Made | str:
    source, dim, index = cast("tuple[Node, int, Node]", node.args[:3])
    layout, places = look.layout(source), look.layout(index)
    if layout is None and (places is None or places.space.kind != SORTED):
        beside = () if places is None else [at for at in places.dims if at != dim % ndim(node)]
        if any(sizes(source)[at] != sizes(index)[at] for at in beside):
            return "takes elements of a table by the places of rows"
        return local(places, node, look)
    if layout is None or layout != places or any(sizes(source)[at] != sizes(index)[at] for at in layout.dims):
        return "pairs rows with others"
    return local(layouts.apart(layout, [dim], ndim(node)), node, look)


def index(node: Node, look: Look) -> Made | str:
    source, indices = cast("tuple[Node, Sequence[Node | None]]", node.args)
    return _taken(node, source, indices, look)


def _taken(node: Node, source: Node, indices: Sequence[Node | None], look: Look) -> Made | str:
    """source[indices]: dimensions that are indexed give way to those of the indices."""
    used = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(fake(index).dtype in (torch.bool, torch.uint8) for index in used.values()):  # type: ignore[union-attr]
        return "takes as many rows as a mask has"
    wide = max(len(shape(index)) for index in used.values())
    dims = list(used)
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    broad = sizes(node)[start : start + wide]
    places = layouts.aligned(broad, [(_rows_of(index, look), sizes(index)) for index in used.values()])
    if isinstance(places, str):
        return places
    moved = None if places is None else places.by(start)
    layout = look.layout(source)
    if layout is None:
        return local(moved, node, look)
    if not layout.dims:
        return "mixes rows"
    if not any(dim in used for dim in layout.dims):
        return "pairs rows with others" if moved is not None else local(_beside(layout, used, start, wide), node, look)
    return _rows_taken(node, source, used, moved, look)


def _rows_of(index: Node, look: Look) -> Layout | None:
    """Of an index. A place depends on all rows, but who looks there finds what is its own."""
    meaning = look.meaning(index)
    return _each_row(look) if meaning is not None and meaning.of == "place" else look.layout(index)


def _each_row(look: Look) -> Layout:
    return Layout(Space(ROWS, (look.rows,)), (0,))


def _beside(layout: Layout, used: dict[int, Node], start: int, wide: int) -> Layout:
    """A layout whose dimensions are not indexed."""
    behind = [dim - sum(each < dim for each in used) for dim in layout.dims]
    return layout.at(*(dim if dim < start else dim + wide for dim in behind))


def _rows_taken(node: Node, source: Node, used: dict[int, Node], moved: Layout | None, look: Look) -> Made | str:
    """Rows of `source` by number."""
    layout, numbers = look.layout(source), [(arg, SAME) for arg in used.values()]
    assert layout is not None
    lengths = [sizes(source)[dim] for dim in layout.dims]
    kind, whole, alone = layout.space.kind, lengths == list(layout.space.sizes), len(used) == 1
    meant = [look.meaning(used.get(dim)) for dim in layout.dims]
    of = [meaning and meaning.of for meaning in meant]
    first = meant[0]
    if kind == GRID and whole and of == ["request", "column of row"] and len(used) == 2:
        return Value(moved), [(source, SAME), *numbers]
    if kind == GRID:
        return "takes parts of a grid"
    if kind == ROWS and whole and moved is not None and first is not None and first.of == "row":
        if not first.natural or first.high > 0:
            return "may read rows behind its own"
        return Value(moved), [(source, Flow("back", -first.low, why="reads rows before its own")), *numbers]
    if kind == ROWS and first is not None and first.of == "pick" and lengths[0] == look.rows * first.low:
        keys = Meaning("keys", by=first.by) if alone and _sorts(first, source) else None
        return Value(moved, keys), [(source, SAME), *numbers]
    if kind == SORTED and whole and first is not None and first.of == "place" and first.by == layout.space.by:
        return Value(moved), [(source, SAME), *numbers]
    if kind == ROWS and whole and of == ["grid"] and alone and layout.dims == (0,):
        grid = sizes(used[0])  # requests and columns
        if len(grid) != 2 or grid[0] == grid[1]:
            return "takes a grid whose sides cannot be told apart"
        return Value(Layout(Space(GRID, grid), (0, 1))), [(source, SAME), *numbers]
    index = used[layout.dims[0]]
    if kind == ROWS and whole and alone and index.op == "placeholder" and moved is None:
        told = look.meaning(source)
        rows = replace(told, of="row of chosen", by=(index,)) if told is not None and told.of == "row" else None
        return Value(None, rows), [(source, Flow("chosen", index=index, why="takes the rows it is told")), *numbers]
    if kind == ROWS and whole and alone and moved is None and first is not None and first.of == "row of chosen":
        if not first.natural or first.high > 0:
            return "may read rows behind its own"
        flow = Flow("chosen", -first.low, first.by[0], "reads rows before those it is told")
        return Value(), [(source, flow), *numbers]
    return "takes rows by numbers that say nothing of them"


def _sorts(pick: Meaning, source: Node) -> bool:
    """Whether `source` is what the sort of `pick` has sorted."""
    sort = pick.by[-1]
    return len(pick.by) == 1 and _plain(cast("Node", sort.args[0])) is _plain(source)


def _plain(node: Node) -> Node:
    while node.target in (aten.view.default, aten._unsafe_view.default, aten.clone.default):
        node = cast("Node", node.args[0])
    return node


# ---- picks in the order of their experts -----------------------------------------------------------------------------


def sort(node: Node, look: Look) -> Made | str:
    """Along other dimensions it mixes none; of all picks it makes an order, or from an order its inverse."""
    source = cast("Node", node.args[0])
    layout, meant = look.layout(source), look.meaning(source)
    if layout is None or layout.dims != (0,) or ndim(node) > 1:
        dim = cast("int", argument(node, 1, "dim", -1))
        return local(layout if layout is None else layouts.apart(layout, [dim], ndim(node)), node, look)
    (total,) = sizes(source)
    if argument(node, 2, "descending", False):
        return "sorts rows"
    if layout.space.kind == SORTED and meant is not None and meant.of == "pick" and meant.by == layout.space.by:
        place = Value(_each_row(look).at(), Meaning("place", by=meant.by))
        return (Value(_each_row(look)), place), [(source, SAME)]
    if layout.space.kind != ROWS or not (total / look.rows).is_Integer:
        return "sorts rows"
    order = Layout(Space(SORTED, (total,), (node,)), (0,))
    pick = Meaning("pick", int(total / look.rows), by=(node,))
    return (Value(order, Meaning("keys", by=(node,))), Value(order, pick)), [(source, SAME)]


def searchsorted(node: Node, look: Look) -> Made | str:
    """Where the run of each key ends: #(keys <= e) for e = 0, 1, ..."""
    keys, numbers = cast("tuple[Node, Node]", node.args[:2])
    meant, layout = look.meaning(keys), look.layout(keys)
    right = node.kwargs.get("right") or node.kwargs.get("side") == "right"
    counts_up = numbers.target is prims.iota.default and steps(numbers) == (0, 1)
    if layout is None and look.layout(numbers) is None:
        return local(None, node, look)
    if meant is None or meant.of != "keys" or layout is None or not right or not counts_up or node.kwargs.get("sorter"):
        return "counts rows"
    return Value(layout.at(), Meaning("ends", by=meant.by)), [(keys, SAME)]


def grouped_product(node: Node, look: Look) -> Made | str:
    """A row of x meets the weights of the run it lies in, that is of its own key."""
    x, weights, ends = node.args[0], node.args[1], argument(node, 2, "offs")
    layout, meant = look.layout(x), look.meaning(ends)
    if layout is None and look.layout(ends) is None and look.layout(weights) is None:
        return local(None, node, look)
    fits = layout is not None and layout.space.kind == SORTED and layout.dims == (0,) and len(node.args) <= 3
    fits = fits and len(shape(cast("Node", x))) == 2 and look.layout(weights) is None
    if not fits or meant is None or meant.of != "ends" or meant.by != layout.space.by:  # type: ignore[union-attr]
        return "groups rows in an order unknown"
    return local(layout, node, look)


# ---- writes ----------------------------------------------------------------------------------------------------------


def index_put(node: Node, look: Look) -> Made | str:
    """A cache written by place. Its last slot is nobody's: rows that a ring does not keep go there."""
    cache, places, values = cast("tuple[Node, Sequence[Node | None], Node]", node.args[:3])
    if look.layout(cache) is not None or argument(node, 3, "accumulate", False):
        return "writes rows by value"
    meant, place = look.meaning(places[0]), places[0]
    by_row = place is not None and sizes(place) == (look.rows,) and sizes(values)[:1] == (look.rows,)
    by_row = by_row and look.layout(values) == look.layout(place) == _each_row(look)
    flow = Flow("every", why="is written into a cache")
    if by_row and meant is not None and meant.of == "kept" and sizes(cache)[0] - 1 == meant.high:
        flow = Flow("last", max(meant.low, 0), why="is written into a ring, which keeps the last rows")
    decide = Flow("every", why="says where a cache is written")
    return Value(), [(cache, SAME), (values, flow), *((place, decide) for place in places if place is not None)]


def copy(node: Node, look: Look) -> Made | str:
    return Value(), [(arg, Flow("every", why="is written into memory")) for arg in tensors(node)]
