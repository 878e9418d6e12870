"""What the benches of kernels share: records of what fails, results compared, pieces that are one region."""

from __future__ import annotations

import time

import pytest
import torch

from v41.tools.bench import attention_cases, index_cases
from v41.tools.bench.rivals import alike, attempted, error


def test_what_fails_or_comes_too_late_is_a_record() -> None:
    later = time.perf_counter() + 60
    assert attempted({"rows": 1}, later, lambda: {"us": 2.0}) == {"rows": 1, "us": 2.0, "seconds": 0.0}
    assert attempted({}, later, lambda: {"us": 1 / 0})["failed"] == "ZeroDivisionError: division by zero"
    asked: list[int] = []
    late = attempted({}, 0.0, lambda: {"asked": asked.append(1)})
    assert late["failed"] == "TimeoutError: left out: no time" and not asked


def test_bits_and_errors() -> None:
    whole = torch.tensor([[1.0], [-0.0], [3.0]])
    assert alike([whole[:2]], [whole], 2) and not alike([torch.tensor([[1.0], [0.0]])], [whole], 2)
    assert error(whole + 1, whole.double()) == (3 / 10) ** 0.5


@pytest.mark.slow
def test_each_bench_measures_the_kernel_of_the_model_s_own_functions() -> None:
    """The region alone is a piece, in every role, and the template takes it."""
    for case in (attention_cases.HANDED, attention_cases.IN_PLACE):
        kernel = attention_cases.kernel_of(case)
        assert kernel.heads == attention_cases.CONFIG.num_attention_heads
        assert {what.name for what in kernel.inputs if what is not None} == set(case.roles)
        assert bool(kernel.counted) == (case is attention_cases.IN_PLACE)
    outputs = {role: index_cases.kernel(role, 4096).form.outputs for role in index_cases.ROLES}
    assert outputs == {"source": ("picks",), "candidate_source": ("picks", "kept_blocks"), "re_indexer": ("picks",)}
