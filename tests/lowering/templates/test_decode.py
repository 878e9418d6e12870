"""The PTX that decodes two units of a record at once gives what the model decodes, for every code under every scale,
and so does what runs in its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.triton_interpreter import Interpreter
from v41.lowering.templates.decode import BYTES, FOLDED, ORDER, PART, SPREAD, asm, folds, gain_of, keys_text
from v41.lowering.templates.formats import DECODERS, HEAD
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD, Record

RECORDS: dict[str, tuple[Record, str]] = {"e2m1": (MXFP4_RECORD, "ue8m0"), "e4m3": (FP8_RECORD, "ue8m0"),
                                          "e2m1 under e4m3": (FP4_RECORD, "e4m3")}  # fmt: skip
HALVES = 0xFFFF


def as_pairs(bits: Tensor) -> Tensor:
    """[N] registers -> [N, 2] bf16, the low half first."""
    halves = torch.stack((bits & HALVES, bits >> 16 & HALVES), -1)
    return torch.where(halves < 1 << 15, halves, halves - (1 << 16)).to(torch.int16).view(torch.bfloat16)


def as_bits(pairs: Tensor) -> Tensor:
    halves = pairs.view(torch.int16).long() & HALVES
    return halves[..., 0] | halves[..., 1] << 16


def as_fp32(bits: Tensor) -> Tensor:
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def of_fp32(values: Tensor) -> Tensor:
    return values.float().view(torch.int32).long() & 0xFFFFFFFF


def permuted(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    """prmt: of eight bytes the one that each nibble names."""
    both = [pool >> 8 * n & 255 for pool in (low, high) for n in range(4)]
    named = [selector >> 4 * n & 15 for n in range(4)]
    return torch.stack([torch.stack(both).gather(0, name[None])[0] << 8 * n for n, name in enumerate(named)]).sum(0)


def fp8_pairs(codes: Tensor) -> Tensor:
    """Two e4m3 -> two fp16."""
    bytes_ = torch.stack((codes & 255, codes >> 8 & 255), -1).to(torch.uint8)
    halves = bytes_.view(torch.float8_e4m3fn).half().view(torch.int16).long() & HALVES
    return halves[..., 0] | halves[..., 1] << 16


def fp16(half: Tensor) -> Tensor:
    return torch.where(half < 1 << 15, half, half - (1 << 16)).to(torch.int16).view(torch.float16)


OPS: dict[str, Callable[..., Tensor]] = {  # on registers held as int64
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "mul.bf16x2": lambda a, b: as_bits(as_pairs(a) * as_pairs(b)),
    "prmt.b32": permuted,
    "cvt.u16.u32": lambda a: a & HALVES,
    "cvt.rn.f16x2.e4m3x2": fp8_pairs,
    "cvt.f32.f16": lambda half: of_fp32(fp16(half)),
    "cvt.rn.bf16x2.f32": lambda high, low: as_bits(torch.stack((as_fp32(low), as_fp32(high)), -1).bfloat16()),
}


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the instructions of `text` leave in its registers; each element of `inputs` is a thread."""
    values, like = dict(inputs), next(iter(inputs.values()))
    for line in text.splitlines():
        match = re.fullmatch(r"([\w.]+) (.*);", line)
        if match is None or match[1] not in OPS:
            assert line.startswith(("{ .reg", ".reg")) or line in "{}", line
        elif match[2].startswith("{low, high}"):
            both = values[match[2].split(", ")[-1]]
            values["low"], values["high"] = both & HALVES, both >> 16 & HALVES
        else:
            out, *names = match[2].split(", ")
            read = [values[name] if name in values else torch.full_like(like, int(name, 0)) for name in names]
            values[out] = OPS[match[1]](*read)
    return values


def cases(values: str) -> tuple[Tensor, Tensor]:
    """Units of every code, and of any, each under every scale byte."""
    draw = torch.Generator().manual_seed(0)
    if values == "e2m1":
        units = torch.cat((torch.arange(16) * 0x1111, torch.randint(0, 1 << 16, (240,), generator=draw)))
    else:
        units = torch.cat((torch.arange(256) * 0x1010101, torch.randint(0, 1 << 32, (64,), generator=draw)))
    first, scale = (each.flatten() for each in torch.meshgrid(units, torch.arange(256), indexing="ij"))
    return first, scale


def scales_of(scale: Tensor, kind: str) -> Tensor:
    """Scale bytes as bf16."""
    if kind == "ue8m0":
        return (scale << 7).clamp(min=64).to(torch.int16).view(torch.bfloat16)
    return scale.to(torch.uint8).view(torch.float8_e4m3fn).bfloat16()


def wanted_of(record: Record, unit: Tensor, scale: Tensor) -> Tensor:
    """[N, 4]: the first channels of a record of such units, as the model decodes it."""
    size = BYTES["e2m1" if record is not FP8_RECORD else "e4m3"]
    packed = torch.zeros(len(unit), record.size(record.group), dtype=torch.uint8)
    for n in range(size):
        packed[:, n] = (unit >> 8 * n & 255).to(torch.uint8)
    packed[:, -1] = scale.to(torch.uint8)
    return record.decode(packed)[:, :4]


def check_same(ours: Tensor, wanted: Tensor) -> None:
    assert torch.equal(ours.isnan(), wanted.isnan())
    assert ((ours == wanted) | ours.isnan()).all()


@pytest.mark.parametrize("form", RECORDS)
def test_every_pair_of_units_is_under_every_scale_as_the_model_has_it(form: str) -> None:
    record, kind = RECORDS[form]
    values = form.split()[0]
    first, scale = cases(values)
    second, gain = first.flip(0), gain_of(values, kind)
    marks = (scales_of(scale, kind).float() * (2.0 ** (126 - FOLDED) if folds(values, kind) else 1)).bfloat16()
    both = as_bits(torch.stack((marks, marks), -1))
    units = {"$4": first | second << 16, "$5": both} if values == "e2m1" else {"$4": first, "$5": second, "$6": both}
    found = run(asm(values, folds(values, kind)), units)
    for half, unit in enumerate((first, second)):
        wanted = wanted_of(record, unit, scale)
        for n in range(4):
            ours = as_pairs(found[f"${n}"])[:, half].float() * gain
            check_same(ours, wanted[:, n])
            assert ours.isfinite().any()


KERNEL = """@triton.jit
def decode(units, scales, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    by = {name}_scale(byte_of(scales + at[:, None], False))
    bytes = tl.load(units + at[:, None, None] * {size} + tl.arange(0, {size})[None, None, :])
    k = {name}_keys(units_of(bytes, N, 1, {size}), spread(by, N, 1, 1), N, 1, False)
    tl.store(out + at[:, None] * 4 + tl.arange(0, 4)[None, :], k)
"""


@pytest.mark.parametrize("form", RECORDS)
def test_what_runs_without_ptx_is_too(interpreter: Interpreter, tmp_path: Path, form: str) -> None:
    record, kind = RECORDS[form]
    values = form.split()[0]
    size = BYTES[values]
    kernel = KERNEL.format(size=size, name=f"{values}_{kind}")
    file = tmp_path / "decode.py"
    file.write_text("\n\n".join([HEAD, ORDER, SPREAD, DECODERS[values], keys_text(values, kind), kernel]))
    first, scale = cases(values)
    bytes_ = torch.stack([first >> 8 * n & 255 for n in range(size)], -1).to(torch.uint8)
    out = torch.empty(len(first), 4, dtype=torch.bfloat16)
    count = 4096
    sent = bytes_, scale.to(torch.uint8), out
    *_, out = interpreter.launch(file, "decode", (len(first) // count,), *sent, N=count)
    check_same(out.float() * gain_of(values, kind), wanted_of(record, first, scale))
    assert out.isfinite().any()


CHANNELS = """@triton.jit
def order(x, out, UNITS: tl.constexpr):
    row, at = tl.arange(0, 2)[:, None], tl.arange(0, 4 * UNITS)[None, :]
    tl.store(out + row * 4 * UNITS + at, ordered(tl.load(x + row * 4 * UNITS + at), 2, UNITS))


@triton.jit
def join(a, b, c, d, out, UNITS: tl.constexpr):
    row, unit = tl.arange(0, 2)[:, None], row_units(UNITS)
    k = joined(tl.load(a + row * UNITS + unit), tl.load(b + row * UNITS + unit), tl.load(c + row * UNITS + unit),
               tl.load(d + row * UNITS + unit), 2, UNITS)
    tl.store(out + row * 4 * UNITS + tl.arange(0, 4 * UNITS)[None, :], k)


@triton.jit
def row_units(UNITS: tl.constexpr):
    return tl.arange(0, UNITS)[None, :]
"""


@pytest.mark.parametrize("units", (8, 32, 128))
def test_queries_and_keys_have_one_order_of_channels(interpreter: Interpreter, tmp_path: Path, units: int) -> None:
    file = tmp_path / "order.py"
    file.write_text("\n\n".join([HEAD, ORDER, CHANNELS]))
    x = torch.arange(2 * 4 * units).reshape(2, 4 * units).float()
    out = torch.empty_like(x)
    ours = interpreter.launch(file, "order", (1,), x, out, UNITS=units)[-1]
    parts = [each.contiguous() for each in x.unflatten(1, (units, 4)).unbind(2)]
    keys = interpreter.launch(file, "join", (1,), *parts, out, UNITS=units)[-1]
    assert torch.equal(ours, keys) and torch.equal(ours.sort(1).values, x)
    assert ours[0, : min(units, PART)].tolist() == [4.0 * j for j in range(min(units, PART))]
