"""Tiers: ranges of a piece's sizes that have code of their own. A call takes the first that holds its sizes.

    rows <= 256, longest <= 1   32-bit indices, schedules for few rows
    rows <= 65536               32-bit indices, schedules for many rows
    the same, large             where a call has more elements than 32 bits count: 64-bit indices for those
    beyond, or no rows at all   what takes any size

A tier holds a call when all its sizes are within the limits and what compiling took for granted of them is so. That
must be readable: each symbol of the piece is some input's size, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import SymInt, Tensor

from v41._compat import symbols_of
from v41.lowering.piece_inputs import bindings
from v41.text_code import define

Limits = Mapping[str, int]  # symbol -> its largest value


@dataclass(frozen=True)
class Tier:
    """conditions: Python over symbols, beside the limits. Without either it takes every call."""

    limits: Limits = field(default_factory=dict)
    conditions: tuple[str, ...] = ()


def distinct(tiers: Sequence[Limits], metas: Sequence[object]) -> list[dict[str, int]]:
    """What of `tiers`, narrowest first, a piece with inputs `metas` can tell apart, up to the first without limits.

    None of a piece without symbols, or with one that no input has alone.
    """
    readable = bindings(metas)
    symbols = {symbol for meta in metas for size in sizes_of(meta) for symbol in symbols_of(size)}
    if not symbols or not symbols <= readable.keys():
        return []
    found: list[dict[str, int]] = []
    for limits in tiers:
        told = {symbol: most for symbol, most in limits.items() if symbol in readable}
        if told not in found:
            found.append(told)
        if not told:
            break
    return found


def sizes_of(meta: object) -> tuple[int | SymInt, ...]:
    """Shape and strides of a tensor; a SymInt itself."""
    if isinstance(meta, Tensor):
        return (*meta.shape, *meta.stride())
    return (meta,) if isinstance(meta, SymInt) else ()


def chooser(tiers: Sequence[Tier], metas: Sequence[object]) -> Callable[[Sequence[object]], int]:
    """A function over the piece's inputs: the place in `tiers` of the first that holds them, len(tiers) beyond all."""
    if all(tier == Tier() for tier in tiers):
        return define("def choose(args):\n    return 0", "choose", {}, "<tiers of a piece>")
    readable = bindings(metas)
    lines = ["def choose(args):", *(f"    {symbol} = args[{index}]{how}" for symbol, (index, how) in readable.items())]
    if readable:
        lines.append(f"    if min({', '.join([*readable, '1'])}) < 1: return {len(tiers)}")
    for place, tier in enumerate(tiers):
        tests = [f"{symbol} <= {most}" for symbol, most in tier.limits.items()]
        tests += [f"({condition})" for condition in tier.conditions]  # one may be an `or`
        lines.append(f"    if {' and '.join(tests) or True}: return {place}")
    scope = {"math": math, "torch": torch}  # of which torch's printer takes functions
    return define("\n".join([*lines, f"    return {len(tiers)}"]), "choose", scope, "<tiers of a piece>")
