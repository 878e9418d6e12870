"""index_choice: what an indexer does with its scores: what it hides, which entries it picks, which blocks it keeps.

    seen         entries that a row may see come first: entry < seen[t]
    candidates   [T, E] bool, where the picks are restricted to them
    kept         [T, blocks] bool, where the best blocks of entries are kept for others
    picks        [T, k], the best entries, ascending, then -1

The nodes run on drawn scores, small and large, with and without ties, rows that see few entries among them, and must
give what these sentences say. Who is scored how is in index_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from v41._compat import outside_fake_mode, size_with, symbols_of
from v41.passes.analysis.probe import ROWS, evaluate
from v41.passes.index_parts import (
    DRAWS,
    FAILURES,
    PARTS,
    SPREADS,
    Scored,
    adds_axes,
    chain_of,
    only,
    product_of,
    rectifies,
    same_count,
    walk,
)
from v41.passes.matching import aten, between, fake, is_constant, is_pointwise, operator, shape

RANKINGS = (aten.topk.default, aten.sort.default, aten.sort.stable)
LOGICAL = (aten.bitwise_not.default, aten.logical_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
           aten.logical_and.default, aten.logical_or.default)  # fmt: skip
COMPARISONS = (aten.ge.Tensor, aten.gt.Tensor, aten.lt.Tensor, aten.le.Tensor)
SELECTS = (*PARTS, operator.getitem, *SPREADS, *RANKINGS, aten.gather.default, aten.amax.default, aten.amin.default,
           aten.constant_pad_nd.default)  # fmt: skip
LARGE = 2.0**17  # times the scores that were drawn: beyond what a clamp leaves


@dataclass(frozen=True)
class Parts(Scored):
    """One indexer. ranking: what chooses among the scores."""

    ranking: Node

    # ---- what is hidden

    @cached_property
    def _bounds(self) -> tuple[dict[Node, None], dict[Node, None], dict[Node, None]]:
        """Entry numbers, how many a row sees, candidates: by the masks that hide scores before they are ranked."""
        entries, seen, candidates = dict[Node, None](), dict[Node, None](), dict[Node, None]()
        hiding = between(self.order, {self.scores}, [self.ranking])
        stack = [arg for node in hiding for arg in node.all_input_nodes if arg not in hiding and arg is not self.scores]
        while stack:
            node = stack.pop()
            value = fake(node)
            if value is None or value.dtype is not torch.bool or is_constant(node):
                continue
            if node.target in LOGICAL:
                stack += node.all_input_nodes
            elif node.target in COMPARISONS:
                for arg in node.all_input_nodes:
                    arg = walk(arg, adds_axes)
                    if not is_constant(arg):
                        (entries if same_count(arg, self.entry_count) else seen)[arg] = None
            else:
                candidates[node] = None
        return entries, seen, candidates

    @property
    def entries(self) -> Node | None:
        """[E] the entry of each column."""
        return only(self._bounds[0])

    @property
    def seen(self) -> Node | None:
        """[T] how many entries the row sees."""
        return only(self._bounds[1])

    @property
    def candidates(self) -> Node | None:
        return only(self._bounds[2])

    # ---- what is chosen

    @cached_property
    def after(self) -> list[Node]:
        """What depends on the scores by way of choosing, in graph order."""
        found, stack = dict[Node, None](), [self.scores]
        while stack:
            for user in stack.pop().users:
                if user not in found and (user.target in SELECTS or is_pointwise(user)):
                    found[user] = None
                    stack.append(user)
        return sorted(found, key=self.order.__getitem__)

    @cached_property
    def block_ranking(self) -> Node | None:
        """What ranks blocks of entries, if something else than entries is ranked before they are picked."""
        behind = _behind(self.ranking)
        others = [node for node in self.after if node.target in RANKINGS and node is not self.ranking]
        return next((node for node in others if node not in behind), None)

    @cached_property
    def picks(self) -> Node | None:
        behind = _behind(self.ranking)
        return next((node for node in self.after if node in behind and self._picks(node, tied=False)), None)

    @cached_property
    def ties(self) -> str:
        """ "lower_index" or "any": which of entries with one score is picked."""
        told = self.picks is not None and _ranks_all(self.ranking) and self._picks(self.picks, tied=True)
        return "lower_index" if told else "any"

    @property
    def k(self) -> int:
        k = None if self.picks is None else _most(self.picks)
        assert k is not None
        return k

    @cached_property
    def kept(self) -> Node | None:
        """[T, blocks] bool, the blocks that are kept."""
        if self.block_ranking is None or not _ranks_all(self.block_ranking):
            return None
        behind = _behind(self.block_ranking)
        return next((node for node in self.after if node in behind and self._keeps(node)), None)

    @property
    def keep(self) -> int | None:
        """How many blocks a row keeps."""
        count = self.block_ranking.args[1] if self.block_ranking is not None else None
        return count if isinstance(count, int) and self.block_ranking.target is aten.topk.default else None  # type: ignore[union-attr]

    @cached_property
    def block(self) -> int | None:
        """Entries of a block."""
        if self.kept is None:
            return None
        return size_with(self.entry_count, 2) // size_with(shape(self.kept)[-1], 2)

    def _picks(self, node: Node, *, tied: bool) -> bool:
        """Whether `node` is the best entries that are not hidden, ascending, then -1."""
        value, k = fake(node), _most(node)
        if value is None or value.dtype is not torch.int64 or k is None or not self._by_rows:
            return False
        for found, scores, _ in self._chosen(node, k, tied):
            best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
            there = scores.gather(-1, best) > -torch.inf
            best = torch.where(there, best, scores.shape[-1]).sort(-1).values
            if not torch.equal(found, torch.where(best < scores.shape[-1], best, -1)):
                return False
        return True

    def _keeps(self, node: Node) -> bool:
        """Whether `node` is the best blocks by their best entry, that of the newest entry a row sees among them."""
        value, keep = fake(node), self.keep
        if value is None or value.dtype is not torch.bool or value.ndim != 2 or keep is None or not self._by_rows:
            return False
        size, rest = divmod(size_with(self.entry_count, 12), size_with(value.shape[-1], 12))
        if rest:
            return False
        for found, scores, seen in self._chosen(node, keep, True):
            if found.shape[-1] * size != scores.shape[-1]:
                return False
            best = scores.unflatten(-1, (-1, size)).amax(-1)
            newest = (torch.arange(best.shape[-1]) == ((seen - 1) // size).unsqueeze(-1)) & (seen > 0).unsqueeze(-1)
            best = torch.where(newest, torch.inf, best)
            first = best.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
            wanted = torch.zeros_like(best, dtype=torch.bool).scatter(-1, first, True) & (best > -torch.inf)
            if not torch.equal(found, wanted):
                return False
        return True

    @property
    def _by_rows(self) -> bool:
        """Whether scores are [T, E], and what a row sees is a number each. V4's have an axis of batches in front."""
        sizes = shape(self.scores)
        return len(sizes) == 2 and (self.seen is None or same_count(self.seen, sizes[0]))

    def _chosen(self, node: Node, least: int, tied: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What `node` makes of drawn scores, those that are not hidden, how many are seen; nothing where it cannot run.

        There are a few more blocks than `least`, which is how many there must be, and few rows.
        """
        given = [part for part in (self.scores, self.entries, self.seen, self.candidates) if part is not None]
        nodes, count = self.run(given, node), self._count(least)
        few = symbols_of(shape(self.scores)[0])

        def number(size: int | SymInt) -> int:
            return size_with(size, ROWS if symbols_of(size) and symbols_of(size) <= few else count)

        with outside_fake_mode():
            for seed in range(DRAWS):
                draw = torch.Generator().manual_seed(seed)
                rows, width = number(shape(self.scores)[0]), number(self.entry_count)
                values = torch.randn(rows, width, generator=draw).round(decimals=0 if tied else 3)
                if not tied:
                    values = values + torch.arange(width) * 2.0**-20
                if seed:
                    values = values * LARGE
                seen = torch.randint(0, width + 1, (rows,), generator=draw)
                seen[0] = min(width, 3 * seed)  # fewer than are picked
                drawn: dict[Node, Any] = {self.scores: values}
                may = torch.ones(rows, width, dtype=torch.bool)
                if self.entries is not None:
                    drawn[self.entries] = torch.arange(width).reshape([number(n) for n in shape(self.entries)])
                if self.seen is not None:
                    drawn[self.seen] = seen.reshape([number(n) for n in shape(self.seen)])
                    may &= torch.arange(width) < seen.unsqueeze(-1)
                if self.candidates is not None:
                    drawn[self.candidates] = torch.rand(rows, width, generator=draw) < 0.7
                    may &= drawn[self.candidates]
                for arg in dict.fromkeys(arg for each in nodes for arg in each.all_input_nodes):
                    if arg not in nodes and isinstance(arg.meta.get("val"), SymInt):
                        drawn[arg] = number(arg.meta["val"])
                try:
                    found = evaluate(nodes, drawn, node, keep_types=True)
                except FAILURES:
                    found = torch.empty(0)
                yield found, torch.where(may, values, -torch.inf), seen

    def _count(self, least: int) -> int:
        """For all sizes but rows, so that there are more entries than are picked and more blocks than are kept."""
        blocks = 0 if self.keep is None else self.keep
        return max(ROWS, ceil((least + 2) / size_with(self.entry_count, 1)), blocks + 2)


def find_parts(gm: GraphModule) -> list[Parts]:
    """Every chain of linear operations from rectified products to what is ranked, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    if not any(node.target in RANKINGS for node in order):
        return []
    ends: dict[Node, list[Node]] = {}
    for node in order:
        if rectifies(node) and product_of(node) is not None:
            ends.setdefault(chain_of(node)[-1], []).append(node)
    found = ((end, starts, _ranking_of(end)) for end, starts in ends.items())
    return [Parts(order, tuple(starts), end, ranking) for end, starts, ranking in found if ranking is not None]


def _ranking_of(scores: Node) -> Node | None:
    """What ranks the scores themselves, element by element."""
    seen, stack = {scores}, [scores]
    while stack:
        for user in stack.pop(0).users:
            if user.target in RANKINGS:
                return user
            if is_pointwise(user) and user not in seen:
                seen.add(user)
                stack.append(user)
    return None


def _ranks_all(ranking: Node) -> bool:
    """Whether no two of what it ranks count as equal: a top-k of floats may take either."""
    value = fake(ranking.args[0])
    return value is not None and (not value.is_floating_point() or bool(ranking.kwargs.get("stable")))


def _behind(node: Node) -> set[Node]:
    """What depends on `node` by way of choosing."""
    found, stack = set[Node](), [node]
    while stack:
        fresh = [u for u in stack.pop().users if u not in found and (u.target in SELECTS or is_pointwise(u))]
        found.update(fresh)
        stack += fresh
    return found


def _most(node: Node) -> int | None:
    """The length of its last axis, however many entries there are; None where it grows with them."""
    few, many = (size_with(shape(node)[-1], count) if shape(node) else count for count in (2**20, 2**21))
    return few if few == many else None
