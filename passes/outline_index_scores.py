"""outline_index_scores: an indexer becomes one region, from queries and stored keys to the entries picked.

    before   q, w by request; stored keys -> decode -> k;  sum_h w_h relu(q_h . k) -> [T, E] -> hide what is not seen
             -> (keep the best blocks | hide all but candidates) -> top-k by unique keys -> ascending, then -1
    after    region(kind="index_scores", role="candidate_source", heads=32, width=128, k=512, ratio=1, block=8,
                    keep=2048, operands=("queries", "cache", ...), outputs=("kept", "picks")) -> kept, picks

Site: rectified products that a chain of linear operations sums up and a top-k or a sort ranks. Legal when all RULES
hold; parts are read by running their nodes on numbers (index_parts.py, index_choice.py): spelling does not matter.

One region and not two, scores and choice: between them lie [T, E] fp32, which grow with the context and need not
exist. A kernel keeps the best entries, and the best of each block, while it walks over the keys; a border of regions
would make it write all scores. Nor does the mask of candidates [T, E] leave the region: what is kept are blocks
[T, E / block], and repeating them is left to whoever asks for entries.

role: "source" picks among all entries a row sees, "candidate_source" also keeps blocks for others, "re_indexer" picks
among candidates. Exact because outlining moves nodes and rewrites none. Needs canonicalize.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from v41._compat import outside_fake_mode, size_with
from v41.passes import spans
from v41.passes.analysis.probe import ROWS, evaluate
from v41.passes.index_choice import Parts, find_parts
from v41.passes.index_parts import FAILURES, PARTS, SPREADS, walk
from v41.passes.matching import (
    RESHAPES,
    absorb,
    aten,
    between,
    fake,
    interface,
    is_constant,
    is_pointwise,
    is_widening,
    shape,
    unviewed,
)
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.report import Decision

KIND = "index_scores"
POSITIONS = 64  # of rows on which the number of entries they see is tried; and as many far ones
PADS = 4  # positions below 0: of rows that pad a batch, which see nothing
FAR = 2**40  # an entry beyond every cache
MOVES = (*PARTS, *SPREADS, operator.getitem, aten.index.Tensor)  # what rounds in no type


@dataclass(frozen=True)
class Site:
    """One indexer."""

    parts: Parts
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.parts.picks or self.parts.ranking

    @property
    def role(self) -> str:
        if self.parts.candidates is not None:
            return "re_indexer"
        return "source" if self.parts.block_ranking is None else "candidate_source"

    @property
    def results(self) -> list[Node]:
        return [node for node in (self.parts.picks, self.parts.kept) if node is not None]

    @cached_property
    def sources(self) -> dict[Node, str]:
        """What enters, by role. Slots and entries enter as the cache is indexed, or the keys do."""
        parts = self.parts
        found = {parts.query: "queries", parts.weights: "weights", parts.rows: "rows", parts.candidates: "candidates"}
        found |= dict(zip(parts.places, ("requests", "columns"), strict=False))
        found |= {parts.entries: "entries", parts.seen: "seen"}
        if parts.cache is not None:
            found |= {parts.cache: "cache", parts.at[0]: "slots", parts.at[1]: "entries"}
        else:
            found |= {parts.records: "records"} if parts.records is not None else {parts.keys: "keys"}
        return {node: role for node, role in found.items() if node is not None}

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order, with the numbers in front that only they read."""
        inside: Collection[Node] = between(self.parts.order, self.sources, self.results)
        kept = {self.parts.query, self.parts.rows, self.parts.candidates, *self.parts.places}
        inside = absorb(inside, lambda node: _is_free(node) and node not in kept)
        return sorted(inside, key=self.parts.order.__getitem__)

    @cached_property
    def operands(self) -> dict[Node, str]:
        """What the region reads, in order, by role: what an absorbed chain begins with has the role of its end."""
        inside, roles = set(self.members), dict[Node, str]()
        for node, role in self.sources.items():
            ends = [node]
            while ends:
                end = ends.pop()
                if end in inside:
                    ends += end.all_input_nodes
                elif fake(end) is not None:
                    first = {"entries": "blocks", "seen": "positions"}.get(role, role) if end is not node else role
                    for view in unviewed(end):
                        roles.setdefault(view, first)
        read, _ = interface(self.members)
        return {arg: roles.get(arg, "constant") if fake(arg) is not None else "size" for arg in read}

    @cached_property
    def ratio(self) -> int | None:
        """m where a row at position p sees (p + 1) // m entries; None where that is not how they are counted."""
        starts = [node for node, role in self.operands.items() if role == "positions"]
        if len(starts) != 1 or self.parts.seen is None:
            return None
        nodes = self.parts.run(starts, self.parts.seen)
        with outside_fake_mode():
            ahead = torch.arange(POSITIONS).pow(torch.tensor([[1], [6]])).flatten()
            position = torch.cat([torch.arange(-PADS, 0), ahead])
            try:
                found = evaluate(nodes, {starts[0]: position}, self.parts.seen, keep_types=True).flatten().clamp(min=0)
            except FAILURES:
                return None
            wanted = (position + 1).clamp(min=0)
            return next((m for m in range(1, POSITIONS) if torch.equal(found, wanted // m)), None)

    @cached_property
    def spread(self) -> int | None:
        """n where the number b among "blocks" stands for entries b * n to b * n + n - 1; None where it does not."""
        starts = [node for node, role in self.operands.items() if role in ("blocks", "entries")]
        if len(starts) != 1 or self.parts.entries is None:
            return None
        nodes = self.parts.run(starts, self.parts.entries)
        with outside_fake_mode():
            number = torch.randint(0, FAR, _sizes(starts[0]), generator=torch.Generator().manual_seed(0))
            try:
                found = evaluate(nodes, {starts[0]: number}, self.parts.entries, keep_types=True).flatten()
            except FAILURES:
                return None
            size = found.numel() // max(number.numel(), 1)
            wanted = number.reshape(-1, 1) * size + torch.arange(size)
            return size if size and torch.equal(found, wanted.flatten()) else None

    @cached_property
    def reach(self) -> int | None:
        """The last entry that is asked of the cache, those behind it giving way to it: at most its own last one."""
        parts = self.parts
        if parts.cache is None or parts.entries is None or not isinstance(shape(parts.cache)[1], int):
            return None
        last = int(shape(parts.cache)[1]) - 1
        numbers = walk(parts.entries, lambda node: node.target in RESHAPES)  # a mask may have a view of its own
        nodes = parts.run([numbers], parts.at[1])
        if parts.at[1] not in (numbers, *nodes):  # it hangs on more than entry numbers
            return None
        with outside_fake_mode():
            count = size_with(parts.entry_count, ROWS)
            entry = torch.linspace(0, 2 * last + 2, max(count, 1)).long()[:count]
            entry[-1] = FAR
            try:
                drawn = {numbers: entry.reshape(_sizes(numbers))}
                found = evaluate(nodes, drawn, parts.at[1], keep_types=True)
            except FAILURES:
                return None
            most = int(found.max())
            same = torch.equal(found.flatten(), entry.clamp(max=most))
        return (last if most == FAR else most) if same and most in (FAR, *range(last + 1)) else None


def _sizes(node: Node) -> list[int]:
    return [size_with(size, ROWS) for size in shape(node)]


def _is_free(node: Node) -> bool:
    """Views, widening casts, constants, and what does simple sums with integers or scales by a number."""
    if node.target in RESHAPES or is_widening(node) or is_constant(node):
        return True
    value = fake(node)
    if value is None or not is_pointwise(node):
        return False
    tensors = [arg for arg in node.all_input_nodes if fake(arg) is not None and not is_constant(arg)]
    return len(tensors) == 1 and (value.dtype is torch.int64 or node.target is aten.mul.Tensor)


# ---- what must hold: each predicate returns the node at fault


def scores_otherwise(site: Site) -> Node | None:
    return None if site.parts.scale is not None else site.parts.scores


def rounds_inside(site: Site) -> Node | None:
    """What computes or rounds in a narrow type on the way to the scores."""
    parts = site.parts
    ends = [node for node in (parts.query, parts.keys, parts.weights) if node is not None]
    nodes = (node for node in between(parts.order, ends, [parts.scores]) if node.target not in MOVES)
    return next((node for node in nodes if _is_narrow(node) and not is_widening(node)), None)


def _is_narrow(node: Node) -> bool:
    value = fake(node)
    return value is not None and value.is_floating_point() and value.dtype.itemsize < 4


def picks_otherwise(site: Site) -> Node | None:
    return None if site.parts.picks is not None else site.parts.ranking


def keeps_otherwise(site: Site) -> Node | None:
    return site.parts.block_ranking if site.parts.kept is None else None


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the scores are a sum over heads of weighed, rectified products of queries and keys", scores_otherwise),
    ("nothing is rounded between queries, keys, weights and scores", rounds_inside),
    ("the picks are the best entries that a row may see, ascending, then -1", picks_otherwise),
    ("the blocks kept are the best by their best entry, and that of the newest entry a row sees", keeps_otherwise),
    ("only picks and kept blocks are read outside", lambda site: is_read_inside(site.members, site.results)),
    ("no path leaves it and comes back", lambda site: spans.comes_back(site.members)),
    STAYS,
)


def outline_index_scores(gm: GraphModule) -> list[Decision]:
    """Outlines every legal indexer of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """What looks like an indexer, in graph order."""
    return [Site(parts) for parts in find_parts(gm)]


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    parts, inside = site.parts, set(site.members)
    read = [node for node in site.members if any(user not in inside for user in node.users)]
    return {
        "role": site.role,
        "heads": shape(parts.weights)[-1],  # type: ignore[arg-type]
        "width": parts.width,
        "scale": parts.scale,
        "record": None if parts.records is None else "mxfp4",  # None: keys enter as numbers
        "record_bytes": None if parts.records is None else shape(parts.records)[-1],
        "ratio": site.ratio,
        "numbered": parts.entries is not None,  # what a row sees depends on entry numbers that enter, not on columns
        "spread": site.spread,  # entries that one of the "blocks" stands for, ascending
        "reach": site.reach,  # the last entry that is read from the cache
        "k": parts.k,
        "ties": parts.ties,
        "block": parts.block,  # entries of a block, and how many blocks a row keeps for others; None where it does not
        "keep": None if parts.kept is None else parts.keep,
        "operands": tuple(site.operands.values()),
        "outputs": tuple("picks" if node is parts.picks else "kept" for node in read),
    }
