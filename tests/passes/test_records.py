"""What records.py says of a format is what the plain model stores, bit for bit, whatever the bytes."""

from __future__ import annotations

import pytest
import torch

from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD, Record
from v41.passes.records import decode, random_records


@pytest.mark.parametrize(
    ("record", "values", "scales"),
    [(FP8_RECORD, "e4m3", "ue8m0"), (FP4_RECORD, "e2m1", "e4m3"), (MXFP4_RECORD, "e2m1", "ue8m0")],
)
def test_a_format_is_that_of_the_plain_model(record: Record, values: str, scales: str) -> None:
    width = 64
    stored = random_records((40, 3, record.size(width)), values, scales, width // record.group)
    found = decode(stored, values, scales, width // record.group)
    assert found.shape == (40, 3, width) and found.isfinite().all()
    assert torch.equal(found.bfloat16(), record.decode(stored))


def test_formats_differ_on_what_is_drawn() -> None:
    """One record read in two ways is no coincidence."""
    stored = random_records((40, 36), "e2m1", "e4m3", 4)
    assert not torch.equal(decode(stored, "e2m1", "e4m3", 4), decode(stored, "e2m1", "ue8m0", 4))
