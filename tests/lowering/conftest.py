"""The interpreter of Triton kernels, one process for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton_interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Repaired: bf16, fp8, dot and NaN behave as on a GPU."""
    process = Interpreter()
    yield process
    process.close()
