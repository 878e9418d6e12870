"""sizes_at_most: what a compiler may take for granted of unbacked sizes while it compiles one piece of code.

Of an unbacked size torch knows a range, 0 to infinity, and guesses 8192 where it must choose. So Inductor indexes with
64 bits and picks schedules for 8192 rows. Narrower ranges are no guards: whoever calls the code checks them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import SymInt
from torch.utils._sympy.value_ranges import ValueRanges

from v41._compat import fake_mode_of


@contextlib.contextmanager
def sizes_at_most(values: Sequence[object], limits: Mapping[str, int]) -> Iterator[None]:
    """Under it, each symbol named in `limits` is known to be at most that, and supposed to be a sixteenth of it.

    values: fake tensors and SymInts whose ShapeEnv has the symbols. No guard or assertion is added.
    """
    env = _shape_env(values)
    if env is None or not limits:
        yield
        return
    ranges, hints = env.var_to_range, env.var_to_hint_override
    before = {symbol: ranges[symbol] for symbol in ranges if str(symbol) in limits and env.is_unbacked_symint(symbol)}
    hinted = {symbol: hints[symbol] for symbol in before if symbol in hints}
    for symbol, known in before.items():
        most = min(known.upper, limits[str(symbol)])
        ranges[symbol] = ValueRanges(known.lower, most)
        hints[symbol] = max(1, int(most) // 16)  # where torch must choose
    env._version_counter += 1  # what torch remembers of sizes hangs on this number
    try:
        yield
    finally:
        ranges.update(before)
        for symbol in before:
            hints.pop(symbol, None)
        hints.update(hinted)
        env._version_counter += 1


def _shape_env(values: Sequence[object]) -> Any:
    mode = fake_mode_of(values)
    if mode is not None:
        return mode.shape_env
    return next((value.node.shape_env for value in values if isinstance(value, SymInt)), None)
