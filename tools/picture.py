"""picture: a report as an SVG that needs no network, for a page in which text would be cut.

    python -m v41.tools.picture RUN FILE          what `v41 inspect RUN` prints, its first LINES lines

Letters are those of whoever looks at it: of the fonts that rich names in its pictures none is fetched.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from v41.tools.files import write_whole
from v41.tools.inspect_command import show_inspection
from v41.tools.run import Run
from v41.tools.run_folder import load
from v41.tools.tables import WIDTH

LINES = 64


def picture(run: Run, title: str, lines: int = LINES) -> str:
    """The SVG of the first `lines` of a report, and that more follow."""
    told = Console(width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True, color_system="standard")
    show_inspection(told, run)
    assert isinstance(told.file, io.StringIO)
    every = told.file.getvalue().splitlines()
    shown = Console(width=WIDTH, file=io.StringIO(), record=True, highlight=False)
    for line in every[:lines]:
        shown.print(Text.from_ansi(line), soft_wrap=True)
    if len(every) > lines:
        shown.print(Text(f"... and {len(every) - lines} lines more"))
    drawn = shown.export_svg(title=title, unique_id="v41")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    folder, file = sys.argv[1:]
    write_whole(Path(file), picture(load(Path(folder)), "v41 inspect run/"))
