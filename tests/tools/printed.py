"""What a table looks like in a pipe of 100 columns."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def printed(*things: Any, width: int = 100) -> list[str]:
    """Its lines, without spaces at their ends."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    for each in things:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]
