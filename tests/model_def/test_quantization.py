"""Number formats against a slow exact reference (fractions, search on the grid), at their ties, floors and limits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from v41.model_def import quantization as q

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # by code
E4M3 = [
    Fraction(m, 512) if e == 0 else Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(16) for m in range(8)
][:-1]  # by byte, without the NaN


def nearest(x: Fraction, grid: list[Fraction]) -> Fraction:
    """The value of `grid` next to x >= 0; of two as near, the one of even code."""
    above = min(bisect_left(grid, x), len(grid) - 1)
    return grid[min((max(above - 1, 0), above), key=lambda code: (abs(grid[code] - x), code % 2))]


def power_above(x: Fraction) -> Fraction:
    """The least power of two that is at least x."""
    power = Fraction(2) ** (x.numerator.bit_length() - x.denominator.bit_length() - 1)
    while power < x:
        power *= 2
    return power


@dataclass(frozen=True)
class Format:
    """One format: the code, and its reference in exact numbers."""

    record: q.Record
    fake_quant: Callable[[Tensor], Tensor]
    grid: list[Fraction]
    scale: Callable[[Fraction], Fraction]  # of a group's amax


FORMATS = {
    "fp8": Format(q.FP8_RECORD, q.fake_quant_fp8, E4M3, lambda amax: power_above(max(amax, Fraction(1, 10000)) / 448)),
    "fp4": Format(
        q.FP4_RECORD, q.fake_quant_fp4, E2M1, lambda amax: nearest(max(amax, 6 * Fraction(2) ** -9) / 6, E4M3)
    ),
    "mxfp4": Format(
        q.MXFP4_RECORD, q.fake_quant_mxfp4, E2M1, lambda amax: power_above(max(amax, 6 * Fraction(2) ** -126) / 6)
    ),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def slow_fake_quant(format: Format, group: list[float]) -> list[float]:
    exact = [Fraction(v) for v in group]
    scale = format.scale(max(abs(v) for v in exact))
    sizes = [nearest(min(abs(v) / scale, format.grid[-1]), format.grid) * scale for v in exact]
    return [in_bf16(size if v >= 0 else -size) for v, size in zip(exact, sizes, strict=True)]


def in_bf16(x: Fraction) -> float:
    """A value of the formats has few bits, so it is one of bf16; of 2^128, the next beyond the largest, it has inf."""
    return math.copysign(math.inf, x) if abs(x) >= Fraction(2) ** 128 else float(x)


def agrees(format: Format, x: Tensor) -> bool:
    """Whether the code returns the reference's values on bf16 rows [n, group]."""
    return format.fake_quant(x).tolist() == [slow_fake_quant(format, row) for row in x.tolist()]


def from_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


finite = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)
# numbers of one size, and of any size at all
near_one = st.builds(
    lambda sign, exponent, mantissa: sign << 15 | exponent << 7 | mantissa,
    st.integers(0, 1),
    st.integers(118, 132),
    st.integers(0, 127),
)


def groups(width: int) -> st.SearchStrategy[list[int]]:
    return st.one_of(st.lists(kind, min_size=width, max_size=width) for kind in (near_one, finite))


@every_format
@given(data=st.data())
@settings(max_examples=60)
def test_matches_the_reference_on_any_bf16(name: str, data: st.DataObject) -> None:
    format = FORMATS[name]
    assert agrees(format, from_bits(data.draw(groups(format.record.group))).unsqueeze(0))


@every_format
def test_scales_of_every_amax(name: str) -> None:
    """Each finite bf16 as the largest of its group."""
    format = FORMATS[name]
    amax = from_bits(list(range(0x7F80)))
    x = torch.zeros(len(amax), format.record.group, dtype=torch.bfloat16)
    x[:, 3] = -amax
    scale = format.record.encode(x)[:, -1]
    value = scale.view(torch.float8_e4m3fn).double() if name == "fp4" else torch.exp2(scale.double() - 127)
    expected = [float(format.scale(Fraction(a))) for a in amax.tolist()]
    assert value.tolist() == expected


LARGEST = [255 * 2.0**120, 245 * 2.0**120, 200 * 2.0**120]  # the first is the largest of bf16


@pytest.mark.parametrize(("name", "expected"), [
    ("fp8", [math.inf, 240 * 2.0**120, 192 * 2.0**120]), ("fp4", [2688.0] * 3),
    ("mxfp4", [math.inf, math.inf, 192 * 2.0**120])])  # fmt: skip
def test_what_rounds_up_to_2_to_the_128_is_infinite(name: str, expected: list[float]) -> None:
    """As in the reference, which multiplies value and scale in fp32. An E4M3 scale cuts off at 2688 long before."""
    format = FORMATS[name]
    x = torch.zeros(3, format.record.group, dtype=torch.bfloat16)
    x[:, 1], x[:, 2] = -torch.tensor(LARGEST).bfloat16(), 1.5
    assert agrees(format, x)
    assert (-format.fake_quant(x)[:, 1]).tolist() == expected


# channels that decode to NaN of a group with NaN in channel 5; of what does not, little more than 0 is left
NAN_REACHES = {"fp8": [5], "fp4": [*range(16)], "mxfp4": []}


@pytest.mark.parametrize("name", NAN_REACHES)
def test_what_a_nan_does_to_its_group(name: str) -> None:
    """Equal to the reference's, up to the sign of its zeros. Nothing of it reaches another group."""
    format = FORMATS[name]
    group = format.record.group
    x = torch.full((2, 3 * group), 1.5, dtype=torch.bfloat16)
    x[0, group + 5] = torch.nan
    fake = format.record.decode(format.record.encode(x))
    own = fake[0, group : 2 * group].clone()
    fake[0, group : 2 * group] = 1.5
    assert torch.equal(fake, torch.full_like(x, 1.5))
    assert own.isnan().nonzero().flatten().tolist() == NAN_REACHES[name]
    assert own.nan_to_num(0.0).abs().max() < 2.0**-120


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 2)
    for sign in (1, -1):
        assert torch.equal(q.fake_quant_fp4(sign * ties), (sign * expected).bfloat16())
        wide = torch.cat((ties, ties))
        assert torch.equal(q.fake_quant_mxfp4(sign * wide), (sign * torch.cat((expected, expected))).bfloat16())


def test_a_sign_is_that_of_what_is_below_zero() -> None:
    """Both zeros are code 0; what is too small for the grid keeps its sign."""
    assert q.encode_e2m1(torch.tensor([0.0, -0.0, 0.1, -0.1, -6.0]), torch.ones(())).tolist() == [0, 0, 0, 8, 15]


def test_the_grids_are_torchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == [float(v) for v in E4M3]
    assert q.decode_e2m1(torch.arange(16, dtype=torch.int32)).tolist() == [float(v) for v in E2M1] + [
        -float(v) for v in E2M1
    ]


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("fp8", [448.0, -450.0, 1e-30, 2.0**-9], [448.0, -448.0, 0.0, 0.0]),  # over 448: the scale is 2
        ("fp8", [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        (
            "fp8",
            [2.0**-20, 2.0**-31, 2.0**-32, 1.5 * 2.0**-31],
            [2.0**-20, 2.0**-31, 0.0, 2.0**-30],
        ),  # floor, denormals
        ("fp4", [1e30, -2e4, 300.0, 0.0], [2688.0, -2688.0, 224.0, 0.0]),  # the scale stops at 448
        ("fp4", [2.0**-9, 2.0**-10, 2.0**-11, -(2.0**-11)], [2.0**-9, 2.0**-10, 0.0, 0.0]),  # the scale stops at 2^-9
        ("mxfp4", [6.0, 6.03125, 3.0, 0.5], [6.0, 6.0, 3.0, 0.0]),  # just over 6: the scale is 2
    ],
)
def test_limits(name: str, inputs: list[float], expected: list[float]) -> None:
    format = FORMATS[name]
    x = torch.tensor(inputs).repeat(format.record.group // 4).bfloat16()
    assert format.fake_quant(x)[:4].tolist() == expected


@every_format
@given(data=st.data())
@settings(max_examples=30)
def test_records_round_trip(name: str, data: st.DataObject) -> None:
    format, rows = FORMATS[name], data.draw(st.integers(0, 3))
    width = format.record.group * data.draw(st.integers(1, 3)) * 2
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    sizes = torch.randint(-130, 120, (rows, width // 4)).repeat_interleave(4, 1)
    x = (torch.randn(rows, width) * torch.exp2(sizes)).bfloat16()
    record, fake = format.record.encode(x), format.fake_quant(x)
    assert record.dtype == torch.uint8 and record.shape == (rows, format.record.size(width))
    assert torch.equal(format.record.decode(record), fake)
    if name != "fp4":  # its scale may round down and the next one lower still
        assert torch.equal(format.fake_quant(fake), fake)


def test_record_sizes_are_the_released_ones() -> None:
    assert (q.FP8_RECORD.size(512), q.FP4_RECORD.size(512), q.MXFP4_RECORD.size(128)) == (528, 288, 68)


def test_pairs_hold_the_even_channel_low() -> None:
    codes = torch.tensor([[1, 15, 7, 8]], dtype=torch.int32)
    packed = q.pack_pairs(codes)
    assert packed.tolist() == [[0xF1, 0x87]]
    assert torch.equal(q.unpack_pairs(packed), codes) and torch.equal(q.unpack_pairs(packed.view(torch.int8)), codes)


@every_format
def test_a_row_of_anything_reaches_no_other(name: str) -> None:
    format = FORMATS[name]
    x = torch.randn(5, 64).bfloat16()
    spoiled = x.clone()
    spoiled[1], spoiled[3] = torch.nan, torch.inf
    keep = [0, 2, 4]
    assert torch.equal(format.record.encode(spoiled)[keep], format.record.encode(x)[keep])


@pytest.mark.parametrize("rows", [1, 32, 70])
def test_fp8_weights_have_one_scale_a_block(rows: int) -> None:
    weight = torch.randn(rows, 96) * torch.logspace(-3, 3, 96)
    values, scale = q.quantize_fp8_weight(weight)
    assert values.shape == weight.shape and scale.shape == (-(-rows // 32), 3)
    restored = q.dequantize_fp8_weight(values, scale)
    for i, j in [(0, 0), (rows - 1, 95), (rows // 2, 40)]:
        exact = float(values[i, j].double()) * 2.0 ** (int(scale[i // 32, j // 32]) - 127)
        assert float(restored[i, j]) == exact
    block = weight[:32, 32:64].abs().amax()
    assert 224 < float(block) / 2.0 ** (int(scale[0, 1]) - 127) <= 448


@every_format
def test_traces_with_unbacked_rows_and_does_not_recompile(name: str) -> None:
    format = FORMATS[name]
    compiled = torch.compile(
        lambda x: (format.record.encode(x), format.record.decode(format.record.encode(x))),
        backend="aot_eager",
        fullgraph=True,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 0, 1, 2, 33):
            x = torch.randn(rows, 64).bfloat16()
            mark_unbacked(x, 0)
            record, fake = compiled(x)
            assert torch.equal(record, format.record.encode(x)) and torch.equal(fake, format.fake_quant(x))
    torch._dynamo.reset()


def test_golden_caches_are_values_of_the_formats(golden: Golden) -> None:  # noqa: F811
    kinds = {".ring": q.fake_quant_fp8, ".compress_kv": q.fake_quant_fp4, ".index_k": q.fake_quant_mxfp4}
    checked = {kind: 0 for kind in kinds}
    for name in golden.reference:
        for kind, fake_quant in kinds.items():
            if name.endswith(kind):
                stored = golden(name)
                assert torch.equal(fake_quant(stored), stored), name
                checked[kind] += stored.numel()
    assert min(checked.values()) > 1000


def ties_up(x: Tensor, scale: Tensor) -> Tensor:
    midpoints = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    return sum((x.abs() >= m * scale).int() for m in midpoints) + ((x < 0).int() << 3)


MUTANTS = [  # format, what to replace in the module, by what, and an input that tells
    ("fp8", "AMAX_FLOOR", 1e-6, [1e-5, 2.0**-32]),
    ("fp8", "E4M3_MAX", 447.0, [448.0, 2.0**-9]),
    ("fp8", "exponent_byte", lambda x: x.view(torch.int32) >> 23, [500.0]),  # rounds the scale down
    ("fp4", "E2M1_MIN_E4M3_SCALE", 2.0**-8, [2.0**-10]),
    ("mxfp4", "exponent_byte", lambda x: (x.view(torch.int32) >> 23) + 1, [6.0, 0.5]),  # one more for a power of two
    ("mxfp4", "encode_e2m1", ties_up, [6.0, 0.25]),
]


@pytest.mark.parametrize(("name", "what", "instead", "values"), MUTANTS)
def test_the_reference_sees(
    name: str, what: str, instead: object, values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that cannot tell these mutants would prove nothing."""
    format = FORMATS[name]
    x = torch.zeros(1, format.record.group, dtype=torch.bfloat16)
    x[0, : len(values)] = torch.tensor(values)
    assert agrees(format, x)
    monkeypatch.setattr(q, what, instead)
    assert not agrees(format, x)
