"""Indexers of sparse attention in many spellings, and near misses of them, as plain functions to trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.mhc import drawn_like
from tests.strategies.tracing import trace
from v41.model_def.indexer import ascending_picks, candidate_mask
from v41.model_def.quantization import GROUP, MXFP4_RECORD, decode_e2m1, power_of_two, unpack_pairs
from v41.model_def.topk import topk_lowest_index

WIDTH, SLOTS, CAPACITY = 32, 3, 40
SCALES = 112  # records enter xor this: of bytes drawn from 0 and 1 the scales would be 2^-127, and products subnormal
ROLES = ("source", "candidate_source", "re_indexer")


def by_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("rqhd,red->rqhe", q.float(), k.float())


def by_matmul(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q.float(), k.float().transpose(1, 2).unsqueeze(1))


def by_rows(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q.float().flatten(1, 2), k.float().transpose(1, 2)).unflatten(1, (-1, q.shape[2]))


def by_hand(q: Tensor, k: Tensor) -> Tensor:
    return (q.float()[..., None, :] * k.float()[:, None, None]).sum(-1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": by_einsum,
    "matmul": by_matmul,
    "bmm": by_rows,
    "sum of products": by_hand,
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighed": lambda matches, w: (matches * w[..., None]).sum(2),
    "weights first": lambda matches, w: (w.unsqueeze(-1) * matches).sum(-2),
    "einsum": lambda matches, w: torch.einsum("rqhe,rqh->rqe", matches, w),
}
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "filled": lambda s, entries, seen: s.masked_fill(entries >= seen[:, None], -torch.inf),
    "where": lambda s, entries, seen: torch.where(seen.unsqueeze(1) > entries[None], s, -torch.inf),
    "inverted": lambda s, entries, seen: s.masked_fill(~(entries < seen[:, None]), -torch.inf),
}
CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "unique keys": topk_lowest_index,
    "stable sort": lambda s, k: s.sort(dim=-1, descending=True, stable=True).indices[:, :k],
    "topk": lambda s, k: s.topk(k, dim=-1).indices,
}  # fmt: skip


@cache
def slices_have_k() -> bool:
    """Whether torch knows how many columns `[:, :k]` has where it knows nothing of how many there were. Some releases
    give these a size of its own, and what has any number of picks is no site; they do not know either whether a tensor
    of one block a row, or of none, is contiguous, so restrict_index_scores fails where one block is kept."""
    gm = trace(lambda x: x.mT[:, :2] + 1, torch.ones(3, 2))
    (cut,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.slice.Tensor and node.args[1] == 1)
    before, after = (node.meta["val"].shape[1] for node in (cut.args[0], cut))
    return isinstance(after, int) or after.node.expr.free_symbols <= before.node.expr.free_symbols


OTHER_SCORES = "the scores are a sum over heads of weighed, rectified products of queries and keys"
OTHER_PICKS = "the picks are the best entries that a row may see, ascending, then -1"
ROUNDED = "nothing is rounded between queries, keys, weights and scores"
OTHER_BLOCKS = "the blocks kept are the best by their best entry, and that of the newest entry a row sees"
FLAWS = {  # the rule it breaks
    "weights squared": OTHER_SCORES,
    "one head twice": OTHER_SCORES,
    "products in bf16": ROUNDED,
    "rectified twice": OTHER_PICKS,
    "the worst": OTHER_PICKS,
    "scores with bounds": OTHER_PICKS,
    "the best first": OTHER_PICKS,
    "sees one more": OTHER_BLOCKS,
    "the newest block is forgotten": OTHER_BLOCKS,
    "blocks by their worst": OTHER_BLOCKS,
    "scores are returned": "only picks and kept blocks are read outside",
    "products are returned": "only picks and kept blocks are read outside",
    "a draw in between": "nothing is written in between, and no effect reads it there",
}


@dataclass(frozen=True)
class Indexer:
    """How one indexer is written. The numbers are what the region must say of itself."""

    product: str = "einsum"
    total: str = "weighed"
    mask: str = "filled"
    choice: str = "unique keys"
    role: str = "source"
    heads: int = 4
    chunk: int = 4
    k: int = 3
    block: int = 2
    keep: int = 2
    ratio: int = 1
    scale: float = 0.5
    records: bool = True
    rounded: bool = True  # records are decoded to bf16, which holds all they say
    by_entry: bool = False  # candidates come as a mask of entries, not of blocks
    flaw: str = ""

    sizes = ("rows", "rows", "rows", "rows", "rows", "requests", "requests", "longest", "blocks")

    def to_trace(self) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[Tensor]]:
        """The function, tensors with symbolic rows (`sizes`), weights."""
        rows, longest = 5, 4
        ints = torch.int64
        inputs = [
            torch.randn(rows, self.heads, WIDTH).bfloat16(),
            torch.randn(rows, self.heads).bfloat16(),
            torch.tensor([9, 10, 11, 12, 3]),  # positions
            torch.tensor([0, 0, 0, 0, 1]),  # requests
            torch.tensor([0, 1, 2, 3, 0]),  # columns
            torch.tensor([0, 4], dtype=ints),  # first rows
            torch.tensor([2, 0], dtype=ints),  # slots
            torch.arange(longest),
            torch.arange(7),
        ]
        if self.role == "re_indexer":
            inputs.append(torch.rand(rows, 7) < 0.5)
        keys = torch.randn(SLOTS, CAPACITY, WIDTH).bfloat16()
        return self.choose, inputs, [MXFP4_RECORD.encode(keys) ^ SCALES if self.records else keys]

    @property
    def all_sizes(self) -> tuple[str, ...]:
        return (*self.sizes, "rows") if self.role == "re_indexer" else self.sizes

    # what indexes is clamped: an input that only indexes is drawn by what it indexes, as far as a program shows that
    def choose(self, *args: Tensor) -> tuple[Tensor, ...]:
        q, w, positions, requests, columns, first, slots, longest, blocks, *kept, stored = args
        rows = (first.unsqueeze(-1) + longest).clamp(max=q.shape[0] - 1)
        entries = (blocks.unsqueeze(-1) * self.block + torch.arange(self.block)).flatten()
        stored = stored ^ SCALES if self.records else stored
        k = stored[slots.clamp(min=0).unsqueeze(-1), entries.clamp(max=CAPACITY - 1)]
        k = self.decode(k) if self.records else k
        q = q.round()  # products of small integers and records are exact, in whatever order they are summed
        scores, matches = self.score(q[rows], k, (w.float() * self.scale)[rows])
        scores = scores[requests.clamp(min=0), columns.clamp(min=0)]
        scores = scores.relu() if self.flaw == "rectified twice" else scores
        scores = scores.clamp(max=1e4) if self.flaw == "scores with bounds" else scores
        before = positions.clamp(min=0) if self.flaw == "pads see one" else positions  # legal, and no ratio
        seen = (before + 1) // self.ratio
        seen = seen.clamp(max=100) if self.flaw == "sees 100 at most" else seen  # legal, and no ratio
        shown = seen + 1 if self.flaw == "sees one more" else seen
        masked = MASKS[self.mask](scores, entries, shown)
        outputs: list[Tensor] = []
        if self.role == "candidate_source":
            outputs.append(self.candidates(masked, seen))
            if self.flaw == "a draw in between":
                outputs.append(drawn_like(outputs[0].float()))
        elif kept:
            mask = kept[0] if self.by_entry else kept[0].repeat_interleave(self.block, -1)
            masked = masked.masked_fill(~mask, -torch.inf)
        outputs.insert(0, self.pick(masked))
        if self.flaw == "scores are returned":
            outputs.append(masked)
        if self.flaw == "products are returned":
            outputs.append(matches)
        return tuple(outputs)

    def decode(self, record: Tensor) -> Tensor:
        if self.rounded:
            return MXFP4_RECORD.decode(record)
        groups = record.shape[-1] // (MXFP4_RECORD.data_bytes + 1)
        data, scale = record.split((record.shape[-1] - groups, groups), -1)
        values = decode_e2m1(unpack_pairs(data)).unflatten(-1, (-1, GROUP))
        return (values * power_of_two(scale).unsqueeze(-1)).flatten(-2)

    def score(self, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(())
        parts = list(zip(q.split(self.chunk, 2), w.split(self.chunk, 2), strict=True))
        if self.flaw == "one head twice":
            parts.append((q[:, :, :1], w[:, :, :1]))
        for some_q, some_w in parts:
            matches = F.relu(PRODUCTS[self.product](some_q, k))
            if self.flaw == "products in bf16":
                matches = F.relu(torch.einsum("rqhd,red->rqhe", some_q, k.to(some_q.dtype))).float()
            if self.flaw == "weights squared":
                some_w = some_w * some_w
            total = total + SUMS[self.total](matches, some_w)
        return total, matches

    def candidates(self, scores: Tensor, seen: Tensor) -> Tensor:
        match self.flaw:
            case "the newest block is forgotten":
                seen = seen * 0
            case "blocks by their worst":
                worst = scores.unflatten(-1, (-1, self.block)).amin(-1, keepdim=True)
                scores = worst.expand(-1, -1, self.block).flatten(1)
        return candidate_mask(scores, seen, self.keep, self.block)

    def pick(self, scores: Tensor) -> Tensor:
        if self.flaw == "the worst":
            best = CHOICES[self.choice](-scores, self.k)
            return torch.where(scores.gather(-1, best) > -torch.inf, best, 2**62).sort(-1).values
        best = CHOICES[self.choice](scores, self.k)
        if self.flaw == "the best first":
            return torch.where(scores.gather(-1, best) > -torch.inf, best, -1)
        if self.flaw == "a size of another kind":  # legal here, but not where sizes change
            behind = torch.sym_max(scores.shape[-1], scores.shape[0])
            picks = torch.where(scores.gather(-1, best) > -torch.inf, best, behind).sort(-1).values
            return torch.where(picks < behind, picks, -1)
        if self.choice == "unique keys":
            picks = ascending_picks(scores, self.k)
        else:
            there = scores.gather(-1, best).isneginf().logical_not()
            picks = torch.where(there, best, 2**40).sort(-1).values
            picks = picks.masked_fill(picks == 2**40, -1)
        return picks


def legal_indexers(draw: st.DrawFn) -> Indexer:
    heads = draw(st.integers(1, 5))
    return Indexer(
        draw(st.sampled_from(sorted(PRODUCTS))),
        draw(st.sampled_from(sorted(SUMS))),
        draw(st.sampled_from(sorted(MASKS))),
        draw(st.sampled_from(sorted(CHOICES if slices_have_k() else CHOICES.keys() - {"stable sort"}))),
        draw(st.sampled_from(ROLES)),
        heads,
        draw(st.integers(1, heads)),
        k=draw(st.integers(1, 4)),
        block=draw(st.integers(2, 4)),
        keep=draw(st.integers(1 if slices_have_k() else 2, 3)),
        ratio=draw(st.sampled_from([1, 2, 4])),
        scale=draw(st.sampled_from([0.5, 0.0625, 1.5])),
        records=draw(st.booleans()),
        rounded=draw(st.booleans()),
    )


legal = st.composite(legal_indexers)()
OF_CANDIDATES = frozenset(["a draw in between", *(flaw for flaw, rule in FLAWS.items() if rule == OTHER_BLOCKS)])


def with_flaw(indexer: Indexer, flaw: str) -> Indexer:
    """`indexer`, so written that it has `flaw` and no other."""
    role = "candidate_source" if flaw in OF_CANDIDATES else indexer.role
    return replace(indexer, flaw=flaw, role=role)


flawed = st.builds(with_flaw, legal, st.sampled_from(sorted(FLAWS)))
