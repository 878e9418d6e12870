"""number_formats: how a row is quantised in groups, known by what is done to numbers, not by how that is written.

    row [D] -> groups -> scale of each from its largest -> values / scale, rounded
        "fp8"   e4m3, ue8m0      the least power of two that keeps a group within 448
        "fp4"   e2m1, e4m3       largest / 6, rounded
        "mxfp4" e2m1, ue8m0
    then     back in the type of the row ("fp8"), or as a record of the data bytes of all groups and a scale byte for
             each ("fp8_record"); pairs of e2m1 codes share a byte, the even channel low

`read_format` runs nodes on drawn rows and asks which format gives their very bits; decoding is in records.py. Rows of
small numbers are not drawn: what a format does to groups of zeros (a floor under the scale) is the body's affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers, spelling
from v41.passes.matching import fake, same_sizes, shape
from v41.passes.records import E2M1, decode

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
KINDS = {"fp8": ("e4m3", "ue8m0"), "fp4": ("e2m1", "e4m3"), "mxfp4": ("e2m1", "ue8m0")}
GROUPS = (16, 32, 64, 128)
DRAWS = 3


@dataclass(frozen=True)
class Format:
    kind: str  # of KINDS
    group: int  # channels under one scale
    record: bool  # bytes, or back in the type of the row

    @property
    def name(self) -> str:
        return self.kind + "_record" * self.record

    @property
    def value(self) -> str:
        return KINDS[self.kind][0]

    @property
    def scale(self) -> str:
        return KINDS[self.kind][1]

    def bytes(self, width: int) -> int:
        """Of a record of `width` channels."""
        return width // self.group * (self.group // (2 if self.value == "e2m1" else 1) + 1)

    def facts(self, width: int) -> dict[str, object]:
        """What a region says of a row of `width` channels that leaves it so; bytes: None unless it is a record."""
        size = self.bytes(width) if self.record else None
        return {"values": self.value, "scale": self.scale, "group": self.group, "bytes": size}

    def apply(self, x: Tensor) -> Tensor:
        """The rows x [..., D] rounded, or their records."""
        groups = x.float().unflatten(-1, (-1, self.group))
        scale, byte = _scales(groups.abs().amax(-1) * (1 / LARGEST[self.value]), self.scale)
        data = _codes(groups.double() / scale.unsqueeze(-1), self.value).flatten(-2)
        if self.value == "e2m1":
            data = data[..., ::2] | data[..., 1::2] << 4
        record = torch.cat((data, byte), -1)
        return record if self.record else decode(record, self.value, self.scale, byte.shape[-1]).to(x.dtype)


def _scales(wanted: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The scales as fp32 and as bytes."""
    if kind == "e4m3":
        rounded = wanted.clamp(max=LARGEST["e4m3"]).to(torch.float8_e4m3fn)
        return rounded.float(), rounded.view(torch.uint8)
    mantissa, exponent = torch.frexp(wanted)  # in [0.5, 1)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    return torch.ldexp(torch.ones_like(wanted), exponent), (exponent + 127).to(torch.uint8)


def _codes(x: Tensor, kind: str) -> Tensor:
    """Bytes of e4m3 or codes of e2m1: nearest, ties to even, saturating."""
    if kind == "e4m3":
        return x.clamp(-LARGEST[kind], LARGEST[kind]).float().to(torch.float8_e4m3fn).view(torch.uint8)
    size = x.abs().clamp(max=LARGEST[kind])  # of numbers beyond it, none is nearer than another
    away = (size.unsqueeze(-1) - torch.tensor(E2M1, dtype=x.dtype, device=x.device)).abs()
    away[..., 1::2] += 1e-12  # of two that are equally near, the even one
    return (away.argmin(-1) + (x < 0) * 8).to(torch.uint8)


def formats_of(source: Node, result: Node) -> list[Format]:
    """Those by which the shape and the type of `result` could come from rows `source`."""
    row, made = fake(source), fake(result)
    if row is None or made is None or not row.is_floating_point() or not row.ndim or not isinstance(row.shape[-1], int):
        return []
    width, whole = row.shape[-1], same_sizes(shape(source), shape(result)) and made.dtype is row.dtype
    known = [Format(kind, group, not whole) for kind in KINDS for group in GROUPS if width % group == 0]
    if whole:
        return known
    rows = same_sizes(shape(source)[:-1], shape(result)[:-1]) and made.dtype is torch.uint8
    return [each for each in known if rows and made.shape[-1] == each.bytes(width)]


def read_format(nodes: Iterable[Node], source: Node, result: Node) -> Format | None:
    """The format in which `nodes` leave the rows `source`; None where it is another."""
    known, nodes = formats_of(source, result), list(nodes)
    if not known:
        return None
    key = spelling(nodes, [source], result)
    if key not in _READ:
        _READ[key] = _read_format(known, nodes, source, result)
    return _READ[key]


_READ: dict[str, Format | None] = {}  # by spelling: layers, and both halves of a trimmed program, are alike


def _read_format(known: list[Format], nodes: list[Node], source: Node, result: Node) -> Format | None:
    for seed in range(DRAWS):
        with outside_fake_mode():
            x = _rows(source, seed)
            try:
                found = evaluate(nodes, {source: x}, result, keep_types=True)
            except (RuntimeError, AssertionError, TypeError):  # these nodes need what is not given
                return None
            known = [each for each in known if torch.equal(each.apply(x), found)]
    return known[0] if len(known) == 1 else None


def _rows(source: Node, seed: int) -> Tensor:
    """Random rows in the type of `source`, each 16 channels of another size.

    Of draw 0 so far apart that under one scale e4m3 has fewer bits of the smaller; of the others less than fp4 has.
    """
    x, row = numbers(source, seed), fake(source)
    assert row is not None
    spread = 2.0 ** (torch.arange(x.shape[-1], device=x.device) // GROUPS[0] % 5 * (1 if seed else 18))
    return (x * spread).to(row.dtype)
