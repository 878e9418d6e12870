"""replay_edit: what is late is computed of kept rows alone: nodes stay, what they read and how large they are change.

    X                                  whole[T, ...]
    kept = X[kept_rows]                a gather, once for each early value that something late reads
    f(kept)                            the same node, [K, ...]
    records[rows]       ->             records[place of rows among those kept]
    q[grid], s[request, column]   ->   the grid of kept rows, [requests, the most kept rows of one]
    h[logit_rows]       ->             h[place of logit_rows]

All that is early comes first, then the gathers, then what is late: the program has one seam. A write of a cache stays
behind the reads of what was there before.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor, ops
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from v41._compat import as_python, fake_mode_of, lazy_graph_module, without_guards
from v41.passes.analysis.algebra import Expr, expression
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.sizes import symbols_in
from v41.passes.matching import fake, shape
from v41.passes.replay_rows import TAKES_ROWS, LateRows, indices, row_numbers
from v41.passes.replay_sizes import SIZES_AT, is_number
from v41.regions import body_of, invoke_subgraph

aten, prims = ops.aten, ops.prims


class Resize:
    """Values as they are of kept rows: symbols that stand for all rows give way to those of the kept ones. Nodes of one
    shape have one fake tensor, for who shares memory is told by operators, never by fake storages."""

    def __init__(self, gm: GraphModule, renamed: dict[str, Node]) -> None:
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.mode = fake_mode_of([node.meta.get("val") for node in inputs])
        sizes = [size for node in inputs for size in (*shape(node), node.meta.get("val"))]
        self.known: dict[str, Any] = {as_python(size): size for size in sizes if isinstance(size, SymInt)}
        self.named = self.known | {symbol: shape(node)[0] for symbol, node in renamed.items()}
        self.renamed = renamed.keys()
        self._sizes: dict[str, Any] = {}
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self, value))
        if not isinstance(value, Tensor):
            return self.size(value) if isinstance(value, SymInt) else value
        if self.renamed.isdisjoint(symbols_in(value)):
            return value
        key = (*map(as_python, (*value.shape, *value.stride())), value.ndim, value.dtype, value.device)
        if key not in self._tensors:
            sizes, strides = (tuple(map(self.size, each)) for each in (value.shape, value.stride()))
            self._tensors[key] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return self._tensors[key]

    def size(self, size: Any) -> Any:
        if not isinstance(size, SymInt):
            return size
        text = as_python(size)
        if text not in self._sizes:
            scope = {"math": torch.sym_max, "max": torch.sym_max, "min": torch.sym_min, **self.named}
            self._sizes[text] = eval(text, scope)
        return self._sizes[text]


class Editor:
    """Edits a program in place so that its late rows are the kept ones."""

    def __init__(self, gm: GraphModule, rows: LateRows) -> None:
        self.gm, self.graph, self.rows = gm, gm.graph, rows
        self.kept, self.ragged, self.late = rows.kept, rows.kept.ragged, rows.late
        self.resize = Resize(gm, rows.renamed)
        self.made: dict[Node, None] = {}  # what the seam holds, in order
        self.places: dict[Node, Node] = {}  # numbers of rows -> where these are among those kept
        self._taken: dict[object, Node] = {}
        self._bodies: dict[GraphModule, str] = {}  # -> what it is called with the sizes of kept rows
        self._constants: dict[Node, Node] = {}
        self.seam: list[Node] = []  # those of `made` that rest on early nodes alone, in order
        self.same: dict[Node, Node] = {}  # node of the seam -> what it equals where every row is kept

    def edit(self) -> None:
        with self.resize.mode, without_guards(self.resize.mode):
            for node in [node for node in self.graph.nodes if node in self.late]:
                self._rewire(node)
        order = self._order()
        last = next(iter(self.graph.nodes))
        for node in order:
            if node is not last and node.op != "output":
                last.append(node)
            last = node

    def holds(self, node: Node) -> bool:
        """Whether `node` is of the seam, or late."""
        return node in self.made or node in self.late

    # ---- a late node

    def _rewire(self, node: Node) -> None:
        replaced = dict(self._indices(node))
        whole = node.args[0] if node.target in TAKES_ROWS and self.rows.reads_whole(node, node.args[0]) else None  # type: ignore[arg-type]

        def operand(arg: Node) -> Node:
            return replaced.get(arg) or (arg if arg is whole else self._late(arg))

        self._before = node
        args, kwargs = self._arguments(node, operand)
        if node.target is invoke_subgraph:
            args = (self._body(node), f"{args[1]} of kept rows", *args[2:])
        before, node.args, node.kwargs = node.all_input_nodes, args, kwargs
        for each in before:
            if each.op == "get_attr" and not each.users:
                self.graph.erase_node(each)
        if not self.rows.compacts(node):
            node.meta["val"] = self.resize(node.meta.get("val"))

    def _arguments(self, node: Node, operand: Callable[[Node], Node]) -> tuple[Any, Any]:
        """Those of `node`, with other operands: of numbers, those that are sizes of its result."""

        def other(arg: Node) -> Node:
            return arg if is_number(arg) else operand(arg)

        at = range(len(node.args)) if node.target is invoke_subgraph else [SIZES_AT.get(node.target)]
        args = tuple(map_arg(arg, operand if i in at else other) for i, arg in enumerate(node.args))
        return args, map_arg(node.kwargs, other)

    def _indices(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Indices of `node` that are numbers of rows, and what they are among kept rows."""
        numbers, grid, columns = self.rows.numbers(node), self.rows.grid(node), self.rows.grid_columns(node)
        forward = self.rows.forward
        before = any(flow.how in ("back", "kept") for _, flow in forward.flows.get(node, []))
        assert not before or row_numbers(forward, node), "rows before others are found by number"
        if numbers is not None and (node.args[0] in self.late):
            yield numbers, self._place(self._late(numbers))
        if grid is not None:
            yield grid, self._grid
        if columns is not None:
            yield columns, self._columns
        of_chosen = self.rows.numbers_of_chosen(node) if node.args[0] in self.late else None
        for index in indices(node):
            if index in self.kept.told or index is of_chosen:
                yield index, self._place(index)

    def _late(self, arg: Node) -> Node:
        """`arg` for one that reads kept rows."""
        if arg in self.late or arg in self.made or arg.op == "get_attr":
            return arg
        if isinstance(arg.meta.get("val"), SymInt):
            return self._size(arg) if self.rows.follows_rows(arg) else arg
        layout = self.rows.forward.layout(arg)
        if layout is not None:
            (dim,) = layout.dims
            return self._once(("rows of", arg), aten.index.Tensor, (arg, [*[None] * dim, self.kept.rows]), arg)
        return self._constant(arg) if self.rows.follows_rows(arg) else arg

    def _constant(self, node: Node) -> Node:
        """What early nodes have too: another one, in front of the late node that reads it first."""
        if node not in self._constants:
            with self.graph.inserting_before(self._before):
                made = self._constants[node] = self.graph.node_copy(node, lambda arg: arg)
                made.args, made.kwargs = self._arguments(node, self._late)
            made.meta["val"] = self.resize(node.meta["val"])
            self.late[made] = None
        return self._constants[node]

    # ---- the seam

    def _once(
        self, key: object, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """A node of the seam, made when it is first asked for."""
        if key not in self._taken:
            with self.graph.inserting_before(self.graph.output_node()):
                node = self.graph.call_function(target, args, kwargs or {})
            trace = like.meta.get("stack_trace")
            node.meta |= {"stack_trace": trace} if trace else {}
            given, named = map_arg((args, kwargs or {}), lambda arg: arg.meta["val"])
            node.meta["val"] = target(*given, **named)
            self._taken[key] = node
            self.made[node] = None
        return self._taken[key]

    def _place(self, rows: Node) -> Node:
        """Where `rows` are among those kept; of one that is not, where the next one is."""
        place = self._once(("place of", rows), aten.searchsorted.Tensor, (self.kept.rows, rows), rows)
        return self.places.setdefault(rows, place)

    @cached_property
    def _first(self) -> Node:
        assert self.ragged.first_rows is not None  # or nothing would mean a grid
        return self._place(self.ragged.first_rows)

    @cached_property
    def _last_row(self) -> Node:
        count = self._written(expression(shape(self.kept.rows)[0]))
        return self._once("last row", operator.sub, (count, 1), self.kept.rows)

    @cached_property
    def _grid(self) -> Node:
        """[requests, the most kept rows of one]: first_rows + columns, as the whole program has it."""
        first = self._once("first of each", aten.unsqueeze.default, (self._first, 1), self.kept.rows)
        place = self._once("grid of kept", aten.add.Tensor, (first, self.kept.longest), self.kept.rows)
        return self._once("grid", aten.clamp_max.default, (place, self._last_row), self.kept.rows)

    @cached_property
    def _columns(self) -> Node:
        """[K] which of the kept rows of its request each is; 0 of pads, whose column is 0 in the whole program."""
        assert self.ragged.requests is not None and self.ragged.columns is not None  # likewise
        count = self._written(expression(shape(self.kept.rows)[0]))
        device, like = self.kept.rows.meta["val"].device, self.kept.rows
        kwargs = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
        each = self._once("each kept", prims.iota.default, (count,), like, kwargs)
        of_request = self._late(self.ragged.requests)
        first = self._once("first of its request", aten.index.Tensor, (self._first, [of_request]), like)
        behind = self._once("behind the first", aten.sub.Tensor, (each, first), like)
        columns = self._late(self.ragged.columns)
        column = self._once("column", aten.minimum.default, (behind, columns), like)
        self.same[column] = self.ragged.columns
        return column

    # ---- sizes

    def _size(self, node: Node) -> Node:
        """The number that `node` is of kept rows."""
        return self._written(expression(self.resize.size(node.meta["val"])))

    def _written(self, expr: Expr) -> Node:
        """A node that is `expr`, a sum of products of symbols of inputs."""
        key = ("size", expr)
        if key in self._taken:
            return self._taken[key]
        if expr.is_Symbol:
            found = next((n for n in self.graph.nodes if n.op == "placeholder" and _is(n, expr)), None)
            if found is None:
                tensor, dim = next(_of_size(self.graph, expr))
                found = self._once(key, aten.sym_size.int, (tensor, dim), tensor)
            self._taken[key] = found
            return found
        if expr.is_Pow:
            base, exponent = expr.args
            parts: list[Any] = [self._written(base)] * int(exponent)
        else:
            parts = [int(part) if part.is_Integer else self._written(part) for part in expr.args]
        combine: Callable[..., Any] = operator.add if expr.is_Add else operator.mul
        whole = parts[0]
        for i, part in enumerate(parts[1:]):
            last = i == len(parts) - 2
            whole = self._once(key if last else (*key, i), combine, (whole, part), self.kept.rows)
        return whole

    # ---- bodies

    def _body(self, call: Node) -> Node:
        """Refers to the body of `call` with the sizes that kept rows have; one for all calls of it."""
        body, name = body_of(call), f"{call.args[0].target}_of_kept_rows"  # type: ignore[union-attr]
        if body not in self._bodies:
            same = sum(each.startswith(name) for each, _ in self.gm.named_children())  # of a seam further in
            self._bodies[body] = name = f"{name}_{same}" if same else name
            self.gm.add_submodule(name, resized(body, self.resize))
        with self.graph.inserting_before(call):
            found = self.graph.get_attr(self._bodies[body])
        self.late[found] = None
        return found

    # ---- order

    def _order(self) -> list[Node]:
        """All nodes: what is early, the seam, what is late; each after what it reads, and a write after the reads of
        what was there before. Writes that wait for late reads stand behind the seam with these."""
        nodes = list(self.graph.nodes)
        at = {node: i for i, node in enumerate(nodes)}
        needs = {node: dict.fromkeys(node.all_input_nodes) for node in nodes}
        for node in nodes:
            needs[node] |= self._waits_for(node, at)
        group = dict[Node, int]()
        for node in nodes:
            own = 1 if node in self.made else 3 if node in self.late else 0
            group[node] = max([own, *(group.get(need, 0) for need in needs[node])])
        for node in nodes:  # copies back into inputs end the program, as they did
            if node.op == "output" or (node in self.rows.forward.effects and effect_of(node) == "writes"):
                group[node] = 4
        for node in reversed(nodes):  # what has no rows stays with who reads it: weights, entries of a cache
            if node.op not in ("placeholder", "output") and not self._works_on_rows(node) and node.users:
                group[node] = max(group[node], min(group[user] for user in node.users))
        waits = [node for node in nodes if group[node] == 3 and node not in self.late and self._works_on_rows(node)]
        while waits:
            node = waits.pop()
            if group[node] == 3:
                group[node] = 2
                waits += needs[node]
        order = _sorted(nodes, needs, lambda node: (group[node], at[node]))
        self.seam = [node for node in order if node in self.made and group[node] == 1]
        return order

    def _waits_for(self, node: Node, at: dict[Node, int]) -> dict[Node, None]:
        """The reads of what is there before `node` writes."""
        state = node.args[0] if node.target is aten.index_put.default else None
        users = state.users if isinstance(state, Node) else ()
        return {user: None for user in users if user is not node and at[user] < at[node]}

    def _works_on_rows(self, node: Node) -> bool:
        """Whether it works on all rows, or as one of the seam or late ones on some."""
        around = (node, *node.all_input_nodes) if node not in self.rows.forward.effects else ()
        return any(each in self.made or self.rows.forward.layout(each) is not None for each in around)


def _is(node: Node, expr: Expr) -> bool:
    value = node.meta.get("val")
    return isinstance(value, SymInt) and expression(value) == expr


def _of_size(graph: Graph, expr: Expr) -> Iterator[tuple[Node, int]]:
    for node in graph.nodes:
        for dim, size in enumerate(shape(node)) if node.op == "placeholder" and fake(node) is not None else ():
            if expression(size) == expr:
                yield node, dim


def _sorted(
    nodes: list[Node], needs: dict[Node, dict[Node, None]], key: Callable[[Node], tuple[int, int]]
) -> list[Node]:
    """`nodes`, each behind all it needs, otherwise by key."""
    count = {node: len(needs[node]) for node in nodes}
    readers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for need in needs[node]:
            readers[need].append(node)
    ready = [(*key(node), node.name, node) for node in nodes if not count[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for reader in readers[node]:
            count[reader] -= 1
            if not count[reader]:
                heapq.heappush(ready, (*key(reader), reader.name, reader))
    assert len(order) == len(nodes), "a circle"
    return order


def resized(body: GraphModule, resize: Resize) -> GraphModule:
    """A copy of `body` for kept rows, those of the subgraphs it calls too."""
    graph, env = Graph(), dict[Node, Node]()
    held: dict[str, Any] = {}
    for node in body.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr":
            value = getattr(body, str(node.target))
            held[str(node.target)] = resized(value, resize) if isinstance(value, GraphModule) else value
        elif symbols_in(node.meta.get("val")) or isinstance(node.meta.get("val"), Tensor):
            env[node].meta["val"] = resize(node.meta["val"])
    copy = lazy_graph_module(held, graph)
    copy.meta = dict(body.meta)
    return copy
