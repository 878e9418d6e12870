"""The model's boundary from its parts, with another norm, iteration count or output, and inputs to trace them with."""

from __future__ import annotations

import torch
from torch import Tensor

from v41.tools.bench.rowwise_cases import layer_norm as layer_norm
from v41.tools.bench.rowwise_cases import root_mean_square as rms_norm
from v41.tools.bench.rowwise_cases import seam_inputs as drawn
from v41.tools.bench.rowwise_cases import seam_of as seam

__all__ = ["layer_norm", "rms_norm", "seam", "seam_inputs"]


def seam_inputs(streams: int, width: int, rows: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors with rows, and weights."""
    found = drawn(lambda *shape: torch.randn(shape), rows, streams, width)
    return list(found[:5]), list(found[5:])
