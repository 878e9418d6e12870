"""explain: what v41 makes of a call, as a value, without running it.

    told = v41.explain(model, x)
    print(told)                       the tables of `v41 inspect`
    print(told.node("div_7"))         a node's way from its line to what runs it
    told.save("run/")                 for all commands; told.html("report.html") is one page of it
    told.run.plan, told.run.report    the facts

Dynamo, AOTAutograd, passes and partition run as in torch.compile; nothing is compiled for a device.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from v41.report import collect
from v41.tools.explain_command import explain as stories
from v41.tools.explain_command import lines
from v41.tools.files import write_whole
from v41.tools.html_page import page
from v41.tools.inspect import capture_call
from v41.tools.inspect_command import show_inspection
from v41.tools.run import Run, run_of
from v41.tools.run_folder import save
from v41.tools.tables import WIDTH


@dataclass(frozen=True)
class Explanation:
    """A call that was captured."""

    run: Run

    def __str__(self) -> str:
        console = Console(width=WIDTH, file=io.StringIO(), highlight=False)
        show_inspection(console, self.run)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def node(self, name: str) -> str:
        """What `v41 explain` says of a node, a region, a piece, an input or a line. UnknownNode where there is none."""
        return "\n".join(lines(stories(self.run, name)))

    def save(self, folder: str | Path) -> None:
        """Keeps it for the commands, as `v41 capture` does. RunNotWritten where that cannot be."""
        save(self.run, Path(folder))

    def html(self, path: str | Path) -> None:
        """Writes the page of `v41 inspect --html`. FileNotWritten where that cannot be."""
        write_whole(Path(path), page(self.run))


def explain(model: nn.Module, *inputs: Any, codegen: str = "triton") -> Explanation:
    """What v41 makes of model(*inputs). Sizes that are to change are marked as for torch.compile.

    codegen: how pieces would run: "triton" as on a GPU, which need not be here, "inductor", or "eager" as on a CPU.

    GraphNotWhole where Dynamo would cut the graph, ModelFails where the model raises.
    """
    with collect(programs=True):
        inspection = capture_call(lambda: (model, inputs), codegen=codegen)
    return Explanation(run_of(inspection, type(model).__name__))
