"""`v41 bisect COMMAND ...`: the first pass with which a check fails.

    passes on   verdict     s
    12 of 12    fails    41.2
     0 of 12    passes   38.0
     6 of 12    passes   40.3
     ...
    the check fails from outline_mhc on: without it and what follows, it passes

COMMAND is any check that compiles with backend="v41" and exits with 0 where all is well: `python check.py`, `pytest -x
tests/...`. It runs again and again, each time with the first so many passes alone; the others are switched off by
torch's own switch (TORCHINDUCTOR_DISABLED_PASSES), and nothing is taken from a cache. Exit code 0: nothing fails.
"""

from __future__ import annotations

import os
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from v41.errors import CheckNotStarted
from v41.passes.pipeline import PIPELINE
from v41.passes.plan_passes import PLAN_PASSES
from v41.tools.json_output import print_json
from v41.tools.pass_runs import console_of
from v41.tools.progress import Step, progress
from v41.tools.tables import add, say, table

SWITCH = "TORCHINDUCTOR_DISABLED_PASSES"


@dataclass(frozen=True)
class Attempt:
    """A run of the check with the first `on` passes."""

    on: int
    good: bool
    seconds: float


@dataclass
class Bisection:
    """`attempts` in order. `culprit`: the first pass with which the check fails, where there is one."""

    names: tuple[str, ...]
    attempts: list[Attempt] = field(default_factory=list)
    culprit: str | None = None

    @property
    def says(self) -> str:
        if self.culprit is not None:
            return f"the check fails from {self.culprit} on: without it and what follows, it passes"
        if self.attempts[-1].good:
            return "the check passes with all passes: there is nothing to look for"
        return "the check fails without any pass as well: it is not a pass"


def bisect_command(arguments: Namespace) -> int:
    console, names = console_of(arguments), (*(each.name for each in PIPELINE), *PLAN_PASSES)
    check = [word for at, word in enumerate(arguments.check) if (at, word) != (0, "--")]
    if not check:
        raise CheckNotStarted("v41 bisect", problem="there is no command")
    with progress() as bars:
        step = bars.begin("bisect", 2 + len(names).bit_length())
        found = bisect(names, lambda on: told(step, f"{on} of {len(names)} passes on", check, names[on:]))
    if arguments.json:
        print_json("bisect", values(found))
    else:
        show(console, found)
    return int(not all(attempt.good for attempt in found.attempts))


def told(step: Step, text: str, check: Sequence[str], off: Sequence[str]) -> bool:
    step(text)
    return passes_without(check, off)


def passes_without(check: Sequence[str], off: Sequence[str]) -> bool:
    """Whether the command `check` exits with 0 while the passes `off` are switched off. Its output is not shown."""
    others = [name for name in os.environ.get(SWITCH, "").split(",") if name]
    environment = os.environ | {SWITCH: ",".join([*others, *off]), "V41_CACHE_DIR": "off"}
    try:
        return subprocess.run(check, env=environment, capture_output=True).returncode == 0
    except OSError as error:
        raise CheckNotStarted(" ".join(check), problem=str(error)) from error


def bisect(names: Sequence[str], is_good: Callable[[int], bool]) -> Bisection:
    """is_good(on): whether the check passes with the first `on` of the passes `names`."""
    found = Bisection(tuple(names))

    def good(on: int) -> bool:
        start = time.perf_counter()
        verdict = is_good(on)
        found.attempts.append(Attempt(on, verdict, time.perf_counter() - start))
        return verdict

    if good(len(names)) or not good(0):
        return found
    low, high = 0, len(names)  # it passes with `low`, it fails with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    found.culprit = names[high - 1]
    return found


def show(console: Console, found: Bisection) -> None:
    made = table("passes on", "verdict", "s", left=2)
    width = len(str(len(found.names)))
    for attempt in found.attempts:
        on = f"{attempt.on:{width}} of {len(found.names)}"
        add(made, on, "passes" if attempt.good else "fails", f"{attempt.seconds:.1f}")
    console.print(made)
    say(console, found.says)


def values(found: Bisection) -> dict[str, Any]:
    return asdict(found) | {"says": found.says}
