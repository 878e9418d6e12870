"""replay_rows: which nodes of a program need no more rows than those that a batch keeps, and where their operands lie.

    x = norm(X)                      every row: a KV source writes an entry of each
    q = project(x)                   kept: who reads q needs the last rows of each request
    ring[last W rows] = records      kept, where records are

A node is *late* where the rows demanded of it (analysis/rows.py) are among those kept; so is one that only late nodes
read. What is late computes, for each kept row, what the whole program computes of that row, so late nodes read of early
ones the kept rows, and numbers of rows stay those of the whole program until something is indexed by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import SymInt, ops
from torch.fx import GraphModule, Node

from v41._compat import shape_ids, size_with, symbols_of
from v41.passes.analysis.algebra import expression
from v41.passes.analysis.effects import begins_collective
from v41.passes.analysis.layouts import GRID, ROWS
from v41.passes.analysis.meanings import Meaning
from v41.passes.analysis.row_flows import Flow
from v41.passes.analysis.rows import Demand, Forward, Ragged, RowDemand, ragged
from v41.passes.analysis.sizes import symbols_in
from v41.passes.matching import VIEWS, fake, same_sizes, shape
from v41.passes.replay_sizes import (
    CONSTANTS,
    CUTS,
    REGROUPS,
    is_number,
    is_uniform,
    others_than_sizes,
    simple,
    sizes_in_arguments,
    sizes_of,
)
from v41.regions import invoke_subgraph

aten, prims = ops.aten, ops.prims
TAKES_ROWS = (aten.index.Tensor, aten.index_select.default)
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)

KNOWN = "mixes rows in no way that row demand does not know"
CUT = "reads early values whose rows can be taken"
SIZED = "has sizes that follow from how many rows there are"


@dataclass(frozen=True)
class Kept:
    """The inputs of a batch that say which rows are kept. Naming them is a promise that no graph can prove:

    rows      ascending, each once: the last `last` rows of each chunk, and all of one whose logits are all returned;
              none of one that nobody goes on from but its request, by a next chunk that makes again what it reads.
              So with a row of logit_rows go the `last` - 1 before it; a row of logits that is not there is a pad
    longest   as long as the most of them that one request has
    inner     its rows are the last of each chunk likewise, and some pads, all of them among `rows`
    """

    rows: Node  # [K]
    longest: Node  # [Q]
    last: int
    ragged: Ragged
    inner: Kept | None = None  # what the batch keeps of these, for layers that need fewer: so trimmed already

    @property
    def told(self) -> dict[Node, int]:
        """Indices of rows that are kept -> so many before each are kept, too."""
        found = {} if self.ragged.logit_rows is None else {self.ragged.logit_rows: self.last - 1}
        return found if self.inner is None else found | {self.inner.rows: self.last - self.inner.last}

    @property
    def renamed(self) -> dict[str, Node]:
        """Symbol of the whole program -> the input whose size stands for it among kept rows."""
        named = ((self.ragged.positions, self.rows), (self.ragged.longest, self.longest))
        return {str(whole): kept for node, kept in named if node is not None for whole in symbols_in(shape(node)[:1])}

    def covers(self, demand: Demand) -> bool:
        """Whether rows so demanded are kept."""
        known = all(rows <= self.told.get(index, -1) for index, rows in demand.chosen.items())
        return not demand.every and demand.last <= self.last and known


def kept_levels(gm: GraphModule, called: Mapping[str, str]) -> list[Kept]:
    """What a batch says of the rows it keeps, by what the user calls inputs, the fewest first; none where it says
    nothing."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and fake(node) is not None]
    named = {called.get(node.name, "").rpartition(".")[2]: node for node in inputs}
    found, given = list[Kept](), ragged(gm, called)
    for name in ("inner", "kept"):
        rows, longest = named.get(f"{name}_rows"), named.get(f"{name}_longest")
        if rows is not None and longest is not None and given is not None:
            size = shape_ids([rows.meta["val"]]).get(str(shape(rows)[0]), "")
            last = re.fullmatch(r"last (\d+)", size)
            found += [Kept(rows, longest, int(last[1]), given)] if last else []
    return found


Problem = tuple[str, Node]  # the sentence that does not hold, and the node at fault


class LateRows:
    """Which nodes of `gm` are late. `problems`: those whose demand would allow it, and what stands in the way."""

    def __init__(self, gm: GraphModule, kept: Kept, demand: RowDemand) -> None:
        self.gm, self.kept, self.demand = gm, kept, demand
        self.forward: Forward = demand.forward
        self.renamed = kept.renamed
        self.problems: dict[Node, Problem] = {}
        self._mixed: dict[Forward, Node | None] = {}  # shared bodies, looked into once
        self._follow: dict[Node, bool] = {}
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._given = {symbol for node in inputs for symbol in symbols_in(node.meta.get("val"))}
        self.late: dict[Node, None] = dict.fromkeys(filter(self._by_demand, gm.graph.nodes))
        self._without_problems()
        for call in [node for node in self.late if node in self.forward.inside and self._narrows(node)]:
            self._take_out(call)
        early = [node for node in gm.graph.nodes if node in self.late and self._reads_long(node)]
        for node in early:
            self._take_out(node)
        for node in reversed(early):
            if self._is_as_long(node) and self.late.keys() >= node.users.keys():
                self.late[node] = None  # the seam takes rows of what it reads as well
        self._without_problems()
        self.late |= dict.fromkeys(node for node in gm.graph.nodes if self.compacts(node))
        for node in reversed(gm.graph.nodes):
            if node.users and node not in self.late and self._is_read_late(node) and self._may_move(node):
                self.late[node] = None

    # ---- who is late

    def demanded(self, node: Node) -> Demand:
        """Of a call, what is demanded of all its results."""
        if node not in self.forward.inside:
            return self.demand.of.get(node, Demand())
        total = Demand()
        for user in node.users:
            total = total | self.demand.of.get(user, Demand())
        return total

    def _by_demand(self, node: Node) -> bool:
        if node.op != "call_function" or self.forward.layout(node) is None or node in self.forward.effects:
            return False
        demand = self.demanded(node)
        return bool(demand) and self.kept.covers(demand) and not self._counts_rows(node)

    def _counts_rows(self, node: Node) -> bool:
        return node.target is prims.iota.default

    def _without_problems(self) -> None:
        """Takes from `late` what cannot be computed of kept rows, and all that this needs whole."""
        found = True
        while found:
            found = False
            for node in list(self.late):
                problem = self.problem(node) or self._reader_problem(node) if node in self.late else None
                if problem is not None:
                    self.problems[node], found = problem, True
                    self._take_out(node)

    def _take_out(self, node: Node) -> None:
        stack = [node]
        while stack:
            each = stack.pop()
            if each in self.late:
                del self.late[each]
                stack += each.all_input_nodes
                stack += each.users if each in self.forward.inside else ()

    def _narrows(self, call: Node) -> bool:
        """Whether a late call reads early rows alone and makes less of them: it stays early. In the model these are the
        coefficients at the seam, a thousandth of a layer's work, which make one region with the norm beside them."""
        rows = [arg for arg in call.all_input_nodes if self.forward.layout(arg) is not None]
        read, made = (sum(map(_elements, each)) for each in (rows, [user for user in call.users if user.users]))
        return bool(rows) and self.late.keys().isdisjoint(rows) and made < read

    def _reads_long(self, node: Node) -> bool:
        """Whether it reads early rows that are as long as a context, and beside them nothing that is work: it stays
        early, for the seam would copy these. In the model candidates are chosen so, from all scores of their source,
        for a re-indexer with fewer rows."""
        if not any(map(self._is_long, node.all_input_nodes)):
            return False
        above, stack = {node}, [node]
        while stack:
            each = stack.pop()
            if each in self.forward.inside or each.target in PRODUCTS:
                return False
            new = [arg for arg in each.all_input_nodes if arg in self.late and arg not in above]
            above.update(new)
            stack += new
        return True

    def _is_long(self, node: Node) -> bool:
        layout = self.forward.layout(node)
        if layout is None or layout.space.kind != ROWS or fake(node) is None:
            return False
        return any(isinstance(size, SymInt) for dim, size in enumerate(shape(node)) if dim not in layout.dims)

    def _is_as_long(self, node: Node) -> bool:
        """Whether it makes one number of each that it reads."""
        rows = [arg for arg in node.all_input_nodes if self.forward.layout(arg) is not None]
        return len(rows) == 1 and same_sizes(shape(node), shape(rows[0]))

    def _may_move(self, node: Node) -> bool:
        """Whether it computes each row from the same row of its operands, all of which can be taken."""
        layout = self.forward.layout(node)
        if layout is None and fake(node) is not None and self.follows_rows(node):
            return self.is_constant(node)
        if node.op != "call_function" or node in self.forward.effects or layout is None or self._counts_rows(node):
            return False
        flows = self.forward.flows.get(node, [])
        rowwise = layout.space.kind == ROWS and bool(layout.dims) and all(flow.how == "same" for _, flow in flows)
        if not rowwise or node.target in TAKES_ROWS or self._reads_long(node):
            return False
        return self.problem(node) is None

    def _is_read_late(self, node: Node) -> bool:
        """Whether late nodes alone read it, and of it the rows that they have."""
        flows = (flow for user in node.users for arg, flow in self.forward.flows.get(user, []) if arg is node)
        return self.late.keys() >= node.users.keys() and all(flow.how == "same" for flow in flows)

    def compacts(self, node: Node) -> bool:
        """Whether `node`, whose result has no rows, reads late ones: those of logits, or what a ring keeps."""
        flows = self.forward.flows.get(node, [])
        source, flow = next(((each, f) for each, f in flows if f.how in ("chosen", "last")), (None, None))
        if source not in self.late or flow is None or self.forward.layout(node) is not None:
            return False
        most = self.kept.last if flow.how == "last" else self.kept.told.get(flow.index, -1)  # type: ignore[arg-type]
        return flow.rows <= most

    # ---- what stands in the way

    def problem(self, node: Node) -> Problem | None:
        """What keeps `node` from being computed of kept rows alone."""
        if node.target is invoke_subgraph:
            culprit = self._mixed_inside(self.forward.inside[node])
            if culprit is not None:
                return KNOWN, culprit
        if any(not self.renamed.keys().isdisjoint(symbols_of(size)) for size in sizes_in_arguments(node)):
            return SIZED, node
        if self._is_sized_elsewhere(self.forward, node):
            return SIZED, node
        for operand, flow in self.forward.flows.get(node, []):
            if flow.how == "every" or (flow.how in ("chosen", "last") and operand in self.late):
                return KNOWN, node
        return next(filter(None, (self._operand_problem(node, operand) for operand in node.all_input_nodes)), None)

    def _mixed_inside(self, inside: Forward) -> Node | None:
        if inside not in self._mixed:
            self._mixed[inside] = mixed_inside(inside, self._counts_inside)
        return self._mixed[inside]

    def _reader_problem(self, node: Node) -> Problem | None:
        """What reads `node` and needs it whole, or reads something else whose rows cannot be taken."""
        for user in node.users:
            if self.compacts(user):
                problem = next(filter(None, (self._operand_problem(user, each) for each in user.all_input_nodes)), None)
                if problem is not None:
                    return problem
            elif user not in self.late and self._uses(user):
                return SIZED if isinstance(user.meta.get("val"), SymInt) else KNOWN, user
        return None

    def _uses(self, node: Node) -> bool:
        """Whether a node that is not late makes something of a late value: not if nobody reads it, or it is a size that
        is the same for any rows."""
        if not node.users and node not in self.forward.effects and node.op != "output":
            return False
        return not isinstance(node.meta.get("val"), SymInt) or self.follows_rows(node)

    def _operand_problem(self, node: Node, operand: Node) -> Problem | None:
        if operand in self.late or operand.op == "get_attr":
            return None
        if begins_collective(operand):
            return CUT, operand  # it is there only once it was waited for
        layout, value = self.forward.layout(operand), operand.meta.get("val")
        if layout is not None:
            if operand is self.grid_columns(node) or self.reads_whole(node, operand):
                return None
            whole = layout.space.kind == ROWS and len(layout.dims) == 1 and fake(operand) is not None
            whole = whole and not self._is_sized_elsewhere(self.forward, operand)
            size = expression(shape(operand)[layout.dims[0]]) if whole else None
            return None if whole and size == self.forward.rows else (CUT, operand)
        if not self.follows_rows(operand) or operand is self.grid(node):
            return None
        if is_number(operand):
            return None if simple(value) or operand not in sizes_of(node) else (SIZED, operand)
        return None if self.is_constant(operand) else (SIZED, operand)

    def _is_sized_elsewhere(self, forward: Forward, node: Node) -> bool:
        """Whether another size than that of its rows follows from how many rows there are: [T, T]. Places have rows in
        no dimension, and are as many as what was sorted."""
        layout = forward.layout(node)
        if layout is None or not layout.dims or fake(node) is None:
            return False
        others = [size for dim, size in enumerate(shape(node)) if dim not in layout.dims]
        return any(not self.renamed.keys().isdisjoint(symbols_of(size)) for size in others)

    def _counts_inside(self, forward: Forward, node: Node) -> bool:
        """Whether a node of a body makes something else of another number of rows."""
        if any(is_number(arg) and self.follows_rows(arg) for arg in others_than_sizes(node)):
            return fake(node) is not None
        if forward.layout(node) is None and fake(node) is not None and self.follows_rows(node):
            return not self.is_constant(node)
        return self._is_sized_elsewhere(forward, node)

    def follows_rows(self, node: Node) -> bool:
        """Whether a size of `node`, or the number it is, follows from how many rows there are. A tensor with a size
        that no input has may: torch gives a slice up to such a number one of its own."""
        if node not in self._follow:
            symbols = symbols_in(node.meta.get("val"))
            made = fake(node) is not None and not symbols.keys() <= self._given
            self._follow[node] = made or not self.renamed.keys().isdisjoint(symbols)
        return self._follow[node]

    def is_constant(self, node: Node) -> bool:
        """Whether a tensor has the same numbers for any row: made of sizes, or repeated so many times."""
        if node.op != "call_function" or node.target not in (*CONSTANTS, *VIEWS):
            return False
        if not all(simple(size.meta["val"]) for size in sizes_of(node)):
            return False
        if node.target in CONSTANTS:
            return True
        base = node.all_input_nodes[0]
        if not self.follows_rows(base):
            return node.target is aten.expand.default  # others make rows of what had none
        if node.target in CUTS and any(is_number(arg) for arg in node.all_input_nodes):
            return False
        return self.is_constant(base) and (node.target not in (*REGROUPS, *CUTS) or is_uniform(base))

    # ---- indices

    def numbers(self, node: Node) -> Node | None:
        """The index of `node` that counts rows of the whole program; one by picks counts those that were sorted."""
        return next((index for index, meaning in row_numbers(self.forward, node) if not meaning.by), None)

    def numbers_of_chosen(self, node: Node) -> Node | None:
        """The index of `node` that counts rows of the whole program, for rows that were taken from it."""
        return self._index_that_means(node, "row of chosen")

    def grid(self, node: Node) -> Node | None:
        """The index of `node` that lays rows out by request and column."""
        return self._index_that_means(node, "grid")

    def grid_columns(self, node: Node) -> Node | None:
        """The index of `node` that says which column of its request a row is."""
        return self._index_that_means(node, "column of row")

    def _index_that_means(self, node: Node, of: str) -> Node | None:
        rows = node.target in TAKES_ROWS and self.forward.layout(cast("Node", node.args[0])) is not None
        meant = ((i, self.forward.meaning(i)) for i in (indices(node) if rows else ()))  # else entries of a table
        return next((index for index, meaning in meant if meaning is not None and meaning.of == of), None)

    def reads_whole(self, node: Node, operand: Node) -> bool:
        """Whether `node` may take rows of the whole `operand`, an early one, by the numbers they have there."""
        return node.target in TAKES_ROWS and operand is node.args[0] and self.numbers(node) is not None


def split_calls(kept: Kept, demand: RowDemand) -> list[Node]:
    """Calls of which some results are needed of kept rows alone and others of more."""
    found = []
    for call in demand.forward.inside:
        demands = [asked for user in call.users if (asked := demand.of.get(user))]
        if len({kept.covers(asked) for asked in demands}) == 2:
            found.append(call)
    return found


def _elements(node: Node) -> int:
    """Of one row, with 1 for sizes that change."""
    return math.prod(size_with(size, 1) for size in shape(node))


def mixed_inside(forward: Forward, counts_rows: Callable[[Forward, Node], bool]) -> Node | None:
    """The first node of a body that needs to know which rows there are, or writes."""
    for node in forward.gm.graph.nodes:
        inner = mixed_inside(forward.inside[node], counts_rows) if node in forward.inside else None
        counts = node.target is prims.iota.default and forward.layout(node) is not None
        counts = counts or counts_rows(forward, node)
        if inner is not None or node in forward.effects or counts or sizes_in_arguments(node):
            return inner or node
        if any(_by_number(forward, node, flow) for _, flow in forward.flows.get(node, [])):
            return node
    return None


def _by_number(forward: Forward, node: Node, flow: Flow) -> bool:
    layout = forward.layout(node)
    if flow.how in ("every", "chosen", "last") or (layout is not None and layout.space.kind == GRID):
        return True
    return flow.how in ("back", "kept") and not any(meaning.by for _, meaning in row_numbers(forward, node))


def indices(node: Node) -> list[Node]:
    """What `node` takes elements by."""
    given = node.args[1] if node.target is aten.index.Tensor else node.args[2:3] if node.target in TAKES_ROWS else ()
    return [index for index in given if isinstance(index, Node)]  # type: ignore[union-attr]


def row_numbers(forward: Forward, node: Node) -> list[tuple[Node, Meaning]]:
    """The indices of `node` that are numbers of rows."""
    meant = ((index, forward.meaning(index)) for index in indices(node))
    return [(index, meaning) for index, meaning in meant if meaning is not None and meaning.of == "row"]
