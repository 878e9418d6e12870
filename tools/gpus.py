"""gpus: what GPUs can do at most, by name, with where each figure is from. All that is reckoned with them is a floor.

    gpu         memory    bf16, dense    holds      source
    H200        4.8 TB/s    989 TFLOP/s  141 GB     NVIDIA's data sheet, SXM
    H200 copy   4.2 TB/s    793 TFLOP/s  141 GB     measured: a large copy, a large bf16 product

A region takes at least the longer of two times: its bytes at the rate of the memory, its operations at that of the bf16
tensor cores. fp32 products, sorts and small launches take longer; none takes less.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41.errors import UnknownGPU
from v41.tools.nearest import choices


@dataclass(frozen=True)
class GPU:
    name: str
    bytes_per_s: float
    flops_per_s: float  # bf16 with fp32 sums, dense
    memory: float  # bytes
    arch: str  # what kernels are compiled for
    source: str

    def seconds(self, moved: float, flops: float) -> float:
        """The least time of a kernel."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)

    def bound(self, moved: float, flops: float) -> str:
        """Which of the two takes that long."""
        return "bytes" if moved / self.bytes_per_s >= flops / self.flops_per_s else "flops"


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", 4.8e12, 989e12, 141e9, "sm_90", "NVIDIA H200 data sheet, SXM, dense"),
        GPU("H200-copy", 4.2e12, 793e12, 141e9, "sm_90", "measured on an H200: a large copy, a large bf16 product"),
        GPU("H100", 3.35e12, 989e12, 80e9, "sm_90", "NVIDIA H100 data sheet, SXM5, dense"),
        GPU("B200", 8.0e12, 2250e12, 180e9, "sm_100", "NVIDIA HGX B200 data sheet, one of eight, dense"),
    )
}


def gpu_named(name: str) -> GPU:
    """The GPU of that name. UnknownGPU where there is none."""
    if name not in GPUS:
        raise UnknownGPU("--gpu", name=name, known=choices(name, GPUS))
    return GPUS[name]
