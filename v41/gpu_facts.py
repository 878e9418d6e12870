"""gpu_facts: what is known of GPUs that need not be here. One table: what is launched, predicted and told asks it.

    KNOWN["sm_90"].multiprocessors      132, of an H100 or H200; a key is what Triton compiles for
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """shared: bytes of shared memory that one program may take. hip: its capability is none of CUDA's."""

    capability: tuple[int, int]
    shared: int
    multiprocessors: int
    hip: bool = False


KNOWN = {  # A100, H100 and H200, B200; bytes from the programming guide of CUDA, multiprocessors of cards for servers
    "sm_80": Gpu((8, 0), 163 << 10, 108),
    "sm_90": Gpu((9, 0), 227 << 10, 132),
    "sm_100": Gpu((10, 0), 227 << 10, 148),
}
