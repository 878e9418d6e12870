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
    assert torch.equal(Format(kind, record.group, False).apply(x), rounded(x))
    assert torch.equal(Format(kind, record.group, True).apply(x), record.encode(x))
    assert Format(kind, record.group, True).bytes(128) == record.size(128)
