"""Tiers: ranges of a piece's sizes that have code of their own. A call takes the first that holds its sizes.

    rows <= 256, longest <= 1   32-bit indices, schedules for few rows
    rows <= 65536               32-bit indices wherever rows alone decide
    beyond                      what takes any size

A limit holds for a symbol that some input of the piece has alone as a size: the others cannot be read off a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from v41.lowering.piece_inputs import bindings
from v41.text_code import define

Limits = Mapping[str, int]  # symbol -> its largest value; a tier without limits takes every call


def distinct(tiers: Sequence[Limits], metas: Sequence[object]) -> list[dict[str, int]]:
    """What of `tiers`, narrowest first, a piece with inputs `metas` can tell apart, up to the first without limits."""
    readable = bindings(metas)
    found: list[dict[str, int]] = []
    for limits in tiers:
        told = {symbol: most for symbol, most in limits.items() if symbol in readable}
        if told not in found:
            found.append(told)
        if not told:
            break
    return found


def chooser(tiers: Sequence[Limits], metas: Sequence[object]) -> Callable[[Sequence[object]], int]:
    """A function over the piece's inputs: the place in `tiers` of the first that holds them, len(tiers) beyond all."""
    readable = bindings(metas)
    lines = ["def choose(args):"]
    for symbol in dict.fromkeys(symbol for limits in tiers for symbol in limits):
        index, how = readable[symbol]
        lines.append(f"    {symbol} = args[{index}]{how}")
    for place, limits in enumerate(tiers):
        test = " and ".join(f"{symbol} <= {most}" for symbol, most in limits.items())
        lines.append(f"    if {test or True}: return {place}")
    return define("\n".join([*lines, f"    return {len(tiers)}"]), "choose", {}, "<tiers of a piece>")
