"""Attention whose records lie in caches, gathered in many spellings, and near misses, as programs to edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.attention import ROWS, Spelling
from tests.strategies.tracing import trace
from tests.strategies.whole_programs import as_subgraph
from v41.passes.canonicalize import canonicalize
from v41.passes.matching import aten
from v41.passes.outline_attention import KIND, outline_attention
from v41.passes.pipeline import Pass, run_pipeline
from v41.regions import regions

SLOTS, ENTRIES = 4, 9
BEFORE = (Pass(canonicalize), Pass(outline_attention))
MADE = "its records are gathered from a cache by a slot a row and a place a key, or are of this step"
ALONE = "what gathers them is read there alone"
ONE_THING = "each of its operands is one thing to attention"
WAITS = "what is written over them meanwhile can wait"
WRITTEN = "nothing is written in between, and no effect reads it there"
PLACES: dict[str, Callable[[Tensor], Tensor]] = {  # picks -> where they lie
    "clamp": lambda picks: picks.clamp(min=0),
    "where": lambda picks: torch.where(picks < 0, 0, picks),
    "the last": lambda picks: torch.where(picks >= 0, picks, ENTRIES - 1),
    "relu": lambda picks: picks.relu(),
    "clamped twice": lambda picks: picks.clamp(0, ENTRIES - 1),  # is no pick where it is larger
    "but for one": lambda picks: torch.where(picks == 5, 0, picks.clamp(min=0)),
    "in bf16 meanwhile": lambda picks: torch.where(picks < 0, torch.zeros((), dtype=torch.bfloat16), picks).long(),
    "but in late rows": lambda picks: torch.where(torch.arange(len(picks))[:, None] < 4, picks.clamp(min=0), 0),
}
NO_PICKS = ("clamped twice", "but for one", "in bf16 meanwhile", "but in late rows")  # of PLACES
SLOT: dict[str, Callable[[Tensor, int], Tensor]] = {  # of each row, for so many keys
    "unsqueezed": lambda slots, count: slots.unsqueeze(-1),
    "expanded": lambda slots, count: slots[:, None].expand(-1, count),
    "viewed": lambda slots, count: slots.view(-1, 1),
}
FLAWS = {  # what is wrong -> the branch that it is wrong of, the rule it breaks
    "taken from a joined cache": ("picked", MADE),
    "chosen by another rule": ("window", MADE),
    "the other way round": ("window", MADE),
    "places for all rows": ("window", MADE),
    "records are returned": ("picked", ALONE),
    "of other rows": ("window", "records of this step are those of its rows"),
    "in other slots": ("picked", "all its records lie in one slot a row"),
    "one cache for both": ("picked", ONE_THING),
    "one mask for both": ("window", ONE_THING),
    "one cache, written in between": ("window", WAITS),
    "an input is written": ("window", WRITTEN),
}


@dataclass(frozen=True)
class Lying:
    """How records of `spelling` come to its attention. window, picked: sources, as take_in_gathers calls them.

    written: the ring takes in this step's records behind the gather, as the model does. layers: attention of several is
    traced once. again: what was written is gathered, too, in front of the first attention, for one more behind it.
    """

    spelling: Spelling = field(default_factory=lambda: Spelling(rope="none", sink=True))
    window: str = "step"
    picked: str = "slots"
    places: str = "clamp"
    slot: str = "unsqueezed"
    written: bool = True
    layers: int = 1
    again: bool = False
    flaw: str = ""

    @property
    def calls(self) -> int:
        """How often the program attends."""
        return self.layers + self.again

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What `run` takes: rows, and what has none."""
        s = self.spelling
        rows, (sink,) = s.to_trace()[1:]
        generator = torch.Generator().manual_seed(0)

        def below(most: int, *sizes: int) -> Tensor:
            return torch.randint(0, most, (ROWS, *sizes), generator=generator)

        places = [below(SLOTS), below(SLOTS), below(s.window, s.window), below(ROWS, s.window), below(s.window)]
        in_step = torch.rand(ROWS, s.window, generator=generator) < 0.5
        ring, entries = (self.stored(i, SLOTS, count) for i, count in ((0, s.window), (1, ENTRIES)))
        return [*rows, *places, in_step, self.stored(0, ROWS)], [sink, ring, entries]

    def stored(self, branch: int, *sizes: int) -> Tensor:
        torch.manual_seed(branch)
        numbers = torch.randn(*sizes, self.spelling.width).bfloat16()
        return self.spelling.stored(self.spelling.formats[branch], numbers)

    def run(self, attend: Callable[..., Any], *given: Tensor) -> Any:
        s = self.spelling
        count = 6 if s.picked is None else 8
        (q, cos, sin, other, window, seen, *more), rest = given[:count], given[count:]
        slots, others, at, rows, into, in_step, records, sink, ring, entries = rest
        if self.flaw == "one mask for both":
            in_step = seen
        if self.flaw == "one cache for both":
            entries = ring
        results: list[Any] = []
        windows = [self.windows(window, ring, slots, at, records, rows, in_step) for _ in range(self.layers)]
        if self.written or self.flaw == "one cache, written in between":
            ring[torch.where(into > 0, slots, SLOTS - 1), into] = records
        if self.again:
            windows.append(self.windows(window, ring, slots, at, records, rows, in_step))
        for window in windows:
            if s.picked is not None and self.picked != "rows":
                owner = others if self.flaw == "in other slots" else slots
                more = [self.entries(entries, ring, owner, more[1]), more[1]]
            if self.flaw == "records are returned":
                results.append(more[0])
            q = attend(q, cos, sin, other, window, seen, *more, sink)
            results.append(q)
            q = q.unflatten(1, (s.heads, -1))
        return results

    def windows(
        self, handed: Tensor, ring: Tensor, slots: Tensor, at: Tensor, records: Tensor, rows: Tensor, in_step: Tensor
    ) -> Tensor:
        """Records of the window keys of each row."""
        count = self.spelling.window
        if self.window == "rows":
            return handed
        places = torch.arange(count) if self.flaw == "places for all rows" else at
        window = ring[SLOT[self.slot](slots, count), places]
        if self.window == "slots":
            return window
        mask = torch.arange(count)[None] > 1 if self.flaw == "chosen by another rule" else in_step
        pair = records[rows], window
        return torch.where(mask.unsqueeze(-1), *(pair[::-1] if self.flaw == "the other way round" else pair))

    def entries(self, entries: Tensor, ring: Tensor, slots: Tensor, picks: Tensor) -> Tensor:
        """Records of the picked entries of each row."""
        if self.flaw in ("one cache, written in between", "one cache for both"):
            return ring[slots.unsqueeze(-1), picks.clamp(min=0) % ring.shape[1]]
        if self.flaw == "taken from a joined cache":
            joined = slots.unsqueeze(-1) * ENTRIES + picks.clamp(min=0)
            return entries.flatten(0, 1).index_select(0, joined.flatten()).unflatten(0, (-1, picks.shape[1]))
        return entries[SLOT[self.slot](slots, picks.shape[1]), PLACES[self.places](picks)]

    # ---- the program

    def shaped(self) -> Lying:
        """The same with what its flaw needs."""
        case = self
        if self.flaw in ("one cache, written in between", "one cache for both"):
            case = replace(case, written=False, spelling=replace(case.spelling, records="all fp8"))
        if self.flaw:
            case = replace(case, window="step", picked="slots", spelling=replace(case.spelling, picked=3))
        return case

    def program(self) -> GraphModule:
        """With its attention as a region that is handed records."""
        rows, held = self.tensors()
        names = ["rows"] * len(rows)
        if self.flaw == "of other rows":
            names[-1] = "records"

        attend = as_subgraph(self.spelling.attention) if self.calls > 1 else self.spelling.attention
        gm = trace(lambda *given: self.run(attend, *given), *rows, static=held, sizes=names)
        gm, _ = run_pipeline(gm, BEFORE, strict=True)
        if self.flaw == "an input is written":
            call = next(regions(gm, KIND))
            given = next(node for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor))
            with gm.graph.inserting_before(call):
                gm.graph.call_function(aten.zero_.default, (given,)).meta = dict(given.meta)
        return gm

    @property
    def sources(self) -> tuple[str, ...]:
        """What the region must say."""
        return (self.window, self.picked)[: 1 if self.spelling.picked is None else 2]


@cache
def prepared(case: Lying) -> GraphModule:
    return case.shaped().program()


spellings = st.builds(
    Spelling,
    rope=st.sampled_from(("none", "stack")),
    records=st.sampled_from(("both", "all fp8", "window", "none")),
    picked=st.sampled_from((None, 3, 5)),
    heads=st.integers(1, 3),
    window=st.integers(2, 5),
)
legal = st.builds(
    Lying,
    spellings,
    st.sampled_from(("rows", "slots", "step", "step")),
    st.sampled_from(("rows", "slots", "slots")),
    st.sampled_from(sorted(PLACES)),
    st.sampled_from(sorted(SLOT)),
    st.booleans(),
    st.sampled_from((1, 1, 2)),
)
flawed = st.builds(Lying, flaw=st.sampled_from(sorted(FLAWS)))
