"""The trial of sums over ranks: its kernel gives what it expects, and unasked it takes ten thousand calls of each kind.
That hardware is tried before it is trusted, and what is remembered: test_sums.py, test_symmetric.py."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.lowering.ranks import Ranks
from v41.lowering.templates.all_reduce.trial import kernel_of, parts, trial


@pytest.mark.slow
def test_the_kernel_of_the_trial_gives_what_the_trial_expects() -> None:
    kernel = kernel_of(2)
    theirs, residual, expected = parts(2, 5, seed=3)
    with Ranks(2) as ranks:
        for (result,) in ranks.run(kernel, [[part, residual] for part in theirs]):
            assert torch.equal(result[0], expected)


def test_a_trial_takes_ten_thousand_calls() -> None:
    assert inspect.signature(trial).parameters["calls"].default >= 10_000
