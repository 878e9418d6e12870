"""progress: how far long work is, on stderr, and only where that is a terminal: nothing of it is in a file or a pipe.

with progress() as bar:
    step = bar.begin("verify", 20)
    step("fold_sinkhorn")               verify: fold_sinkhorn  ------------  3/20  0:01:12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[..., None]


class Bars:
    """The bars of one command."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown

    def begin(self, what: str, total: int | None = None) -> Step:
        """A bar of `total` steps. To call what is returned says that one is done, and, with a text, which begins."""
        task, begun = self.shown.add_task(what, total=total), [False]

        def step(name: str | None = None) -> None:
            if name is None or begun[0]:
                self.shown.advance(task)
            begun[0] = True
            if name is not None:
                self.shown.update(task, description=f"{what}: {name}")

        return step

    def amount(self, what: str) -> Callable[[int, int], None]:
        """A bar that shows itself once it is told how much of how much is done."""
        task = self.shown.add_task(what, visible=False)
        return lambda done, whole: self.shown.update(task, completed=done, total=whole, visible=True)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Bars]:
    """Bars that go when the block is left, also by an error or Ctrl-C."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as shown:
        yield Bars(shown)
