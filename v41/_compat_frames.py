"""Which functions Dynamo gave up or cut: it keeps a record of every attempt to compile one, and no backend is told."""

from __future__ import annotations

import re
from typing import Any


class GivenUp:
    """A call returns what Dynamo gave up since the call before, or since this was made; a line, and a line of code.

    "Attempted to wrap RNN, GRU, or LSTM: LSTM(4, 4)\n  at   encoder.py:12  forward"

    torch keeps the last 64 attempts, so of more than these between two calls the first are not seen.
    """

    def __init__(self) -> None:
        self._seen = attempts()

    def __call__(self) -> list[str]:
        seen, self._seen = {id(each) for each in self._seen}, attempts()  # kept, so an id stays its own
        return [line_of(each) for each in self._seen if id(each) not in seen and runs_as_python(each)]


def is_cut(gm: Any) -> bool:
    """Whether a Dynamo graph is a part of its function: the one before a graph break, or one behind it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    resumed = [frame.name.startswith("torch_dynamo_resume_in") for frame in getattr(reason, "user_stack", None) or ()]
    return bool(getattr(reason, "graph_break", False)) or any(resumed)


def attempts() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def runs_as_python(attempt: Any) -> bool:
    """Whether it ended in an error after which Dynamo lets Python run the function; others are raised."""
    from torch._dynamo import exc

    kind = getattr(exc, str(attempt.fail_type), None)
    return isinstance(kind, type) and issubclass(kind, exc.Unsupported)


def line_of(attempt: Any) -> str:
    """Why, and where. Past its limit of recompiles Dynamo no longer says which function it was."""
    reason = str(attempt.fail_reason).strip()
    context = re.search(r"Developer debug context: *(.+)", reason)
    why = reason.splitlines()[0] + (f": {context[1].strip()}" if context else "")
    path = attempt.fail_user_frame_filename or attempt.co_filename
    if path is None:
        return f"{why}\n  at   unknown"
    line = attempt.fail_user_frame_lineno or attempt.co_firstlineno
    return f"{why}\n  at   {'/'.join(path.split('/')[-2:])}:{line}  {attempt.co_name}"
