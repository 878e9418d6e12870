"""The interpreter of Triton kernels, one process for all tests of this folder; and groups of COUNT ranks, which is a
module's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lowering.ranks import Ranks
from tests.triton_interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Repaired: bf16, fp8, dot and NaN behave as on a GPU."""
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture(scope="module")
def fake_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Traced functions run once, on a group that is this process alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.module.COUNT)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.module.COUNT) as processes:
        yield processes
