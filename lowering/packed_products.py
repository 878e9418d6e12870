"""packed_products: grouped products of weights that are stored as MXFP4 read them as they are stored.

    before   pairs, scales -> decode -> W bf16 [groups, columns, terms] -> aten._grouped_mm(x, W.mT, ends)
    after    v41::packed_product(x, pairs, scales, ends, step)

Decoded whole, the experts of a released layer are 9 GB a product, written and read back at every step, of which a few
tokens need a hundredth. The kernel (packed_kernel.py) reads codes and scales, 27 % of the bytes of bf16, of the groups
that have rows, and serves any number of them. Site: a product in a region of experts, which says that its weights are
"mxfp4/32" (or another group), known by what their decoding computes; both factors bf16, all contiguous, terms a
multiple of 64, no bias. x is put in the order in which codes come out of their bytes, by nodes that Inductor fuses into
what makes x. Exact but for the order of fp32 sums: e2m1 times a power of two is a bf16. On a CPU each group with rows
is decoded alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.lowering.grouped_products import given_to, height_for
from v41.lowering.packed_kernel import NAME, TEXT
from v41.lowering.rowwise import Kernel
from v41.lowering.templates.decode import UNIT, packs
from v41.regions import made_in

aten = torch.ops.aten
KIND, FORMAT = "experts", "mxfp4/"
BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
LEAST, LARGEST = 16 * UNIT, 128  # terms of a tile: a product of a code of each unit has 16
KERNEL = Kernel(NAME, TEXT, [], [])
TURNS = (aten.permute.default, aten.transpose.int)


@dataclass(frozen=True)
class Tiles:
    """Rows and columns of a program's tile, tiles of terms asked for ahead."""

    rows: int
    columns: int = 64
    stages: int = 3
    warps: int = 4


def tiles_for(rows: int, groups: int) -> Tiles:
    """Tiles that hold most groups at once; what is decoded meets many rows."""
    height = height_for(rows, groups)
    return Tiles(height) if height < 64 else Tiles(height, 128, warps=8)


def step_of(terms: int) -> int:
    """Terms of a tile: the largest power of two that fits and leaves no rest."""
    return min(terms & -terms, LARGEST)


# ---- the operator


def ordered(x: Tensor, step: int) -> Tensor:
    """[rows, terms]: the terms of each `step` as decoding leaves them, the first of all units, then the second."""
    return x.unflatten(1, (-1, step // UNIT, UNIT)).mT.flatten(1)


def launch(x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor, step: int, tiles: Tiles | None = None) -> Tensor:
    """x bf16 [rows, terms], `ordered`; pairs of codes [groups, columns, terms / 2], bytes of ue8m0 [groups, columns,
    terms / group], ends int32 [groups] -> bf16 [rows, columns]. Rows behind the last end are left as memory was."""
    chosen = tiles or tiles_for(x.shape[0], pairs.shape[0])
    out = x.new_empty(x.shape[0], pairs.shape[1])
    if x.shape[0]:
        grid, constants = launched(x.shape[0], pairs.shape, scales.shape[2], step, chosen)
        pairs = pairs.clone() if pairs.storage_offset() % 2 else pairs  # two are read at a time
        KERNEL.function[grid](x, pairs.view(torch.int16), scales.view(torch.uint8), ends, out, **constants,
                              PACKED=packs(x.device), num_warps=chosen.warps)  # fmt: skip
    return out


def launched(
    rows: int, stored: Sequence[int], scales: int, step: int, tiles: Tiles
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and tl.constexpr arguments, for pairs of sizes `stored` and so many scales a column."""
    groups, columns, pairs = stored
    by_row = rows < groups
    grid = ((rows if by_row else groups) * -(-columns // tiles.columns),)
    return grid, {"GROUPS": groups, "PADDED": 1 << (groups - 1).bit_length(), "COLUMNS": columns, "TERMS": 2 * pairs,
                  "SCALED": 2 * pairs // scales, "ROWS": tiles.rows, "BLOCK": tiles.columns, "STEP": step,
                  "STAGES": tiles.stages, "BY_ROW": by_row}  # fmt: skip


def packed_on_cpu(x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor, step: int) -> Tensor:
    x = x.unflatten(1, (-1, UNIT, step // UNIT)).mT.flatten(1)  # the model's order again
    y, begin = x.new_empty(x.shape[0], pairs.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if begin < end:
            y[begin:end] = F.linear(x[begin:end], decoded(pairs[group], scales[group]))
        begin = end
    return y


def decoded(pairs: Tensor, scales: Tensor) -> Tensor:
    """Codes, the low nibble first, and scales of one group -> bf16 [columns, terms]."""
    values = _values()[pairs.view(torch.uint8).int()].flatten(-2)
    powers = (scales.view(torch.uint8).int() << 23).clamp(min=1 << 22).view(torch.float32)  # 2^-127 is no normal fp32
    return (values.unflatten(-1, (scales.shape[-1], -1)) * powers[..., None]).flatten(-2).bfloat16()


@cache
def _values() -> Tensor:
    """Of each byte its two codes, fp32 [256, 2]."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.cat((sizes, -sizes))[torch.stack((byte & 15, byte >> 4), -1)]


def packed_of_fakes(x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor, step: int) -> Tensor:
    return x.new_empty((x.shape[0], pairs.shape[1]))


torch.library.define("v41::packed_product", "(Tensor x, Tensor pairs, Tensor scales, Tensor ends, int step) -> Tensor")
torch.library.impl("v41::packed_product", "CUDA", launch)
torch.library.impl("v41::packed_product", "CPU", packed_on_cpu)
torch.library.register_fake("v41::packed_product", packed_of_fakes)


# ---- the rewrite


@dataclass(frozen=True)
class Site:
    """One product, and how its weights are stored."""

    x: Node
    pairs: Node
    scales: Node
    ends: Node
    terms: int


def packed_products(gm: GraphModule, devices: Collection[str] = ("cuda", "cpu")) -> tuple[int, int]:
    """Rewrites the products of `gm`, functional ATen whose regions are inlined, in place. How many read what is stored
    now, and how many still have their weights decoded whole."""
    taken, left, ordered = 0, 0, dict[tuple[Node, int], Node]()
    for product in gm.graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        region = made_in(product)
        if region is None or region.kind != KIND or not str(region.attrs.get("weights")).startswith(FORMAT):
            continue
        site = site_of(product) if product.meta["val"].device.type in devices else None
        if site is None:
            left += 1
            continue
        step = step_of(site.terms)
        with gm.graph.inserting_before(product):
            x = ordered.get((site.x, step)) or _ordered(gm, site.x, step)
            ordered[site.x, step] = x
            ours = gm.graph.call_function(
                torch.ops.v41.packed_product.default, (x, site.pairs, site.scales, site.ends, step)
            )
        ours.meta = dict(product.meta)
        product.replace_all_uses_with(ours)
        gm.graph.erase_node(product)
        taken += 1
    if taken:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return taken, left


def site_of(product: Node) -> Site | None:
    """What is to be known of a product, or None if it is no site."""
    given = given_to(product)
    x, ends = given["self"], given.get("offs")
    if given.get("bias") is not None or not isinstance(ends, Node) or not isinstance(x, Node):
        return None
    stored = sorted(_stored(given["mat2"]), key=lambda node: -node.meta["val"].numel())
    if len(stored) != 2 or given.get("out_dtype") not in (None, torch.bfloat16):
        return None
    rows, (pairs, scales), weights = x.meta["val"], (node.meta["val"] for node in stored), given["mat2"].meta["val"]
    if {rows.dtype, weights.dtype, product.meta["val"].dtype} != {torch.bfloat16} or rows.ndim != 2:
        return None
    groups, terms, columns = weights.shape
    if not _is_transposed(given["mat2"]) or any(each.dtype not in BYTES for each in (pairs, scales)):
        return None
    shapes = [(groups, columns, terms // 2), (groups, columns)]
    if tuple(pairs.shape) != shapes[0] or tuple(scales.shape[:2]) != shapes[1] or scales.ndim != 3:
        return None
    group = terms // scales.shape[2]
    fits = group.bit_count() == 1 and UNIT <= group <= step_of(terms) >= LEAST and group * scales.shape[2] == terms
    dense = all(each.is_contiguous() for each in (pairs, scales)) and known_equal(ends.meta["val"].stride(0), 1)
    if not fits or not dense or ends.meta["val"].dtype != torch.int32:
        return None
    return Site(x, stored[0], stored[1], ends, terms)


def _is_transposed(weights: Node) -> bool:
    """Whether it is what was decoded, which has terms last, with terms and columns exchanged and nothing else. Where
    sizes are equal, shapes do not tell."""
    node, axes = weights, [0, 1, 2]
    while node.target in TURNS:
        given: Any = node.args
        if node.target is aten.permute.default:
            turned = [axis % 3 for axis in given[1]]
        else:
            a, b = (axis % 3 for axis in given[1:])
            turned = [{a: b, b: a}.get(axis, axis) for axis in range(3)]
        node, axes = given[0], [turned[axis] for axis in axes]
    return axes == [0, 2, 1] and not getattr(node.target, "is_view", False)


def _stored(weights: Node) -> Iterator[Node]:
    """What the region was given of which `weights` is decoded."""
    region, seen, stack = made_in(weights), {weights}, [weights]
    while stack:
        node = stack.pop()
        if made_in(node) is not region:
            yield node
            continue
        fresh = [arg for arg in node.all_input_nodes if arg not in seen]
        seen.update(fresh)
        stack += fresh


def _ordered(gm: GraphModule, x: Node, step: int) -> Node:
    """`x` with the terms of each `step` in the order of decoding, as nodes in front of the insertion point."""
    terms = x.meta["val"].shape[1]
    node = x
    for target, args in (
        (aten.view.default, ([-1, terms // step, step // UNIT, UNIT],)),
        (aten.permute.default, ([0, 1, 3, 2],)),
        (aten.clone.default, ()),
        (aten.view.default, ([-1, terms],)),
    ):
        kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format} if target is aten.clone.default else {}
        value = target(node.meta["val"], *args, **kwargs)
        node = gm.graph.call_function(target, (node, *args), kwargs)
        node.meta["val"] = value
    return node
