"""counted: work told in calls of functions, which a busy machine and the garbage collector leave as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], object], within: str | None = None) -> int:
    """How many functions `work` calls, those of C among them; or those of files below folder `within` alone, where what
    torch remembers from one call to the next would be most of it."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if within is None:
            count += event in ("call", "c_call")
        else:
            count += event == "call" and f"/{within}/" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
