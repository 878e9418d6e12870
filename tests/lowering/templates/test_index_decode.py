"""The PTX that decodes two units of a record at once gives what the model decodes, for every code under every scale."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from v41.lowering.templates.index_scores.decode import asm
from v41.model_def.quantization import MXFP4_RECORD

HALVES = 0xFFFF


def as_pairs(bits: Tensor) -> Tensor:
    """[N] registers -> [N, 2] bf16, the low half first."""
    halves = torch.stack((bits & HALVES, bits >> 16 & HALVES), -1)
    return torch.where(halves < 1 << 15, halves, halves - (1 << 16)).to(torch.int16).view(torch.bfloat16)


def as_bits(pairs: Tensor) -> Tensor:
    halves = pairs.view(torch.int16).long() & HALVES
    return halves[..., 0] | halves[..., 1] << 16


OPS: dict[str, Callable[..., Tensor]] = {  # on registers held as int64
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, by: a << by & 0xFFFFFFFF,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: a & b | c if (table == 0xEA).all() else NotImplemented,
    "mul.bf16x2": lambda a, b: as_bits(as_pairs(a) * as_pairs(b)),
}


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the instructions of `text` leave in its registers; each element of `inputs` is a thread."""
    values, like = dict(inputs), next(iter(inputs.values()))
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+\.\w+) (.*);", line)
        if match is not None:
            out, *names = match[2].split(", ")
            read = [values[name] if name in values else torch.full_like(like, int(name, 0)) for name in names]
            values[out] = OPS[match[1]](*read)
    return values


def test_every_pair_of_units_under_every_scale_is_exact() -> None:
    draw = torch.Generator().manual_seed(0)
    units = torch.cat((torch.arange(16) * 0x1111, torch.randint(0, 1 << 16, (240,), generator=draw)))
    scales = torch.arange(256)
    first, scale = (each.flatten() for each in torch.meshgrid(units, scales, indexing="ij"))
    second, other = first.flip(0), scale.flip(0)
    marks = (scale << 7).clamp(min=64) | (other << 7).clamp(min=64) << 16
    found = run(asm(), {"$4": first | second << 16, "$5": marks})
    for half, (unit, by) in enumerate(((first, scale), (second, other))):
        record = torch.zeros(len(unit), 17, dtype=torch.uint8)
        record[:, 0], record[:, 1], record[:, 16] = unit & 255, unit >> 8, by
        wanted = MXFP4_RECORD.decode(record)[:, :4]
        for n in range(4):
            ours = as_pairs(found[f"${n}"])[:, half]
            assert torch.equal(ours.isnan(), wanted[:, n].isnan())
            same = (ours == wanted[:, n]) | ours.isnan()
            assert same.all()
