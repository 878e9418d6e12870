"""gpu: what a kernel may count on where it is launched: the GPU that holds its tensors, or one that need not be here.

    gpu_of(tensor.device)       None off a GPU, where nothing is launched
    with as_on("sm_90"): ...    launches are prepared as for that GPU, wherever tensors are: what reports tell of them
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from v41.gpu_facts import KNOWN, Gpu

_AS_ON: ContextVar[Gpu | None] = ContextVar("as_on", default=None)


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU for which launches are prepared, with tensors on `device`."""
    return _AS_ON.get() or _own(device)


@contextmanager
def as_on(arch: str) -> Iterator[None]:
    """Launches are prepared as on a GPU of `arch`, a key of KNOWN."""
    token = _AS_ON.set(KNOWN[arch])
    try:
        yield
    finally:
        _AS_ON.reset(token)


@cache
def _own(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)  # its stub lacks the name
    capability = torch.cuda.get_device_capability(device)
    shared, processors = int(facts.shared_memory_per_block_optin), int(facts.multi_processor_count)
    return Gpu(capability, shared, processors, torch.version.hip is not None)
