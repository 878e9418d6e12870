"""stored_weights: in which format the weight of a product is stored, known by what its decoding makes of drawn bytes.

    before the product   bytes, scale bytes -> unpack, look up, multiply, cast -> W [..., out, in]
    "mxfp4/32"           pairs of e2m1 codes, the low nibble first, and a power of two for each 32 inputs
    "fp8/32x32"          e4m3 and a power of two for each block of 32 outputs and 32 inputs
    "bfloat16"           as it is; also where the decoding is unknown: then its result counts as stored

Scales are the bytes of e8m0. To decode all weights of a release would take minutes and gigabytes, and a decoding treats
all experts and outputs alike. So it runs on a part that is whole: of what the sizes in front of the inputs have in
common in all stored tensors, a few are left, so that one that turns or adds up experts is told from one that does not.
What does not work on such a part is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import VIEWS_OF_ALL
from v41.passes.matching import RESHAPES, aten, cone, fake, shape

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES = (torch.uint8, torch.int8)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
FEW = 3  # of a size that are drawn, or a few more
APART = 97  # bytes that are drawn: a prime, so all come


@dataclass(frozen=True)
class Weight:
    """values and scales: what is stored, scales None without any."""

    format: str
    values: Node
    scales: Node | None = None

    @property
    def stored(self) -> list[Node]:
        return [self.values] if self.scales is None else [self.values, self.scales]


def read_weight(order: Mapping[Node, int], weight: Node) -> Weight:
    """How `weight`, an operand of a product, is stored; `order` numbers the nodes of the graph."""
    root = weight
    while root.target in RESHAPES:
        root = root.args[0]  # type: ignore[assignment]
    plain = Weight(str(fake(root).dtype).removeprefix("torch."), root)  # type: ignore[union-attr]
    nodes, leaves = cone(order, root, (), lambda node: _is_fixed(node) and not node.is_impure())
    if len(leaves) != 2 or not all(map(_is_fixed, (root, *leaves))):
        return plain
    values, scales = sorted(leaves, key=lambda leaf: -fake(leaf).numel())  # type: ignore
    sizes = shape(root)
    told = _format(sizes, fake(values), fake(scales))  # type: ignore[arg-type]
    if told is None:
        return plain
    name, expected = told
    common = [_spared(gcd(size, shape(values)[i], shape(scales)[i]) or 1) for i, size in enumerate(sizes[:-1])]
    with outside_fake_mode(), torch.no_grad():
        drawn = _draw(values, common, 0), _draw(scales, common, 1)
        found = _run_part(nodes, {values: drawn[0], scales: drawn[1]}, common)
        wanted = expected(*drawn)
        same = found is not None and found.shape == wanted.shape and torch.equal(found.double(), wanted)
    return Weight(name, values, scales) if same else plain


def _is_fixed(node: Node) -> bool:
    """Whether its sizes are numbers, as those of weights are."""
    return all(isinstance(size, int) for size in shape(node))


# ---- what the formats are


def _format(sizes: Sequence[Any], values: Tensor, scales: Tensor) -> Any:
    """Name and meaning of the format that types and sizes allow; None for any other."""
    if values.ndim != len(sizes) or scales.ndim != len(sizes) or scales.dtype not in E8M0:
        return None
    *_, inputs = sizes
    if values.dtype in BYTES and values.shape[-1] * 2 == inputs and inputs % scales.shape[-1] == 0:
        return f"mxfp4/{inputs // scales.shape[-1]}", _mxfp4
    if values.dtype is torch.float8_e4m3fn and values.ndim == 2 and tuple(values.shape) == tuple(sizes):
        blocks = [-(-size // count) for size, count in zip(sizes, scales.shape, strict=True)]
        return "fp8/{}x{}".format(*blocks), _fp8
    return None


def _mxfp4(pairs: Tensor, scales: Tensor) -> Tensor:
    grid = torch.tensor((*E2M1, *(-size for size in E2M1)), dtype=torch.float64)
    byte = pairs.view(torch.uint8).long()
    values = grid[torch.stack((byte & 15, byte >> 4), -1).flatten(-2)]
    return values * _powers(scales).repeat_interleave(values.shape[-1] // scales.shape[-1], -1)


def _fp8(values: Tensor, scales: Tensor) -> Tensor:
    powers = _powers(scales)
    for axis, size in enumerate(values.shape):
        powers = powers.repeat_interleave(-(-size // scales.shape[axis]), axis).narrow(axis, 0, size)
    return values.double() * powers


def _powers(scales: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.view(torch.uint8).long() - 127)


# ---- running a part


def _spared(common: int) -> int:
    """By which a size is divided so that FEW or more of what is in common are left."""
    return common // next(left for left in range(min(FEW, common), common + 1) if common % left == 0)


def _part(sizes: Sequence[Any], common: Sequence[int]) -> list[int] | None:
    """`sizes` with those in front divided by `common`; None where that leaves no whole part."""
    front = sizes[: len(common)]
    if len(front) < len(common) or any(size % each for size, each in zip(front, common, strict=True)):
        return None
    return [*(size // each for size, each in zip(front, common, strict=True)), *sizes[len(common) :]]


def _draw(node: Node, common: Sequence[int], seed: int) -> Tensor:
    """Bytes in the type of a stored tensor, as many as a part has, in a random order, each as often as others and few
    of them far apart: no NaN, and no product beyond a bf16."""
    value, generator = fake(node), torch.Generator().manual_seed(seed)
    assert value is not None
    sizes = _part(value.shape, common)
    assert sizes is not None
    drawn = torch.randperm(prod(sizes), generator=generator).reshape(sizes) * APART
    if seed == 1:
        return (drawn % 224 + 16).to(torch.uint8).view(value.dtype)
    drawn = (drawn % 256).to(torch.uint8)
    if value.dtype is torch.float8_e4m3fn:
        drawn = drawn.where(drawn & 0x7F != 0x7F, 0)
    return drawn.view(value.dtype)


def _run_part(nodes: Sequence[Node], given: Mapping[Node, Tensor], common: Sequence[int]) -> Tensor | None:
    """The value of the last node, each made for a part; None where one does not work on a part."""
    values: dict[Node, Any] = dict(given)
    for node in nodes:
        sizes = _part(shape(node), common)
        if sizes is None:
            return None
        args: Any = map_aggregate(node.args, lambda arg: values[arg] if isinstance(arg, Node) else arg)
        if node.target in VIEWS_OF_ALL:
            values[node] = args[0].reshape(sizes)
        elif node.target is aten.expand.default:
            values[node] = args[0].expand(sizes)
        else:
            values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
        if list(values[node].shape) != sizes:
            return None
    return values[nodes[-1]]
