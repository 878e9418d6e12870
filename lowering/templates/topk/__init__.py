"""topk: the k best of each row, exactly: ties go to the lower column, picks ascend, -1 behind them.

    kernel = TopK.of(512)
    (picks,) = kernel.launch(scores)        [rows, columns] fp32 -> int64 [rows, 512]

A score of -inf or NaN is never picked. text.py has the kernels, launch.py through how many levels they go.
"""

from __future__ import annotations

from v41.lowering.templates.topk.launch import MOST, Levels, TopK, levels_of
from v41.lowering.templates.topk.text import TEXT

__all__ = ["MOST", "TEXT", "Levels", "TopK", "levels_of"]
