"""form: what an `index_scores` region computes and where its operands are, read from its attributes, or refused.

    region index_scores, role="candidate_source", heads=32, width=128, k=512, ratio=1, block=8, keep=2048, ...
    ->  Form(32, 128, scale, 512, ratio=1, spread=8, reach=..., given="", block=8, keep=2048)

The template takes the indexer of the plain model at any number of heads, whatever its role: dense, among candidates by
a mask, or among blocks of candidates by a list. What a region may say beyond that is refused by the sentences in RULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, ops
from torch.fx import Node

from v41._compat import known_equal
from v41.lowering.templates import lone
from v41.lowering.templates.lone import NotTaken
from v41.lowering.templates.topk import MOST
from v41.regions import body_of, region_of

KIND = "index_scores"
WIDTHS = (32, 64, 128)  # records of 17 times 1, 2 or 4 bytes, one of them scales: neither is read across another
FAR = 1 << 24  # beyond every entry and number: what is computed of them fits 32 bits
TILE = 64  # entries that a program scores at once, a multiple of what numbers and blocks stand for


@dataclass(frozen=True)
class Form:
    """spread: entries that a number stands for. reach: the last entry that is asked of the cache. given: by what the
    entries are restricted. block, keep: of what is kept for others, or of the list of candidates; 0 without."""

    heads: int
    width: int
    scale: float
    k: int
    ratio: int
    spread: int
    reach: int
    given: str  # "", "candidates": bool [T, E], "candidate_blocks": [T, K] ascending, then -1
    block: int
    keep: int
    outputs: tuple[str, ...]  # of "picks", "kept": bool [T, B], "kept_blocks": [T, min(keep, B)] ascending, then -1

    @property
    def groups(self) -> int:
        """Groups of 32 channels under one scale; and bytes of a unit, of which a record has 17 and may start at any."""
        return self.width // 32

    @property
    def keeps(self) -> bool:
        return not {"kept", "kept_blocks"}.isdisjoint(self.outputs)

    @property
    def listed(self) -> bool:
        return self.given == "candidate_blocks"

    @property
    def padded_heads(self) -> int:
        """Columns of a product: a power of two that the tensor cores take."""
        return max(16, 1 << (self.heads - 1).bit_length())


def form_of(call: Node) -> Form:
    """The Form of a region, or NotTaken."""
    attrs = region_of(call).attrs
    for sentence, holds in RULES:
        if not holds(attrs):
            raise NotTaken(call, sentence)
    given = next((role for role in attrs["operands"] if role in ("candidates", "candidate_blocks")), "")
    read: dict[str, Any] = {name: attrs[name] for name in ("heads", "width", "scale", "k", "ratio", "spread", "reach")}
    block, keep = attrs["block"] or 0, attrs["keep"] or 0
    return Form(**read, given=given, block=block, keep=keep, outputs=attrs["outputs"])


def _packs_otherwise(attrs: dict[str, Any]) -> bool:
    return attrs["record"] != "mxfp4" or attrs["width"] not in WIDTHS


def _fills_a_tile(count: int | None) -> bool:
    return count is None or (count.bit_count() == 1 and count <= TILE)


RULES: tuple[tuple[str, Callable[[dict[str, Any]], bool]], ...] = (
    (f"reads keys that are no MXFP4 records of {WIDTHS} channels", lambda attrs: not _packs_otherwise(attrs)),
    ("takes keys, rows or what they see by other operands",
     lambda attrs: {"queries", "weights", "cache", "slots", "rows", "requests", "columns", "positions", "blocks"}
     <= set(attrs["operands"])),
    ("counts what a row sees otherwise", lambda attrs: attrs["ratio"] is not None and attrs["numbered"]),
    (f"numbers entries otherwise than by powers of two up to {TILE} a number, as far as the cache reaches",
     lambda attrs: None not in (attrs["spread"], attrs["reach"]) and _fills_a_tile(attrs["spread"])
     and attrs["reach"] < FAR),
    (f"has blocks of more than {TILE} entries, or of no power of two", lambda attrs: _fills_a_tile(attrs["block"])),
    (f"picks or keeps more than {MOST}", lambda attrs: max(attrs["k"], attrs["keep"] or 0) <= MOST),
    ("has more heads than a tile", lambda attrs: attrs["heads"] <= 128),
)  # fmt: skip


# ---- its operands


TYPES = {  # of each operand
    "queries": (torch.bfloat16,),
    "weights": (torch.bfloat16, torch.float32),
    "cache": (torch.uint8,),
    "positions": (torch.int64,),
    "requests": (torch.int64,),
    "columns": (torch.int64,),
    "rows": (torch.int64,),
    "slots": (torch.int64,),
    "blocks": (torch.int64,),
    "candidates": (torch.bool,),
    "candidate_blocks": (torch.int64,),
}
AXES = {"cache": 3, "rows": 2, "slots": 1, "blocks": 1, "candidates": 2, "candidate_blocks": 2}  # sizes are read there
SAME = (ops.aten.view.default, ops.aten._unsafe_view.default, ops.aten.unsqueeze.default)  # numbers in the same order
FREE = {"cache": 0, "rows": 2, "candidates": 2, "candidate_blocks": 2}  # how many first sizes may be symbols; else one


def roles_of(call: Node) -> dict[Node, str]:
    """The placeholders that the kernel reads, by what they are to the region."""
    found = lone.roles_of(call, TYPES, lambda role, value: _lies_dense(value, FREE.get(role, 1)))
    heads = region_of(call).attrs["heads"] * region_of(call).attrs["width"]
    for node, role in found.items():
        value: Tensor = node.meta["val"]
        if value.ndim != AXES.get(role, value.ndim):
            raise NotTaken(node, f"is {role} of {value.ndim} axes")
        if role == "queries" and not known_equal(math.prod(value.shape[1:]), heads):
            raise NotTaken(node, "is queries of no row an index")
    other = _counts_slots(call)
    if other is not None:
        raise NotTaken(other, "takes slots that it computes")
    return found


def _counts_slots(call: Node) -> Node | None:
    """What makes other numbers of the slots before they index the cache, for the kernel reads them as they come. Those
    of requests are taken by row where each row is a request of its own."""
    given = body_of(call).graph.find_nodes(op="placeholder")
    fresh = [node for node, role in zip(given, region_of(call).attrs["operands"], strict=True) if role == "slots"]
    while fresh:
        slots = fresh.pop()
        for user in slots.users:
            taken = user.target is ops.aten.index.Tensor
            if user.target in SAME or (taken and user.args[0] is slots):
                fresh.append(user)
            elif not taken:
                return user
    return None


def _lies_dense(value: Tensor, free: int) -> bool:
    """Whether there are no gaps, but for rows: a stride between them is read when it runs if it is a symbol."""
    step: Any = 1
    for place, (size, stride) in reversed(list(enumerate(zip(value.shape, value.stride(), strict=True)))):
        if isinstance(step, int) and step != stride:
            return False
        if not isinstance(size, int):
            if place >= free:
                return False
            step = None
        elif step is not None:
            step *= size
    return True
