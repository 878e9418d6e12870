"""number_formats: how a row is quantised in groups, known by what is done to numbers, not by how that is written.

    row [D] -> groups -> scale of each from its largest -> values / scale, rounded
        "fp8"   e4m3, ue8m0      the least power of two that keeps a group within 448
        "fp4"   e2m1, e4m3       largest / 6, rounded
        "mxfp4" e2m1, ue8m0
        "fp8_fp32"  e4m3, fp32   largest / 448; only apart
    then     back in the type of the row ("fp8"), or as a record of the data bytes of all groups and a scale byte for
             each ("fp8_record"), or values and scales apart ("fp8_apart"), of which a group may be the whole row;
             pairs of e2m1 codes share a byte, the even channel low

`read_format` runs nodes on drawn rows and asks which format gives their very bits; decoding is in records.py. How a
quotient by an fp32 scale is rounded hangs on its spelling: there a number may lean to either side. Rows of small
numbers are not drawn: what a format does to groups of zeros (a floor under the scale) is the body's affair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers, spelling
from v41.passes.matching import fake, same_sizes, shape
from v41.passes.records import E2M1, decode

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
KINDS = {
    "fp8": ("e4m3", "ue8m0"),
    "fp4": ("e2m1", "e4m3"),
    "mxfp4": ("e2m1", "ue8m0"),
    "fp8_fp32": ("e4m3", "fp32"),
}
WHOLE = ("rounded", "record")  # forms of all that a row becomes; "values" and "scales" are two results of one format
GROUPS = (16, 32, 64, 128)
DRAWS = 3
LEAN = 2.0**-20  # what several roundings in fp32 are worth


@dataclass(frozen=True)
class Format:
    kind: str  # of KINDS
    group: int  # channels under one scale
    form: str  # of WHOLE, or a part of what is apart

    @property
    def name(self) -> str:
        return self.kind + {"rounded": "", "record": "_record"}.get(self.form, "_apart")

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
        size = self.bytes(width) if self.form == "record" else None
        return {"values": self.value, "scale": self.scale, "group": self.group, "bytes": size}

    def fits(self, width: int, row: torch.dtype, held: int, made: torch.dtype) -> bool:
        """Whether a row of `width` channels in the type `row` could come out as `held` numbers in the type `made`."""
        if self.form in WHOLE:
            known = self.scale != "fp32" and self.group in GROUPS
            size, types = (width, (row,)) if self.form == "rounded" else (self.bytes(width), (torch.uint8,))
            return known and held == size and made in types
        if self.form == "values":
            pairs = self.value == "e2m1"
            return held == width // (2 if pairs else 1) and made is (torch.uint8 if pairs else torch.float8_e4m3fn)
        byte = {"ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}.get(self.scale)
        return held == width // self.group and made in (torch.float32, byte)

    def gives(self, x: Tensor, found: Tensor) -> bool:
        """Whether `found`, shaped in any way, is what becomes of the rows x [..., D]."""
        if self.form == "scales" and found.dtype is torch.float32:
            wanted = self._parts(x, 1)[1]
            return torch.allclose(found.reshape(wanted.shape), wanted, LEAN, 0)
        leans = (1 - LEAN, 1 + LEAN) if self.scale == "fp32" else (1,)
        low, high = self.apply(x, leans[0]), self.apply(x, leans[-1])
        found = (found.view(low.dtype) if found.dtype.itemsize == low.dtype.itemsize else found).reshape(low.shape)
        return bool(((found == low) | (found == high)).all())

    def apply(self, x: Tensor, lean: float = 1) -> Tensor:
        """The rows x [..., D] rounded, or their records, or the bytes of their values or scales. Quotients are
        multiplied by `lean`."""
        data, _, byte = self._parts(x, lean)
        if self.form in ("values", "scales"):
            return data if self.form == "values" else byte
        record = torch.cat((data, byte), -1)
        if self.form == "record":
            return record
        return decode(record, self.value, self.scale, byte.shape[-1]).to(x.dtype)

    def _parts(self, x: Tensor, lean: float) -> tuple[Tensor, Tensor, Tensor]:
        """Data bytes, scales in fp32, scale bytes."""
        groups = x.float().unflatten(-1, (-1, self.group))
        scale, byte = _scales(groups.abs().amax(-1) * (1 / LARGEST[self.value]), self.scale)
        data = _codes(groups.double() * lean / scale.unsqueeze(-1), self.value).flatten(-2)
        if self.value == "e2m1":
            data = data[..., ::2] | data[..., 1::2] << 4
        return data, scale, byte


def _scales(wanted: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The scales as fp32 and as bytes, which fp32 has none of."""
    if kind == "fp32":
        return wanted, wanted.new_empty(0)
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


def formats_of(source: Node, result: Node, forms: Collection[str] = WHOLE) -> list[Format]:
    """Those, of such `forms`, by which the shape and the type of `result` could come from rows `source`.

    Values and scales may lie in groups, [..., D / group, group] and [..., D / group, 1].
    """
    row, made = fake(source), fake(result)
    if row is None or made is None or not row.is_floating_point() or not row.ndim or not isinstance(row.shape[-1], int):
        return []
    width, held = row.shape[-1], made.shape[row.ndim - 1 :]
    if not same_sizes(shape(source)[:-1], shape(result)[: row.ndim - 1]) or any(not isinstance(n, int) for n in held):
        return []
    groups = [group for group in dict.fromkeys((*GROUPS, width)) if width % group == 0]
    known = (Format(kind, group, form) for form in forms for kind in KINDS for group in groups)
    return [each for each in known if (each.form not in WHOLE or len(held) == 1)
            and each.fits(width, row.dtype, prod(held), made.dtype)]  # fmt: skip


def read_format(
    nodes: Iterable[Node], source: Node, result: Node, forms: Collection[str] = WHOLE
) -> Format | None:
    """The format, and the form of such `forms`, in which `nodes` leave the rows `source`; None where it is another."""
    known, nodes = formats_of(source, result, forms), list(nodes)
    if not known:
        return None
    key = spelling(nodes, [source], result), tuple(forms)
    if key not in _READ:
        _READ[key] = _read_format(known, nodes, source, result)
    return _READ[key]


# By spelling: layers, and both halves of a trimmed program, are alike.
_READ: dict[tuple[str, tuple[str, ...]], Format | None] = {}


def _read_format(known: list[Format], nodes: list[Node], source: Node, result: Node) -> Format | None:
    for seed in range(DRAWS):
        with outside_fake_mode():
            x = _rows(source, seed)
            try:
                found = evaluate(nodes, {source: x}, result, keep_types=True)
            except (RuntimeError, AssertionError, TypeError):  # these nodes need what is not given
                return None
            known = [each for each in known if each.gives(x, found)]
    return known[0] if len(known) == 1 else None


def _rows(source: Node, seed: int) -> Tensor:
    """Random rows in the type of `source`, each 16 channels of another size.

    Of draw 0 so far apart that under one scale e4m3 has fewer bits of the smaller; of the others less than fp4 has.
    Two times 64 channels differ in their largest size, and so do two times 128.
    """
    x, row = numbers(source, seed), fake(source)
    assert row is not None
    at = torch.arange(x.shape[-1], device=x.device) // GROUPS[0]
    sizes = torch.where(at // 8 % 2 == 0, at % 5, at % 4)
    return (x * 2.0 ** (sizes * (1 if seed else 18))).to(row.dtype)
