"""The order of the passes, as data; nothing else decides it. `run_pipeline` times, verifies and reports around each.

A pass edits the graph in place and returns its decisions. One that raises, or leaves a program that breaks an
invariant, is undone and named in the report; the program compiles without it and without those that need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from v41._compat import observed
from v41.report import Decision, PassRun

PassFunction = Callable[..., list[Decision]]


@dataclass(frozen=True)
class Pass:
    """`needs`: passes that must have run. `expects`: what every V4.1 graph has, so that no site is worth a warning."""

    run: PassFunction
    needs: tuple[PassFunction, ...] = ()
    expects: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run.__name__


PIPELINE: tuple[Pass, ...] = ()
CUT_AT: tuple[str, ...] = ()  # region kinds that become pieces of their own


def run_pipeline(gm: GraphModule, passes: Sequence[Pass] = PIPELINE) -> tuple[GraphModule, list[PassRun]]:
    """The program after `passes`, and what each did. `gm` is edited; where a pass was undone, another is returned."""
    runs: list[PassRun] = []
    for each in passes:
        gm, run = _run(gm, each)
        runs.append(run)
    return gm, runs


def _run(gm: GraphModule, each: Pass) -> tuple[GraphModule, PassRun]:
    before, start = count(gm), time.perf_counter()
    decisions = observed(gm, each.name, lambda gm: each.run(gm, **each.settings))
    gm.graph.lint()
    gm.recompile()
    return gm, PassRun(each.name, decisions or [], before, count(gm), (time.perf_counter() - start) * 1e3)


def count(gm: GraphModule) -> int:
    """Nodes of `gm`, bodies of regions not included."""
    return len(gm.graph.nodes)


def copy_of(gm: GraphModule) -> GraphModule:
    """A copy that no edit of `gm` reaches. Tensors are shared, graphs and the bodies of regions are not."""
    copy = GraphModule(gm, Graph())
    nodes: dict[Node, Node] = {}
    for name, child in gm.named_children():
        copy.add_submodule(name, copy_of(child) if isinstance(child, GraphModule) else child)
    copy.graph.graph_copy(gm.graph, nodes)
    return copy
