"""What every test gets: one thread, a compiler without memory of other files, and the golden data where it asks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the workers of one run share the cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compile processes beside them
os.environ.setdefault("V41_CACHE_DIR", "off")  # tests compile what they test

import pytest
from hypothesis import HealthCheck, settings

from tests.golden_data import golden as golden

ROOT = Path(__file__).resolve().parent.parent

PATIENT = settings(deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large))
settings.register_profile("default", PATIENT, derandomize=True, max_examples=25)
settings.register_profile("nightly", PATIENT, max_examples=400)
settings.load_profile(os.environ.get("V41_HYPOTHESIS", "default"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Facts that tests recorded with `record_property`, at the end of the output."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{report.nodeid.rsplit('/', 1)[-1]}  {name}: {value}")


@pytest.fixture(scope="module", autouse=True)
def _no_memory_of_other_files() -> Iterator[None]:
    """Compiled code and recompile counts of one test file do not reach the next."""
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
