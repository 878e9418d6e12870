"""What records.py says of a format is what the plain model stores, bit for bit, whatever the bytes."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.tracing import trace
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD, Record
from v41.passes.records import decode, random_records, record_of


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


def test_a_record_has_a_width_that_is_a_number() -> None:
    """Bytes that are turned on their side are as wide as there are rows."""
    gm = trace(lambda packed: packed.float().t() + 1, torch.zeros(40, 36, dtype=torch.uint8))
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    (decoded,) = next(node for node in order if node.op == "output").args[0]
    assert record_of(order, decoded) is None
