"""form: what an `attention` region computes and where its operands are, read from its attributes, or refused.

    region attention, heads=64, width=512, keys=(("e4m3", "ue8m0", 32, 528), ("e2m1", "e4m3", 16, 288)), ...
    ->  Form(64, 512, ..., branches=(Branch("window", 128, ...), Branch("picked", 512, ...)))

The template takes the attention of the plain model at any sizes that fit a GPU's tiles, with any mix of formats. What a
region may say beyond that (p relative to the total, no sink, RoPE of halves ...) is refused by the sentences in RULES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import known_equal
from v41.lowering.rowwise.read import Tensor as Described
from v41.lowering.rowwise.read import described
from v41.lowering.templates import lone
from v41.lowering.templates.decode import UNIT
from v41.lowering.templates.lone import NotTaken
from v41.regions import region_of

KIND = "attention"
AS_IS = "as_is"
SHORTEST = 64  # numbers made from nibbles that a product of few heads may sum over: see cross_compile.short_products
FEWEST, WIDEST = SHORTEST, 512  # channels of a head; the results of a tile fill a program
MASKS = {"window": "visible", "picked": "picks"}  # which operand says what of a branch is seen
VALUES, SCALES = ("e4m3", "e2m1"), ("ue8m0", "e4m3")
HANDED = "rows"  # records are handed over, a row each
SOURCES = (HANDED, "slots", "step")  # as passes/take_in_gathers.py says what they mean


@dataclass(frozen=True)
class Branch:
    """Keys of one kind: `count` a row, each a record of `bytes`, or the numbers themselves."""

    name: str
    count: int
    values: str  # of VALUES, or AS_IS
    scales: str = ""
    group: int = 1  # channels under one scale
    bytes: int = 0
    source: str = HANDED  # of SOURCES
    places: str = ""  # in a cache: the operand that says them, which may be the mask

    @property
    def mask(self) -> str:
        return MASKS[self.name]

    @property
    def lies(self) -> bool:
        """Whether records are read where they lie in a cache."""
        return self.source != HANDED

    @property
    def of_step(self) -> bool:
        """Whether some of them are of this step."""
        return self.source == "step"

    @property
    def records(self) -> tuple[str, ...]:
        """The operands that hold them."""
        return (self.name, f"{self.name}_records") if self.of_step else (self.name,)

    @property
    def group_bytes(self) -> int:
        """Of a group's values."""
        return self.group // 2 if self.values == "e2m1" else self.group


@dataclass(frozen=True)
class Form:
    """turns: sign of the rotation of queries and of the output, 0 for none. rotary: channels that turn, the last."""

    heads: int
    width: int
    scale: float
    rotary: int
    turns: tuple[int, int]
    branches: tuple[Branch, ...]


def form_of(call: Node) -> Form:
    """The Form of a region, or NotTaken."""
    attrs = region_of(call).attrs
    for sentence, holds in RULES:
        if not holds(attrs):
            raise NotTaken(call, sentence)
    rope = attrs["rope"]
    rotary = rope["width"] if rope is not None else 0
    branches = _branches(attrs)
    return Form(attrs["heads"], attrs["width"], attrs["scale"], rotary, tuple(attrs["turns"]), branches)


def _branches(attrs: dict[str, Any]) -> tuple[Branch, ...]:
    counts = [attrs["window"], attrs["picked"]]
    formats = [(AS_IS,) if keys == AS_IS else keys for keys in attrs["keys"]]
    named = zip(MASKS, counts, formats, attrs["sources"], strict=False)
    return tuple(
        replace(Branch(name, count, *keys), source=source, places=_places(name, attrs))
        for name, count, keys, source in named
    )


def _places(name: str, attrs: dict[str, Any]) -> str:
    """The operand that says where in its slot a record lies."""
    return f"{name}_places" if f"{name}_places" in attrs["operands"] else MASKS[name]


def _rope_is_of_last_pairs(attrs: dict[str, Any]) -> bool:
    rope = attrs["rope"]
    return rope is None or (rope["pairs"], rope["channels"]) == ("adjacent", "last")


def _fits_tiles(attrs: dict[str, Any]) -> bool:
    return FEWEST <= attrs["width"] <= WIDEST and _is_power(attrs["width"])


def _is_packed_in_tiles(attrs: dict[str, Any]) -> bool:
    """Records of known values, in groups that tiles can hold, values first."""
    return all(
        branch.values == AS_IS
        or (branch.values in VALUES and branch.scales in SCALES
            and _is_power(branch.group) and 2 * UNIT <= branch.group <= attrs["width"]
            and branch.bytes == attrs["width"] // branch.group * (branch.group_bytes + 1))
        for branch in _branches(attrs)
    )  # fmt: skip


def _is_power(number: int) -> bool:
    return number.bit_count() == 1


RULES: tuple[tuple[str, Callable[[dict[str, Any]], bool]], ...] = (
    ("rounds p to something else than bf16", lambda attrs: attrs["p"] == "bfloat16"),
    ("takes p relative to something else than the largest score", lambda attrs: attrs["p_over"] == "max"),
    ("has no sink", lambda attrs: attrs["sink"] and attrs["empty"] == "zero"),
    ("shows what hidden keys hold", lambda attrs: not attrs["reads_hidden"]),
    ("hides keys by other masks than a bool and picks",
     lambda attrs: attrs["masks"] == tuple(MASKS.values())[: len(attrs["keys"])]),
    ("reads records in another way", lambda attrs: all(source in SOURCES for source in attrs["sources"])),
    ("turns other channels than the last, in adjacent pairs", _rope_is_of_last_pairs),
    (f"has heads of other widths than powers of two from {FEWEST} to {WIDEST}", _fits_tiles),
    ("packs keys in another way", _is_packed_in_tiles),
)  # fmt: skip


# ---- its operands


COUNTS, RECORDS = (torch.int64, torch.int32), (torch.uint8, torch.bfloat16)
TYPES = {  # of each operand; what numbers come as they are, and a sink, may be any float
    "queries": (torch.bfloat16,),
    "visible": (torch.bool,),
    "picks": COUNTS,
    "slots": COUNTS,
    "cos": (torch.float32,),
    "sin": (torch.float32,),
    "sink": (torch.bfloat16, torch.float16, torch.float32),
    **dict.fromkeys((*MASKS, *(f"{name}_records" for name in MASKS)), RECORDS),
    **dict.fromkeys((f"{name}_{what}" for name in MASKS for what in ("places", "rows")), COUNTS),
    **dict.fromkeys((f"{name}_in_step" for name in MASKS), (torch.bool,)),
}


def roles_of(call: Node) -> dict[Node, str]:
    """The placeholders that the kernel reads, by what they are to the region."""
    return lone.roles_of(call, TYPES, lambda role, value: _is_dense(value))


def _is_dense(value: Tensor) -> bool:
    """Whether it lies in rows without gaps."""
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not known_equal(stride, step):
            return False
        step = step * size
    return True


def described_operand(role: str, node: Node, form: Form) -> Described:
    """What the kernel is told of an operand. How many slots and entries a cache has it is told at each launch."""
    if any(role == branch.name and branch.lies for branch in form.branches):
        value = node.meta["val"]
        return Described(role, value.dtype, (0, 0, int(value.shape[-1])), ())
    return described(role, node)
