"""On a GPU, for every codegen: a step of a small model allocates the same at 1 and 64 fold cache capacity."""

from __future__ import annotations

import pytest
import torch

from v41.tools.bench.capacity import LIMIT, measure, ratios_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("codegen", ["eager", "inductor", "triton"])
def test_cuda_step_allocates_the_same_at_any_capacity(codegen: str) -> None:
    found = measure(codegen)  # which also demands generated kernels of triton alone, and no fallback
    print(codegen, found)
    assert 1 / LIMIT <= ratios_of(found)["bytes"] <= LIMIT
