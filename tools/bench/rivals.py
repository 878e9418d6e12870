"""rivals: torch.compile as the benches of kernels ask for it, results compared, and records of what may fail.

Inductor gets static shapes and reorder_for_locality off, which else may copy a cache; each case is compiled afresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

INDUCTOR: dict[str, dict[str, Any]] = {
    "compile": {},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}
Call = Callable[..., Any]


def compiled(fn: Call, settings: dict[str, Any]) -> Call:
    """`fn` through Inductor."""
    torch.compiler.reset()
    return torch.compile(fn, options={"reorder_for_locality": False, **settings}, dynamic=False)


def attempted(record: dict[str, Any], deadline: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`record` with what `measure` found, or why it found nothing: a contender that fails is a result, too."""
    started = time.perf_counter()
    try:
        if started > deadline:
            raise TimeoutError("left out: no time")
        record |= measure()
    except Exception as failure:
        record["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def alike(part: Sequence[Tensor], whole: Sequence[Tensor], rows: int) -> bool:
    """Whether `part` has the bits of the first rows of `whole`."""
    return all(torch.equal(a.view(torch.uint8), b[:rows].view(torch.uint8)) for a, b in zip(part, whole, strict=True))


def error(found: Tensor, truth: Tensor) -> float:
    """RMS of the difference over the RMS."""
    return ((found.double() - truth).square().mean() / truth.double().square().mean()).sqrt().item()
