"""tables: aligned text without lines, the words of a row to the left and its numbers to the right; and lines that fit.

refused  outline_mhc, 1 site: "the carried pre comes from an earlier boundary"; first at view_212, broken
         by one_hot                     what does not fit goes on below, behind the label
"""

from __future__ import annotations

import re
import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100  # columns that everything fits, in a pipe as well
Cell = str | int | float | None


def table(*headers: str, left: int = 1) -> Table:
    """An empty table without lines whose first `left` columns are words and whose others are numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return made


def add(into: Table, *cells: Cell) -> None:
    """One row. None shows as `-`; floats with three digits that matter; nothing is read as markup."""
    texts = ("-" if cell is None else short(cell) if isinstance(cell, float) else str(cell) for cell in cells)
    into.add_row(*map(Text, texts))


def say(console: Console, text: str, style: str = "") -> None:
    """Prints `text`, in as many lines as the width of `console` takes; nothing in it is read as markup."""
    for line in text.split("\n"):
        for part in fitted(line, console.width):
            console.print(Text(part, style), soft_wrap=True)


def fitted(line: str, width: int) -> list[str]:
    """`line` in lines of at most `width`: those that go on stand behind its label, or its indentation."""
    label = re.match(r"\s*(?:\S+(?: \S+)? {2,})?", line)
    hang = label.end() if label is not None and 0 < label.end() <= width // 2 else 2
    return textwrap.wrap(line, width, subsequent_indent=" " * hang, break_on_hyphens=False) or [""]


def counted(count: int, thing: str, width: int = 0) -> str:
    """"1 piece", "3 pieces"; `width`: of the number."""
    return f"{count:{width}} {thing}{'s' * (count != 1)}"


def short(number: float) -> str:
    """Three digits that matter, without a power of ten where there are more in front of the point."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
