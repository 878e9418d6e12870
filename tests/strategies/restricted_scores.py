"""A candidate source and the re-indexer behind it, as one plain function to trace, and near misses of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.strategies.index_scores import WIDTH, Indexer

OTHER_CANDIDATES = "the candidates are blocks that another indexer keeps, each repeated for its entries"
SIZES = "rows, requests, columns and blocks are counted by sizes of their own"
FLAWS = {  # the rule it breaks
    "candidates in another order": OTHER_CANDIDATES,
    "any candidates": OTHER_CANDIDATES,
    "fewer candidates than picks": "there are as many candidates as picks",
    "ties to any entry": "ties go to the lower entry",
    "keys as numbers": "keys are taken from a cache, by slots of requests and numbers of entries",
    "as many requests as rows": SIZES,
    "sizes that are numbers": SIZES,
    "a size of another kind": "every size in it is one of rows, requests, columns or entries",
}
OF_SYMBOLS = ("as many requests as rows", "a size of another kind")  # others show as well where sizes are numbers
NAMES = ("rows",) * 7 + ("requests", "requests", "longest", "blocks")


@dataclass(frozen=True)
class Pair:
    """`source` keeps blocks, `again` picks inside them; both have the keys, the block and the ratio of `source`."""

    source: Indexer
    again: Indexer
    flaw: str = ""

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
        return (*NAMES, "rows") if self.flaw == "any candidates" else NAMES

    def to_trace(self) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[Tensor]]:
        """The function, tensors with symbolic rows (`sizes`), weights."""
        _, (q, w, *places), stored = self.source.to_trace()
        if self.flaw == "as many requests as rows":
            places[3:5] = [torch.tensor([0, 4, 0, 0, 0]), torch.tensor([2, 0, 1, 1, 1])]
        more = [torch.randn(5, self.again.heads, WIDTH).bfloat16(), torch.randn(5, self.again.heads).bfloat16()]
        mask = [torch.rand(5, 7) < 0.5] if self.flaw == "any candidates" else []
        return self.choose, [q, w, *more, *places, *mask], stored

    def choose(self, *args: Tensor) -> tuple[Tensor, ...]:
        q, w, q_again, w_again, *places, stored = args
        mine = [places.pop()] if self.flaw == "any candidates" else []
        first, mask = self.source.choose(q, w, *places, stored)
        mask = mine[0].repeat_interleave(self.source.block, -1) if mine else mask
        if self.flaw == "candidates in another order":
            mask = mask.flip(-1)
        second = self.again.choose(q_again, w_again, *places, mask, stored)
        return first, *second


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
    return Pair(source, replace(again, choice=choice, flaw=inner), flaw)
