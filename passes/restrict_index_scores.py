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

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from v41._compat import fake_mode_of, symbols_of, without_guards
from v41.passes import re_indexers
from v41.passes.candidate_scores import Unsized, candidate_blocks, rerun
from v41.passes.matching import aten, fake
from v41.passes.outline_index_scores import KIND
from v41.passes.replay_seam import take_too
from v41.passes.sites import Rule, broken_rule, in_programs
from v41.regions import inline, outline, region_of, regions
from v41.report import Decision, applied, refused

ORIGIN = ("stack_trace", "nn_module_stack", "custom")


class Site(re_indexers.Site):
    """A re-indexer, and what its new body computes."""

    @cached_property
    def results(self) -> list[Any]:
        """What each operation of it gives, in order, on fake tensors; Unsized where it cannot be told."""
        mode = fake_mode_of([node.meta.get("val") for node in self.call.all_input_nodes])
        found: list[Any] = []
        assert mode is not None and self.kept is not None

        def compute(target: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(target(*args, **kwargs))
            return found[-1]

        with mode, without_guards(mode):
            kept = self.kept.meta["val"].new_empty((self.sizes["T"], self.sizes["B"]))  # of this site's rows
            blocks = candidate_blocks(compute, kept, self.source["keep"])
            found.clear()
            rerun(self, compute, lambda node: node.meta["val"], blocks)
        return found


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


def resizes_otherwise(site: Site) -> Node | None:
    """A size in the body that would be another in the new one, and is not known to be."""
    try:
        _ = site.results
    except Unsized as error:
        return error.node
    return None


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the candidates are blocks that another indexer keeps, each repeated for its entries", has_other_candidates),
    ("there are as many candidates as picks", has_too_few),
    ("ties go to the lower entry", breaks_ties_otherwise),
    ("keys are taken from a cache, by slots of requests and numbers of entries", takes_keys_otherwise),
    ("rows, requests, columns and blocks are counted by sizes of their own", counts_two_things_alike),
    ("every size in it is one of rows, requests, columns or entries", resizes_otherwise),
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
    emit = Emit(gm, site.call, site.call, site.results)
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


def _values(args: Any) -> Any:
    return map_aggregate(args, lambda arg: arg.meta["val"] if isinstance(arg, Node) else arg)


class Emit:
    """Puts nodes in front of `before`, with meta; sizes that are numbers or known stay so. results: what they give, in
    order, where that was computed before."""

    def __init__(self, gm: GraphModule, before: Node, like: Node, results: Sequence[Any] | None = None) -> None:
        self.gm, self.before, self.nodes = gm, before, list[Node]()
        self.results = None if results is None else iter(results)
        self.origin = {key: like.meta[key] for key in ORIGIN if key in like.meta}
        self.mode = fake_mode_of([node.meta.get("val") for node in like.all_input_nodes])

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._value(target, args, kwargs) if self.results is None else next(self.results)
        if isinstance(value, int):
            return value
        with self.gm.graph.inserting_before(self.before):
            node = self.gm.graph.call_function(target, args, kwargs)
        node.meta = {**self.origin, "val": value}
        self.nodes.append(node)
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self.mode, without_guards(self.mode):
            return target(*_values(args), **_values(kwargs))


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
