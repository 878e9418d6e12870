"""dots: weights times rows on tensor cores, as text, exact but for the order of sums.

bf16 rows against fp32 weights: the weight in three bf16 parts, which lose nothing. fp32 rows: fp32 units.
"""

from __future__ import annotations

import torch


def dot_lines(
    into: str, weights: str, weights_dtype: torch.dtype, rows: str, rows_dtype: torch.dtype
) -> list[str]:
    """Lines that add `weights` [n, k] times `rows` [rows, k] to `into` [n, rows]. `weights` is a name."""
    if rows_dtype == weights_dtype != torch.float32:
        return [f"{into} = tl.dot({weights}, {rows}.trans(), {into})"]
    if rows_dtype == torch.bfloat16:
        parts = [f"{weights}_hi = {weights}.to(tl.bfloat16)",
                 f"{weights}_rest = {weights} - {weights}_hi.to(tl.float32)",
                 f"{weights}_mid = {weights}_rest.to(tl.bfloat16)",
                 f"{weights}_lo = ({weights}_rest - {weights}_mid.to(tl.float32)).to(tl.bfloat16)"]  # fmt: skip
        return parts + [f"{into} = tl.dot({weights}_{part}, {rows}.trans(), {into})" for part in ("hi", "mid", "lo")]
    wide = f"{weights}.to(tl.float32), {rows}.to(tl.float32).trans()"
    return [f'{into} = tl.dot({wide}, {into}, input_precision="ieee")']
