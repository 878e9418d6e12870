"""gpu: what a kernel may count on where it is launched: the GPU that holds its tensors, or one that need not be here.

    gpu_of(tensor.device)       None off a GPU, where nothing is launched
    with as_on("sm_90"): ...    launches are prepared as for that GPU, wherever tensors are: what reports tell of them
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """shared: bytes of shared memory that one program may take. hip: its capability is none of CUDA's."""

    capability: tuple[int, int]
    shared: int
    hip: bool = False


KNOWN = {  # by what Triton compiles for: A100, H100 and H200, B200; sizes from CUDA's programming guide
    "sm_80": Gpu((8, 0), 163 << 10),
    "sm_90": Gpu((9, 0), 227 << 10),
    "sm_100": Gpu((10, 0), 227 << 10),
}
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
    return Gpu(capability, int(facts.shared_memory_per_block_optin), torch.version.hip is not None)
