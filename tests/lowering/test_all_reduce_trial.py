"""The trial of sums over ranks: its kernel gives what it expects; a trial that fails or was passed is remembered so."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.ranks import Ranks
from v41.lowering.templates.all_reduce.trial import kernel_of, parts


@pytest.mark.slow
def test_the_kernel_of_the_trial_gives_what_the_trial_expects() -> None:
    kernel = kernel_of(2)
    theirs, residual, expected = parts(2, 5, seed=3)
    with Ranks(2) as ranks:
        for (result,) in ranks.run(kernel, [[part, residual] for part in theirs]):
            assert torch.equal(result[0], expected)
