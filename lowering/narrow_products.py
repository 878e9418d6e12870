"""narrow_products: a matrix product of widened 16-bit floats runs on the floats as they were, summed in fp32.

    before   x bf16 -> fp32 -> views -> mm -> fp32          after   x bf16 -> views -> v41::product -> fp32

Plain PyTorch has no way to say "bf16 in, fp32 out" but to widen both factors: so it runs on the fp32 units, at a
fifteenth of the tensor cores' rate on an H200, and the widened factor is written out first (the head's weights: 4 GB a
step). Site: mm or bmm, both factors of one 16-bit type, widened to fp32, with views, copies and splits at most between.
Exact: the product of two such values has at most 22 significant bits, so fp32 holds it, here and there. What differs is
how fp32 sums are taken: a tensor core cuts what it adds, so the error grows with the length of a sum, on an H200 2.7e-6
of the result at 5120 terms, where fp32 units have 1.4e-7. Hence long sums are taken in parts, whose sums are added in
fp32 (long_products.py). An operator of our own stands for all of it; on a CPU, which has no such product, it widens.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import OpOverload, fake_mode_of, known_equal, without_guards
from v41.lowering.long_products import is_long, long_product

aten, prims = torch.ops.aten, torch.ops.prims
PRODUCTS = (aten.mm.default, aten.bmm.default)
HALVES = (torch.bfloat16, torch.float16)
OTHER_VALUES = (aten.view.dtype, aten.view_as_complex.default, aten.view_as_real.default)  # views that read others
# Views that some strides forbid or that mean others by others: a cast packs what it reads with gaps or repeated.
OF_MEMORY = (aten.view.default, aten._unsafe_view.default, aten.as_strided.default)
# Beside views: copies of the same values in another layout.
COPIES = (aten.clone.default, aten._unsafe_view.default, aten.split_with_sizes.default, aten.split.Tensor)


def product_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] or [batch, m, k], b [k, n] or [batch, k, n], of one 16-bit type -> their product, fp32."""
    if a.ndim == 3:  # sums over a batch are short ones: channels, keys
        return torch.bmm(a, b, out_dtype=torch.float32)
    return long_product(a, b) if is_long(a.shape[1]) else torch.mm(a, b, out_dtype=torch.float32)


def product_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.float(), b.float())


def product_of_fakes(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)


torch.library.define("v41::product", "(Tensor a, Tensor b) -> Tensor")
torch.library.impl("v41::product", "CUDA", product_on_gpu)
torch.library.impl("v41::product", "CPU", product_on_cpu)
torch.library.register_fake("v41::product", product_of_fakes)


def narrow_products(gm: GraphModule, devices: Collection[str] = ("cuda",)) -> int:
    """Rewrites the products of `gm`, functional ATen, that run on `devices`, in place. How many there were."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    made: dict[Node, Node] = {}
    found = 0
    for product in order:
        if product.target not in PRODUCTS or product.kwargs or product.meta["val"].device.type not in devices:
            continue
        ways = [way_to_halves(factor) for factor in product.args]
        if None in ways or len({way[-1].args[0].meta["val"].dtype for way in ways}) != 1:  # type: ignore[index, union-attr]
            continue
        with gm.graph.inserting_before(product):
            factors = [_narrowed(gm, way, made) for way in ways if way is not None]
            changed = gm.graph.call_function(torch.ops.v41.product.default, tuple(factors))
        changed.meta = dict(product.meta)
        product.replace_all_uses_with(changed)
        gm.graph.erase_node(product)
        found += 1
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return found


def way_to_halves(factor: Node) -> list[Node] | None:
    """From `factor` back to the cast that widened it from 16 bits, both included; None where something else stands."""
    way = [factor]
    while not _widens(way[-1]):
        node, target = way[-1], way[-1].target
        view = isinstance(target, OpOverload) and target.is_view and target not in OTHER_VALUES
        if not (view or target in COPIES or target is operator.getitem) or not isinstance(node.args[0], Node):
            return None
        way.append(node.args[0])
    wide, half = way[-1].meta["val"], way[-1].args[0].meta["val"]  # type: ignore[union-attr]
    alike = all(map(known_equal, wide.stride(), half.stride()))
    return way if alike or not any(node.target in OF_MEMORY for node in way) else None


def _widens(node: Node) -> bool:
    if node.target is not prims.convert_element_type.default or node.args[1] is not torch.float32:
        return False
    return node.args[0].meta["val"].dtype in HALVES  # type: ignore[union-attr]


def _narrowed(gm: GraphModule, way: list[Node], made: dict[Node, Node]) -> Node:
    """The same way from what was widened: a copy of each node of it."""
    *steps, cast = way
    source: Any = cast.args[0]
    for node in reversed(steps):
        if node not in made:
            made[node] = gm.graph.call_function(node.target, (source, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            made[node].meta = {**node.meta, "val": _value(made[node])}
        source = made[node]
    return source


def _value(node: Node) -> Any:
    """The fake value of a copied node, of the arguments' fake values."""
    values: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    args, kwargs = values
    if node.target is operator.getitem:
        return args[0][args[1]]
    mode = fake_mode_of([args[0]])
    assert isinstance(args[0], Tensor) and mode is not None
    with without_guards(mode), mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
