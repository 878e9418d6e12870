"""A format does to rows what the plain model's functions do, and knows them by that alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41.model_def.quantization import (
    FP4_RECORD,
    FP8_RECORD,
    MXFP4_RECORD,
    fake_quant_fp4,
    fake_quant_fp8,
    fake_quant_mxfp4,
)
from v41.passes.number_formats import Format

MODEL = {
    "fp8": (fake_quant_fp8, FP8_RECORD),
    "fp4": (fake_quant_fp4, FP4_RECORD),
    "mxfp4": (fake_quant_mxfp4, MXFP4_RECORD),
}


@pytest.mark.parametrize("kind", MODEL)
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 72))
def test_it_gives_the_bits_of_the_model(kind: str, seed: int, spread: int) -> None:
    rounded, record = MODEL[kind]
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-spread, spread + 1, (7, 128), generator=generator)
    x = (torch.randn(7, 128, generator=generator) * sizes).bfloat16()
    x[0, 1::2] = x[0, 0] = 6.0  # ties and ends of the grid
    floor = 1e-3  # what is done to groups of zeros is the body's affair
    x = torch.where(x.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(7, 8, 16).flatten(1) < floor, 1.0, x)
    assert torch.equal(Format(kind, record.group, "rounded").apply(x), rounded(x))
    assert torch.equal(Format(kind, record.group, "record").apply(x), record.encode(x))
    assert Format(kind, record.group, "record").bytes(128) == record.size(128)
    for form, part in zip(("values", "scales"), record.quantize(x), strict=True):
        assert Format(kind, record.group, form).gives(x, part)


@given(seed=st.integers(0, 2**32), group=st.sampled_from([32, 128]))
def test_quotients_by_fp32_scales_are_known_in_any_spelling(seed: int, group: int) -> None:
    g = torch.randn(7, 128 // group, group, generator=torch.Generator().manual_seed(seed))
    largest, x = g.abs().amax(-1, keepdim=True), g.flatten(1)
    values, scales = (Format("fp8_fp32", group, form) for form in ("values", "scales"))
    for scale, quotient in ((largest / 448, g / (largest / 448)), (largest * (1 / 448), g * (448 / largest))):
        found = quotient.clamp(-448, 448).to(torch.float8_e4m3fn)
        assert scales.gives(x, scale) and values.gives(x, found) and values.gives(x, found.view(torch.uint8))
    assert not scales.gives(x, largest / 448 * 1.0001) and not scales.gives(x, (largest / 448).log2().ceil().exp2())
    assert not values.gives(x, (g / largest * 440).to(torch.float8_e4m3fn))
