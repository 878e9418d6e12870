"""A candidate source and the re-indexer behind it, as one plain function to trace, and near misses of that.

The re-indexer may have fewer rows than its source, as in late layers of a trimmed program: then it reads rows of the
source's mask, which `seam` moves into a region as trim_replay does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.strategies.index_scores import WIDTH, Indexer
from v41.passes.matching import aten, prims
from v41.passes.replay_seam import outline_seam

OTHER_CANDIDATES = "the candidates are blocks that another indexer keeps, each repeated for its entries"
SIZES = "rows, requests, columns and blocks are counted by sizes of their own"
FLAWS = {  # the rule it breaks
    "candidates in another order": OTHER_CANDIDATES,
    "entries of blocks apart": OTHER_CANDIDATES,
    "any candidates": OTHER_CANDIDATES,
    "rows turned around": OTHER_CANDIDATES,
    "rows by another index": OTHER_CANDIDATES,
    "fewer candidates than picks": "there are as many candidates as picks",
    "ties to any entry": "ties go to the lower entry",
    "keys as numbers": "keys are taken from a cache, by slots of requests and numbers of entries",
    "as many requests as rows": SIZES,
    "sizes that are numbers": SIZES,
    "a size of another kind": "every size in it is one of rows, requests, columns or entries",
}
OF_SYMBOLS = ("as many requests as rows", "a size of another kind")  # others show as well where sizes are numbers
OF_A_SEAM = ("rows turned around", "rows by another index")  # what it does with the mask is not just to take rows
NAMES = ("rows",) * 7 + ("requests", "requests", "longest", "blocks")
OF_ROWS = ("kept", "kept", "requests", "longest kept")  # of `late_places`


@dataclass(frozen=True)
class Pair:
    """`source` keeps blocks, `again` picks inside them; both have the keys, the block and the ratio of `source`."""

    source: Indexer
    again: Indexer
    flaw: str = ""
    taken: bool = False  # `again` has rows of those that `source` has

    @property
    def numbers(self) -> bool:
        """Whether it is traced with sizes that are numbers: that is quick, and enough for most flaws."""
        return bool(self.flaw) and self.flaw not in OF_SYMBOLS

    @property
    def sizes(self) -> tuple[str, ...]:
        if self.flaw == "as many requests as rows":
            return tuple("rows" if name == "requests" else name for name in self.names)
        return self.names

    @property
    def names(self) -> tuple[str, ...]:
        if self.taken:
            return (*NAMES[:2], "kept", "kept", *NAMES[4:], *OF_ROWS)
        return (*NAMES, "rows") if self.flaw == "any candidates" else NAMES

    def to_trace(self) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[Tensor]]:
        """The function, tensors with symbolic rows (`sizes`), weights."""
        _, (q, w, *places), stored = self.source.to_trace()
        if self.flaw == "as many requests as rows":
            places[3:5] = [torch.tensor([0, 4, 0, 0, 0]), torch.tensor([2, 0, 1, 1, 1])]
        late = late_places([4, 1], 3) if self.taken else []
        rows = len(late[0]) if late else 5
        more = [torch.randn(rows, self.again.heads, WIDTH).bfloat16(), torch.randn(rows, self.again.heads).bfloat16()]
        mask = [torch.rand(5, 7) < 0.5] if self.flaw == "any candidates" else []
        return self.choose, [q, w, *more, *places, *mask, *late], stored

    def choose(self, *args: Tensor) -> tuple[Tensor, ...]:
        q, w, q_again, w_again, *places, stored = args
        more = len(self.names) - len(NAMES)
        places, others = places[: len(places) - more], places[len(places) - more :]
        early, mask = self.source.choose(q, w, *places, stored)
        if self.flaw == "any candidates":
            mask = others[0].repeat_interleave(self.source.block, -1)
        if self.flaw == "candidates in another order":
            mask = mask.flip(-1)
        if self.flaw == "entries of blocks apart":  # the first of each block, then the second of each
            mask = mask.unflatten(-1, (-1, self.source.block)).transpose(1, 2).flatten(1)
        if self.taken:
            kept, columns, first, longest = others
            mask = mask[kept.flip(0) if self.flaw == "rows by another index" else kept]
            mask = mask.flip(-1) if self.flaw == "rows turned around" else mask
            positions, requests, *_, slots, _, blocks = places
            places = [positions[kept], requests[kept], columns, first, slots, longest, blocks]
        second = self.again.choose(q_again, w_again, *places, mask, stored)
        return early, *second


def late_places(lengths: Sequence[int], last: int) -> list[Tensor]:
    """Of requests with so many rows each: which rows are among their `last` ones [K], the column of each of these [K],
    the first of each request [R], and columns of the longest [Q]."""
    counts = [min(length, last) for length in lengths]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    kept = [torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    first = torch.tensor([0, *counts]).cumsum(0)[:-1]
    return [torch.cat(kept), torch.cat([torch.arange(count) for count in counts]), first, torch.arange(max(counts))]


def seam(gm: GraphModule) -> Node | None:
    """Makes a region of all that takes rows in `gm` by an input, and of what turns such rows around."""
    found = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    by = {node: node.args[1][0] for node in found if len(node.args[1]) == 1}
    (kept,) = {index for index in by.values() if index.op == "placeholder"}
    taking = [node for node, index in by.items() if kept in (index, *index.all_input_nodes)]
    turned = [user for node in taking for user in node.users if user.target is prims.rev.default]
    return outline_seam(gm, [*taking, *turned], kept, 3, {})


def pair(source: Indexer, again: Indexer, flaw: str = "") -> Pair:
    """The two, made to fit: one cache, one block, no more picks than candidates; with `flaw`, but for that."""
    again = replace(again, role="re_indexer", by_entry=True)
    again = replace(again, block=source.block, ratio=source.ratio, records=flaw != "keys as numbers")
    again = replace(again, k=min(again.k, source.block * source.keep))
    source = replace(source, role="candidate_source", records=again.records)
    if flaw == "fewer candidates than picks":
        source, again = replace(source, keep=1), replace(again, k=source.block + 1)
    choice = "topk" if flaw == "ties to any entry" else "unique keys"
    inner = flaw if flaw == "a size of another kind" else ""
    return Pair(source, replace(again, choice=choice, flaw=inner), flaw, flaw in OF_A_SEAM)
