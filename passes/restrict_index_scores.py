"""restrict_index_scores: a re-indexer scores its candidates only, in place of scoring all and hiding the others.

    before   source -> kept [T, B] -> repeat -> mask [T, E]      index_scores(q, w, cache, entries [E], mask) -> picks
    after    source -> blocks [T, K], ascending, then -1                             K = min(keep, B)
             index_scores(q, w, cache, entries of the blocks [T, K * block], restricted=True) -> picks

Site: a region index_scores that picks among candidates. Legal when all RULES hold: they are whole blocks, of which a
region of the program keeps at most `keep` for a row, or rows that trim_replay takes of these. That region gets the list
of them as one more output, in place of the mask where nobody else reads it, and what takes rows of the mask takes those
of the list. The new body is the old one, run again on other sizes: every row is a request of its own (R = T, Q = 1) and
its columns are the entries of its blocks (E = K * block). No node changes.

Why the picks are the same. A region index_scores (see its rules) gives the k best columns that are not hidden, by
(score, lower column), ascending, then -1. (1) Hidden before means hidden after, or absent: all but the candidates is
hidden, and every candidate has one column, since K blocks hold all that are kept; what fills up K is hidden. (2) The
score of a row and an entry reads q and w of the row that stands in its place (itself, but for pad rows) and the record
that its request has for the entry: the new body finds them by the same place, slot and entry, clamped as before.
(3) Columns ascend with entries, so ties go to the same entry, and ascending columns are ascending entries. (4) There
are k columns, for keep * block >= k and the program before had E >= k. A row with fewer than k candidates, or none,
gets -1 as before.

Bits. Each score is the same sum of the same products, but a library may sum in an order that depends on shapes. q . k
is exact in any order where both are MXFP4 values and their group scales lie within 2^10 of each other: integers below
2^24 times one power of two (unless they are subnormal, which MKL makes 0 in some shapes and not in others). Over more
than four heads eager itself sums in an order that depends on the column: torch's CPU kernel takes the last E mod 32
columns otherwise than those before. So picks have the same bits with at most four heads in a sum; with more, they may
differ between entries whose scores are closer than the rounding of that sum, and in fp64 they are the same.

What it costs: keys are gathered by row, T * K * block records in place of R * E. For decode that is what pays. In a
long prefill the body, run as it is, would write T * K * block decoded keys to memory: a kernel need not.
Needs outline_index_scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from v41._compat import fake_mode_of, known_equal, outside_fake_mode, symbols_of, without_guards
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.index_parts import SPREADS, same_count
from v41.passes.matching import RESHAPES, aten, between, fake, is_constant, prims, shape
from v41.passes.outline_index_scores import KIND
from v41.passes.replay_seam import KIND as KEPT_ROWS
from v41.passes.replay_seam import rows_taken, take_too
from v41.passes.sites import Rule, broken_rule, in_programs
from v41.regions import body_of, inline, is_region, outline, region_of, regions
from v41.report import Decision, applied, refused

ARITHMETIC = (operator.mul, operator.add, operator.sub, operator.floordiv, torch.sym_sum, torch.sym_min)
ORIGIN = ("stack_trace", "nn_module_stack", "custom")
INT = {"dtype": torch.int64}
Call = Callable[..., Any]  # target and operands -> the result: a value, or the node that computes it


class Unsized(Exception):
    """A size from which it cannot be told what it counts."""

    def __init__(self, node: Node) -> None:
        self.node = node
        super().__init__(node.name)


@dataclass(frozen=True)
class Site:
    """A re-indexer that still scores all entries."""

    call: Node

    @cached_property
    def attrs(self) -> dict[str, Any]:
        return region_of(self.call).attrs

    @cached_property
    def operands(self) -> dict[str, Node]:
        """Of each role the operand (of "size" and "constant" any)."""
        return dict(zip(self.attrs["operands"], self.call.all_input_nodes[1:], strict=True))

    @property
    def mask(self) -> Node:
        return self.operands["candidates"]

    @cached_property
    def taken(self) -> tuple[Node, Node] | None:
        """The region that takes this site's rows of a mask of more, by a batch's kept rows, and that mask."""
        seam = self.mask.args[0] if self.mask.target is operator.getitem else None
        if not isinstance(seam, Node) or not is_region(seam, KEPT_ROWS):
            return None
        return next(((seam, whole) for whole, rows in rows_taken(seam).items() if rows is self.mask), None)

    @cached_property
    def whole_mask(self) -> Node:
        """The mask as its source hands it on."""
        return self.mask if self.taken is None else self.taken[1]

    @cached_property
    def kept(self) -> Node | None:
        """[T, B], or of more rows, where the whole mask is that repeated, and a region keeps no more than it says."""
        node = self.whole_mask
        while node.target in SPREADS and isinstance(node.args[0], Node):
            node = node.args[0]
        source, place = node.args if node.target is operator.getitem else (None, None)
        if not isinstance(source, Node) or not is_region(source, KIND):
            return None
        attrs = region_of(source).attrs
        keeps = attrs["outputs"][place] == "kept" and attrs["keep"]
        return node if keeps and _repeats(node, self.whole_mask, attrs["block"]) else None

    @cached_property
    def source(self) -> dict[str, Any]:
        """What the region that keeps the blocks says of itself."""
        assert self.kept is not None
        return region_of(self.kept.args[0]).attrs  # type: ignore[arg-type]

    @cached_property
    def sizes(self) -> dict[str, int | SymInt]:
        """Rows, requests, rows of the longest request, entries, blocks."""
        kept = self.kept
        assert kept is not None
        return {
            "T": shape(self.operands["queries"])[0],
            "R": shape(self.operands["slots"])[0],
            "Q": shape(self.operands["rows"])[-1],
            "E": shape(self.mask)[-1],
            "B": shape(kept)[-1],
        }

    @cached_property
    def unsized(self) -> Node | None:
        """A size in the body that would be another in the new one, and is not known to be."""
        values = [node.meta.get("val") for node in self.call.all_input_nodes]
        mode = fake_mode_of(values)
        assert mode is not None and self.kept is not None
        with mode, without_guards(mode):
            try:
                kept = self.kept.meta["val"].new_empty((self.sizes["T"], self.sizes["B"]))  # of this site's rows
                blocks = candidate_blocks(lambda f, *a, **k: f(*a, **k), kept, self.source["keep"])
                rerun(self, lambda f, *a, **k: f(*a, **k), lambda node: node.meta["val"], blocks)
            except Unsized as error:
                return error.node
        return None


def _repeats(kept: Node, mask: Node, size: int) -> bool:
    """Whether the mask says of each entry what is said of its block."""
    order = {node: i for i, node in enumerate(kept.graph.nodes)}
    with outside_fake_mode():
        drawn = numbers(kept, 0) > 0
        found = evaluate(between(order, {kept}, [mask]), {kept: drawn}, mask, keep_types=True)
        return min(drawn.shape) > 1 and torch.equal(found, drawn.repeat_interleave(size, -1))


# ---- what must hold: each predicate returns the node at fault


def has_other_candidates(site: Site) -> Node | None:
    return site.mask if site.kept is None else None


def has_too_few(site: Site) -> Node | None:
    return site.kept if site.source["keep"] * site.source["block"] < site.attrs["k"] else None


def breaks_ties_otherwise(site: Site) -> Node | None:
    return None if site.attrs["ties"] == "lower_index" else site.call


def takes_keys_otherwise(site: Site) -> Node | None:
    wanted = {"queries", "weights", "cache", "slots", "rows", "requests", "columns"}
    return None if wanted <= site.operands.keys() and site.attrs["numbered"] else site.call


def counts_two_things_alike(site: Site) -> Node | None:
    symbols = [symbols_of(site.sizes[name]) for name in "TRQB"]
    apart = all(symbols) and sum(map(len, symbols)) == len(frozenset().union(*symbols))
    return None if apart else site.call


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the candidates are blocks that another indexer keeps, each repeated for its entries", has_other_candidates),
    ("there are as many candidates as picks", has_too_few),
    ("ties go to the lower entry", breaks_ties_otherwise),
    ("keys are taken from a cache, by slots of requests and numbers of entries", takes_keys_otherwise),
    ("rows, requests, columns and blocks are counted by sizes of their own", counts_two_things_alike),
    ("every size in it is one of rows, requests, columns or entries", lambda site: site.unsized),
)


def restrict_index_scores(gm: GraphModule) -> list[Decision]:
    """Restricts every legal re-indexer of `gm`, and of the subgraphs the model asked for. One decision a site."""
    return in_programs(gm, _restrict)


def _restrict(gm: GraphModule) -> Iterator[Decision]:
    sites = [Site(call) for call in regions(gm, KIND) if _picks_among_all(call)]
    judged = [(site, broken_rule(site, RULES)) for site in sites]
    lists: dict[Node, list[Node]] = {}
    taken: dict[Node, dict[Node, Node]] = {}
    for site, broken in judged:
        yield refused(site.call, *broken) if broken else applied(_replace(gm, site, lists, taken))
    for seam, rows in taken.items():
        take_too(gm, seam, rows.values())
    for mask in dict.fromkeys(site.whole_mask for site, broken in judged if broken is None):
        _drop_unread(gm, mask)
    for kept, made in lists.items():
        _absorb(gm, kept, made)


def _picks_among_all(call: Node) -> bool:
    attrs = region_of(call).attrs
    return attrs["role"] == "re_indexer" and "restricted" not in attrs


# ---- the new program, as a function of what executes its operations


def candidate_blocks(call: Call, kept: Any, keep: int) -> Any:
    """[T, K] the blocks that a row keeps, ascending, then -1, K = min(keep, B)."""
    count = call(aten.sym_size.int, kept, 1)
    device = _value(kept).device
    rank = call(prims.iota.default, count, start=count, step=-1, device=device, requires_grad=False, **INT)  # B .. 1
    none = call(aten.scalar_tensor.default, 0, device=device, **INT)
    ranks = call(aten.where.self, kept, rank, none)
    best = call(operator.getitem, call(aten.topk.default, ranks, call(torch.sym_min, count, keep)), 0)
    blocks = call(aten.add.Tensor, call(aten.neg.default, best), count)
    nothing = call(aten.scalar_tensor.default, -1, device=device, **INT)
    return call(aten.where.self, call(aten.gt.Scalar, best, 0), blocks, nothing)


def rerun(site: Site, call: Call, read: Callable[[Node], Any], blocks: Any) -> Any:
    """The picks, by the nodes of the site's body on the candidates of each row."""
    new = Restricted(site, call, read, blocks)
    for node in body_of(site.call).graph.nodes:
        if node.op == "call_function":
            new.run(node)
    (picks,) = body_of(site.call).graph.output_node().all_input_nodes
    return new.entries_at(new.env[picks])


class Restricted:
    """The operands of the body, and what its nodes give on them."""

    def __init__(self, site: Site, call: Call, read: Callable[[Node], Any], blocks: Any) -> None:
        self.site, self.call, self.read = site, call, read
        size, self.device = site.source["block"], _value(blocks).device
        self.rows = call(aten.sym_size.int, blocks, 0)
        self.count = call(aten.sym_size.int, blocks, 1)
        self.entries = call(operator.mul, self.count, size)
        in_block = call(prims.iota.default, size, start=0, step=1, device=self.device, requires_grad=False, **INT)
        first = call(aten.mul.Tensor, call(aten.clamp_min.default, blocks, 0), size)
        columns = call(aten.add.Tensor, call(aten.unsqueeze.default, first, 2), in_block)
        self.columns = call(aten.view.default, columns, [self.rows, self.entries])  # [T, C] as numbered before
        there = call(aten.unsqueeze.default, call(aten.ge.Scalar, blocks, 0), 2)
        there = call(aten.clone.default, call(aten.expand.default, there, [-1, -1, size]),
                     memory_format=torch.contiguous_format)  # fmt: skip
        self.env: dict[Node, Any] = {}
        self._enter(call(aten.view.default, there, [self.rows, self.entries]))

    def _enter(self, mask: Any) -> None:
        call, of = self.call, {role: self.read(node) for role, node in self.site.operands.items()}
        own = call(prims.iota.default, self.rows, start=0, step=1, device=self.device, requires_grad=False, **INT)
        scored = call(aten.index.Tensor, of["rows"], [of["requests"], of["columns"]])  # itself, unless it is a pad row
        given = {
            "candidates": mask,
            "slots": call(aten.index.Tensor, of["slots"], [of["requests"]]),
            "rows": call(aten.view.default, scored, [-1, 1]),
            "requests": own,
            "columns": call(aten.full.default, [self.rows], 0, device=self.device, **INT),
        }
        inner = [node for node in body_of(self.site.call).graph.nodes if node.op == "placeholder"]
        outer = self.site.call.args[2:]
        for placeholder, operand, role in zip(inner, outer, self.site.attrs["operands"], strict=True):
            assert isinstance(operand, Node)
            if role in ("size", "constant"):
                self.env[placeholder] = self.resized(operand)
            else:
                self.env[placeholder] = given[role] if role in given else self.read(operand)
            if same_count(placeholder, self.site.sizes["E"]) and role != "constant":
                self.env[placeholder] = self.of_candidates(self.env[placeholder])

    def resized(self, node: Node) -> Any:
        """A size, or a constant made of sizes, as it is in the new body."""
        value, sizes = node.meta["val"], self.site.sizes
        if isinstance(value, Tensor):
            if not is_constant(node):
                raise Unsized(node)
            return self.call(node.target, *self._resized(node.args), **self._resized(node.kwargs))
        if not symbols_of(value) & frozenset().union(*(symbols_of(sizes[name]) for name in "RQB")):
            return self.read(node)
        new = {"R": self.rows, "Q": 1, "E": self.entries, "B": self.count}
        known = next((name for name in new if known_equal(value, sizes[name])), None)
        if known is not None:
            return new[known]
        if node.target not in ARITHMETIC:
            raise Unsized(node)
        return self.call(node.target, *self._resized(node.args))

    def _resized(self, args: Any) -> Any:
        return map_aggregate(args, lambda arg: self.resized(arg) if isinstance(arg, Node) else arg)

    def run(self, node: Node) -> None:
        """Gives what `node` gives in the new body; entry numbers become those of each row's candidates."""
        operands = [arg for arg in node.all_input_nodes if fake(arg) is not None]
        numbered = [same_count(arg, self.site.sizes["E"]) and not is_constant(arg) for arg in operands]
        if node.target in RESHAPES and any(numbered):
            self.env[node] = self.env[operands[0]]  # an axis more or less: [T, C] has the axis of rows already
            return
        self.env[node] = self.call(node.target, *self._new(node.args), **self._new(node.kwargs))
        value = fake(node)
        whole = value is not None and value.dtype is torch.int64 and not is_constant(node)
        if whole and not any(numbered) and same_count(node, self.site.sizes["E"]):
            self.env[node] = self.of_candidates(self.env[node])

    def _new(self, args: Any) -> Any:
        return map_aggregate(args, lambda arg: self.env[arg] if isinstance(arg, Node) else arg)

    def of_candidates(self, counted: Any) -> Any:
        """[E], or with axes of size 1 -> [T, C] those of each row's candidates."""
        return self.call(aten.index.Tensor, self.call(aten.view.default, counted, [-1]), [self.columns])

    def entries_at(self, picks: Any) -> Any:
        """Picked columns -> what they were before; -1 stays."""
        call = self.call
        found = call(aten.gather.default, self.columns, 1, call(aten.clamp_min.default, picks, 0))
        nothing = call(aten.scalar_tensor.default, -1, device=self.device, **INT)
        return call(aten.where.self, call(aten.ge.Scalar, picks, 0), found, nothing)


def _value(x: Any) -> Tensor:
    value = x.meta["val"] if isinstance(x, Node) else x
    assert isinstance(value, Tensor)
    return value


def _values(args: Any) -> Any:
    return map_aggregate(args, lambda arg: arg.meta["val"] if isinstance(arg, Node) else arg)


# ---- editing


def _replace(gm: GraphModule, site: Site, lists: dict[Node, list[Node]], taken: dict[Node, dict[Node, Node]]) -> Node:
    """Puts the restricted region in the place of the site's. lists: kept -> what makes its list of blocks, that last,
    if it has one. taken: region that takes rows -> list of blocks -> the rows of it that are to be taken, too."""
    kept, attrs = site.kept, dict(site.attrs)
    assert kept is not None
    if kept not in lists:
        listing = Emit(gm, kept.next, site.call)
        candidate_blocks(listing.call, kept, site.source["keep"])
        lists[kept] = listing.nodes
    blocks = lists[kept][-1]
    if site.taken is not None:
        blocks = _rows_of(gm, blocks, site.taken[0], taken)
    roles = dict(zip(site.call.all_input_nodes[1:], attrs["operands"], strict=True)) | {blocks: "candidate_blocks"}
    emit = Emit(gm, site.call, site.call)
    picks = rerun(site, emit.call, lambda node: node, blocks)
    restricted = attrs | {"restricted": True, "block": site.source["block"], "keep": site.source["keep"]}
    (old,) = site.call.users
    old.replace_all_uses_with(picks)
    call = outline(gm, emit.nodes, kind=KIND, **restricted)
    operands = call.all_input_nodes[1:]
    region_of(call).attrs["operands"] = tuple("size" if fake(arg) is None else roles[arg] for arg in operands)
    _erase(gm, site.call)
    return call


def _rows_of(gm: GraphModule, blocks: Node, seam: Node, taken: dict[Node, dict[Node, Node]]) -> Node:
    """The rows that region `seam` takes, of `blocks`; in front of it, until it is told to take them, too."""
    rows = taken.setdefault(seam, {})
    if blocks not in rows:
        index = seam.args[2:][region_of(seam).attrs["index"]]
        rows[blocks] = Emit(gm, seam, seam).call(aten.index.Tensor, blocks, [index])
    return rows[blocks]


def _absorb(gm: GraphModule, kept: Node, made: list[Node]) -> None:
    """Moves what makes the list of blocks into the region that keeps them."""
    source: Node = kept.args[0]  # type: ignore[assignment]
    attrs, read = dict(region_of(source).attrs), dict[int, str]()
    for user in source.users:
        if any(reader not in made for reader in user.users):
            read[user.args[1]] = attrs["outputs"][user.args[1]]  # type: ignore[index]
    outside = set(gm.graph.nodes)
    inline(gm, source)
    body = [node for node in gm.graph.nodes if node not in outside]
    attrs["outputs"] = (*(read[place] for place in sorted(read)), "kept_blocks")
    outline(gm, [*body, *made], kind=KIND, **attrs)


class Emit:
    """Puts nodes in front of `before`, with meta; sizes that are numbers or known stay so."""

    def __init__(self, gm: GraphModule, before: Node, like: Node) -> None:
        self.gm, self.before, self.nodes = gm, before, list[Node]()
        self.origin = {key: like.meta[key] for key in ORIGIN if key in like.meta}
        self.mode = fake_mode_of([node.meta.get("val") for node in like.all_input_nodes])

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        with self.mode, without_guards(self.mode):
            value = target(*_values(args), **_values(kwargs))
        if isinstance(value, int):
            return value
        with self.gm.graph.inserting_before(self.before):
            node = self.gm.graph.call_function(target, args, kwargs)
        node.meta = {**self.origin, "val": value}
        self.nodes.append(node)
        return node


def _drop_unread(gm: GraphModule, mask: Node) -> None:
    """Erases a mask, and what it repeats, as far as nobody reads them any more."""
    while mask.op == "call_function" and not mask.users:
        before = mask.args[0]
        gm.graph.erase_node(mask)
        mask = before  # type: ignore[assignment]


def _erase(gm: GraphModule, call: Node) -> None:
    """Erases a region whose results nobody reads any more."""
    before = set(gm.graph.nodes)
    inline(gm, call)
    for node in reversed([node for node in gm.graph.nodes if node not in before]):
        if not node.users:
            gm.graph.erase_node(node)
