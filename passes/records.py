"""records: packed groups of small floats, found by what their decoding computes.

    record [..., D values | D / group scales], bytes  ->  split, reinterpret, scale  ->  [..., D]

A run of nodes from bytes to numbers decodes a format if it gives, bit for bit, what that format says, on random bytes:
whether codes are looked up by arithmetic or by bits, and how a power of two is made, does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import outside_fake_mode, size_with
from v41.passes.analysis.probe import ROWS, evaluate
from v41.passes.matching import VIEWS, aten, cone, fake, is_part, is_pointwise, shape

VALUES = {"e4m3": 2, "e2m1": 1}  # half bytes of a value
SCALES = ("ue8m0", "e4m3")  # a byte each; ue8m0 is 2^(byte - 127)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ON_BYTES = (aten.bitwise_and.Scalar, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
MOVES = (aten.cat.default, aten.view.dtype)


@dataclass(frozen=True)
class Record:
    """`decoded` is made of `packed` alone, by `nodes`."""

    packed: Node  # uint8 [..., bytes]
    decoded: Node  # [..., D]
    nodes: tuple[Node, ...]  # in graph order
    values: str
    scales: str
    group: int  # values under one scale
    bytes: int  # of one record

    @property
    def format(self) -> tuple[str, str, int, int]:
        return self.values, self.scales, self.group, self.bytes


def record_of(order: Mapping[Node, int], decoded: Node) -> Record | None:
    """The record that `decoded` is read from; None if it is none of a known format."""
    nodes, leaves = cone(order, decoded, (), _may_decode)
    if len(leaves) != 1 or fake(leaves[0]).dtype is not torch.uint8:  # type: ignore[union-attr]
        return None
    packed, width = leaves[0], shape(decoded)[-1]
    size = shape(packed)[-1]
    if not isinstance(width, int) or not isinstance(size, int):
        return None
    for values, scales in product(VALUES, SCALES):
        held = size - width * VALUES[values] // 2  # scales
        if held > 0 and width % held == 0 and _decodes(nodes, packed, decoded, values, scales, held):
            return Record(packed, decoded, tuple(nodes), values, scales, width // held, size)
    return None


def _may_decode(node: Node) -> bool:
    value = fake(node)
    if value is not None and value.dtype is torch.uint8:  # bytes may be cut; where they come from is another's business
        return node.target in VIEWS or node.target in ON_BYTES or is_part(node)
    return node.target in VIEWS or node.target in MOVES or is_part(node) or is_pointwise(node)


def _decodes(nodes: list[Node], packed: Node, decoded: Node, values: str, scales: str, held: int) -> bool:
    given = random_records(shape(packed), values, scales, held)
    try:
        found = evaluate(nodes, {packed: given}, decoded, keep_types=True)
    except (RuntimeError, AssertionError):  # it cuts the record elsewhere
        return False
    with outside_fake_mode():
        wanted = decode(given, values, scales, held).to(found.dtype)
        return found.numel() == wanted.numel() and torch.equal(found.reshape(wanted.shape), wanted)


def random_records(sizes: tuple[object, ...], values: str, scales: str, held: int) -> Tensor:
    """Bytes of finite values under finite scales."""
    with outside_fake_mode():
        generator = torch.Generator().manual_seed(0)
        record = torch.randint(0, 256, [size_with(size, ROWS) for size in sizes], generator=generator)  # type: ignore[arg-type]
        data, scale = record[..., :-held], record[..., -held:]
        data = torch.where(data % 128 == 127, 0, data) if values == "e4m3" else data  # 127 and 255 are NaN
        scale = scale % (255 if scales == "ue8m0" else 127)
        return torch.cat((data, scale), -1).to(torch.uint8)


def decode(record: Tensor, values: str, scales: str, held: int) -> Tensor:
    """The fp64 numbers of records with `held` scales."""
    data, scale = record[..., :-held], record[..., -held:]
    if values == "e4m3":
        x = data.contiguous().view(torch.float8_e4m3fn).double()
    else:
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
        x = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float64)[codes]
    s = scale.contiguous().view(torch.float8_e4m3fn).double() if scales == "e4m3" else 2.0 ** (scale.double() - 127)
    return (x.unflatten(-1, (held, -1)) * s[..., None]).flatten(-2)
