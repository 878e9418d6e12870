"""re_indexers: regions index_scores that pick among the candidates of another. Found, not judged.

    source -> kept [T, B] -> repeat -> mask [T, E] -> (rows of it, by a seam of trim_replay) -> region's "candidates"

A mask is read back to who keeps its blocks: through what repeats each block for its entries, and through the seam that
takes this site's rows of it. Whether the entries of one block are alike is tried on drawn numbers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymInt
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.index_parts import SPREADS
from v41.passes.matching import between, shape
from v41.passes.outline_index_scores import KIND
from v41.passes.replay_seam import KIND as KEPT_ROWS
from v41.passes.replay_seam import rows_taken
from v41.regions import is_region, region_of


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


def _repeats(kept: Node, mask: Node, size: int) -> bool:
    """Whether the mask says of each entry what is said of its block."""
    order = {node: i for i, node in enumerate(kept.graph.nodes)}
    with outside_fake_mode():
        drawn = numbers(kept, 0) > 0
        found = evaluate(between(order, {kept}, [mask]), {kept: drawn}, mask, keep_types=True)
        return min(drawn.shape) > 1 and torch.equal(found, drawn.repeat_interleave(size, -1))
