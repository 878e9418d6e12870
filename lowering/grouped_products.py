"""grouped_products: a grouped product with few rows a group runs at the speed of reading its weights.

    before   aten._grouped_mm(x, weights.mT, ends)          after   v41::grouped_product(x, weights, ends)

The library's kernel is made for many rows: of 96 experts at released widths it reads 2.9 TB/s at 16 tokens, where an
H200 copies 4.2. Ours (grouped_kernel.py) takes over up to MEAN rows a group, which the operator sees when it runs, so
one program serves all sizes; more rows go to the library as before. Site: both factors of one 16-bit type, weights
[groups, columns, terms] in memory, no bias, ends int32. Sums are fp32 in both, each in its own order; ours gives a row
the same bits in any batch of few.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import known_equal

aten = torch.ops.aten
MEAN = 24  # rows a group, above which the library is as fast
HALVES = (torch.bfloat16, torch.float16)
ARGUMENTS = ("self", "mat2", "offs", "bias", "out_dtype")


@dataclass(frozen=True)
class Tiles:
    """Rows and columns of a program's tile, terms at a time, blocks of terms asked for ahead."""

    rows: int
    columns: int = 64
    terms: int = 64
    stages: int = 6
    warps: int = 4


def tiles_for(rows: int, groups: int) -> Tiles:
    return Tiles(height_for(rows, groups))


def height_for(rows: int, groups: int) -> int:
    """Rows of a tile that holds most groups at once, by their mean number."""
    mean = -(-rows // groups)
    return next(most for most in (16, 32, 64, 128) if 4 * mean <= most or most == 128)


def grouped_on_gpu(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [rows, terms], weights [groups, columns, terms], ends int32 [groups] -> [rows, columns]."""
    if x.shape[0] > MEAN * weights.shape[0]:
        return grouped_by_library(x, weights, ends)
    return launch(x, weights, ends)


def launch(x: Tensor, weights: Tensor, ends: Tensor, tiles: Tiles | None = None) -> Tensor:
    """x [rows, terms], weights [groups, columns, terms], both contiguous and of one 16-bit type; ends int32 [groups]
    -> [rows, columns]. Rows behind the last end are left as memory was."""
    rows, terms = x.shape
    groups, columns, _ = weights.shape
    chosen = tiles or tiles_for(rows, groups)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        grid = (groups * -(-columns // chosen.columns),)
        from v41.lowering.grouped_kernel import grouped  # needs Triton, which a CPU may lack

        grouped[grid](x, weights, ends, out, columns, terms, chosen.rows, chosen.columns,
                      chosen.terms, chosen.stages, num_warps=chosen.warps)  # fmt: skip
    return out


def grouped_by_library(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm(x, weights.mT, ends)


def grouped_of_fakes(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[1]))


torch.library.define("v41::grouped_product", "(Tensor x, Tensor weights, Tensor ends) -> Tensor")
torch.library.impl("v41::grouped_product", "CUDA", grouped_on_gpu)
torch.library.impl("v41::grouped_product", "CPU", grouped_by_library)
torch.library.register_fake("v41::grouped_product", grouped_of_fakes)


def grouped_products(gm: GraphModule, devices: Collection[str] = ("cuda",)) -> int:
    """Rewrites the grouped products of `gm`, functional ATen, that run on `devices`, in place. How many there were."""
    found = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        if node.meta["val"].device.type not in devices or not fits(node):
            continue
        x, weights, ends = (each for each in [*node.args, *node.kwargs.values()] if each is not None)
        with gm.graph.inserting_before(node):
            assert isinstance(weights, Node)
            rows = gm.graph.call_function(aten.permute.default, (weights, [0, 2, 1]))
            rows.meta = {**weights.meta, "val": weights.meta["val"].permute(0, 2, 1)}
            ours = gm.graph.call_function(torch.ops.v41.grouped_product.default, (x, rows, ends))
        ours.meta = dict(node.meta)
        node.replace_all_uses_with(ours)
        gm.graph.erase_node(node)
        found += 1
    if found:
        gm.recompile()
    return found


def given_to(product: Node) -> dict[str, Any]:
    """The arguments of a grouped product by name."""
    return {**dict(zip(ARGUMENTS, product.args, strict=False)), **product.kwargs}


def fits(node: Node) -> bool:
    """Whether this is a site."""
    given = given_to(node)
    if given.get("bias") is not None or not isinstance(given.get("offs"), Node):
        return False
    x, weights, ends = (given[name].meta["val"] for name in ARGUMENTS[:3])
    if x.ndim != 2 or weights.ndim != 3 or ends.dtype != torch.int32:
        return False
    if x.dtype not in HALVES or weights.dtype != x.dtype or given.get("out_dtype") not in (None, x.dtype):
        return False
    groups, terms, columns = weights.shape
    if not all(isinstance(size, int) for size in (groups, terms, columns)):
        return False
    contiguous = known_equal(x.stride(1), 1) and known_equal(x.stride(0), terms)
    return contiguous and tuple(weights.stride()) == (terms * columns, 1, terms) and known_equal(ends.stride(0), 1)
