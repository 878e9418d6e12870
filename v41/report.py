"""What the compiler did and why: a decision per site, a run per pass, a report per graph. A result, never a log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace

from torch.fx import Node

from v41._compat_frames import GivenUp
from v41._compat_tools import trace_artifact
from v41.plan import Plan
from v41.regions import Region, is_region, region_of


@dataclass(frozen=True)
class Decision:
    """One site: applied with its region (if it made one), or refused with the rule that broke and the node at fault."""

    applied: bool
    node: str  # name of the site: the region's call, or the last node of what was refused
    source: str  # "model_def/mhc.py:31  m = m / (m.sum(-1) + eps)", the innermost line of the user's model
    rule: str | None = None  # the sentence that does not hold; None when applied
    culprit: str | None = None  # the node that breaks it
    region: Region | None = None
    culprit_source: str | None = None  # the culprit's line of the model
    times: Mapping[str, Mapping[int, float]] | None = None  # what it was judged by: name -> µs at numbers of rows
    body: str = ""  # the subgraph that it stood in when it was judged, named as in a Change; "" in the program itself

    @property
    def name(self) -> str:
        """What it is called: its node, and in front of that the subgraph, where it is in one."""
        return f"{self.body}/{self.node}" if self.body else self.node


@dataclass(frozen=True)
class Change:
    """One node that a pass removed, added, rewired or moved, as the line that calls it."""

    kind: str  # "removed", "added", "rewired" or "moved"
    node: str
    before: str | None  # "aten.mul.Tensor(x, 2)  f32[u0, 4]"; None where it is new
    after: str | None  # None where it is gone
    source: str  # its line of the model
    body: str = ""  # the region or subgraph it is in afterwards (before, where it is gone); "" in the program itself


@dataclass
class PassRun:
    """What one pass did to one graph. `failure` names what went wrong; the graph was then restored, the pass is off."""

    name: str
    decisions: list[Decision]
    nodes_before: int
    nodes_after: int
    milliseconds: float
    failure: str | None = None
    warning: str | None = None  # e.g. a pass that expects sites in every V4.1 graph saw none
    made: dict[str, int] = field(default_factory=dict)  # regions of each name that a step runs, and did not before
    regions_before: int = 0  # that a step runs, those in other regions included
    regions_after: int = 0
    launches_before: int = 0  # kernels of a step: a node that computes is one, a region with a kernel of its own is one
    launches_after: int = 0
    program: str | None = field(default=None, repr=False)  # the program after it, where `collect(programs=True)` asked
    changes: list[Change] | None = field(default=None, repr=False)  # what it changed, where that asked

    @property
    def applied(self) -> int:
        return sum(decision.applied for decision in self.decisions)

    @property
    def refused(self) -> int:
        return len(self.decisions) - self.applied


@dataclass
class Captures:
    """What became of the steps of one compiled graph, counted while it runs."""

    captured: list[str] = field(default_factory=list)  # graphs made: "rows=8 requests=8 ...", "rows=128 segment_3"
    replays: int = 0  # steps that were one graph
    segment_replays: int = 0  # graphs replayed in steps that were captured in segments
    piecewise: dict[str, int] = field(default_factory=dict)  # why a step was not one graph -> steps in segments
    uncaptured: dict[str, int] = field(default_factory=dict)  # why a step was captured not at all -> steps
    warm_ups: int = 0  # steps that ran uncaptured since their sizes or addresses were new
    dropped: list[str] = field(default_factory=list)  # graphs that found an input at another address
    errors: list[str] = field(default_factory=list)  # captures that raised; these sizes run uncaptured
    host_ns: int = 0  # time on the host in `replays` steps, from the inputs to the results
    pool_bytes: Callable[[], int] = field(default=lambda: 0, repr=False)  # device memory of all graphs together

    @property
    def host_us(self) -> float | None:
        """Mean µs on the host of a step that was one graph; None before the first."""
        return self.host_ns / self.replays / 1e3 if self.replays else None

    def failed(self, name: str, error: Exception) -> None:
        """Notes what a capture raised, by its first line."""
        first = (str(error).strip() or "no message").splitlines()[0]
        self.errors.append(f"{name}: {type(error).__name__}: {first}")


@dataclass
class CompileReport:
    """One compiled graph: effective options with who set them, passes, pieces, and all that did not go as intended.

    With `given_up`, none: a function that Dynamo left to Python, so nothing of it came here, and all else is empty.
    """

    options: dict[str, tuple[object, str]] = field(default_factory=dict)  # name -> (value, who set it and why)
    passes: list[PassRun] = field(default_factory=list)
    pieces: int = 0
    artifacts: int = 0  # distinct compiled artifacts; pieces - artifacts were shared by structure
    kernels: dict[str, list[str]] = field(default_factory=dict)  # generated kernel -> the pieces that run it
    fallbacks: list[str] = field(default_factory=list)  # "piece 3 runs as eager: ..."
    graph_break: str | None = None  # why Dynamo ended this graph early, with the user's line
    given_up: str | None = None  # why Dynamo did not trace a function at all, and which
    recompiles: int = 0  # how often Dynamo had compiled this function before
    cache: str = "off"  # hit, miss (and what differs from the nearest entry) or off (and why)
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> wall time
    plan: Plan | None = field(default=None, repr=False)  # what runs
    captures: Captures | None = None  # what it does at run time; None where nothing is captured
    program: str | None = field(default=None, repr=False)  # before the first pass, where `collect(programs=True)` asked


@dataclass
class Collector:
    """What a `collect` block has got so far."""

    programs: bool
    reports: list[CompileReport] = field(default_factory=list)
    given_up: GivenUp = field(default_factory=GivenUp)

    def add(self, *made: CompileReport) -> None:
        """Appends reports, behind those of what Dynamo gave up since the last."""
        self.reports += [*(CompileReport(given_up=why) for why in self.given_up()), *made]


_COLLECTORS: ContextVar[tuple[Collector, ...]] = ContextVar("v41_report_collectors", default=())
_LAST: ContextVar[CompileReport | None] = ContextVar("v41_last_report", default=None)


@contextmanager
def collect(*, programs: bool = False) -> Iterator[list[CompileReport]]:
    """Reports of every graph that v41 compiles inside the block, in order; with `programs`, also the text of each
    program and what each pass changed.

    Of a function that Dynamo gives up, whatever backend it was for, a report says why, in its place at the end of the
    block at the latest. Dynamo tries such a function once: a block that begins later has none.

    with v41.collect() as reports:
        compiled(batch, cache)
    """
    collector = Collector(programs)
    token = _COLLECTORS.set((*_COLLECTORS.get(), collector))
    try:
        yield collector.reports
    finally:
        collector.add()
        _COLLECTORS.reset(token)


def publish(report: CompileReport) -> None:
    """Hands a finished report to every `collect` block around, to `last_report` and to TORCH_TRACE."""
    for collector in _COLLECTORS.get():
        collector.add(report)
    plan = report.plan
    _LAST.set(replace(report, plan=plan.without_bodies() if plan is not None else None))
    trace_artifact("v41_report", lambda: text_of(report))
    if plan is not None:
        trace_artifact("v41_plan", plan.to_json)


def last_report() -> CompileReport | None:
    """What was compiled last in this thread (or async task), without graphs; None before the first."""
    return _LAST.get()


def text_of(report: CompileReport) -> str:
    """The report as JSON, without its plan and the text of programs."""
    told = {"plan", "program", "captures"}
    facts = {each.name: getattr(report, each.name) for each in fields(report) if each.name not in told}
    facts["passes"] = [
        {each.name: getattr(run, each.name) for each in fields(run) if each.repr} for run in report.passes
    ]
    return json.dumps(facts, default=_plain, indent=1)


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def programs_wanted() -> bool:
    """Whether a `collect` block around asked for the text of programs."""
    return any(collector.programs for collector in _COLLECTORS.get())


def applied(call: Node) -> Decision:
    """The decision for a site that became the region `call`, or whose last node `call` was."""
    return Decision(True, call.name, source_of(call), region=region_of(call) if is_region(call) else None)


def refused(node: Node, rule: str, culprit: Node) -> Decision:
    """The decision for a site, named by its last node, that `rule` forbids because of `culprit`."""
    return Decision(False, node.name, source_of(node), rule, culprit.name, culprit_source=source_of(culprit))


def source_of(node: Node) -> str:
    """`file:line  code` of the innermost frame that Dynamo recorded for `node`; "unknown" where it recorded none."""
    frames = re.findall(r'File "(.+?)", line (\d+), in .+\n(?:\s+(.+))?', node.meta.get("stack_trace") or "")
    if not frames:
        return "unknown"
    path, line, code = frames[-1]
    return f"{'/'.join(path.split('/')[-2:])}:{line}  {code}".rstrip()
