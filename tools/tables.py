"""tables: aligned text without lines, the words of a row to the left and its numbers to the right."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

Cell = str | int | float | None


def table(*headers: str, left: int = 1) -> Table:
    """An empty table without lines whose first `left` columns are words and whose others are numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return made


def add(into: Table, *cells: Cell) -> None:
    """One row. None shows as `-`; floats with three digits that matter; nothing is read as markup."""
    texts = ("-" if cell is None else _short(cell) if isinstance(cell, float) else str(cell) for cell in cells)
    into.add_row(*map(Text, texts))


def _short(number: float) -> str:
    """Three digits that matter, without a power of ten where there are more in front of the point."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
