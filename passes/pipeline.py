"""The order of the passes, as data; nothing else decides it. `run_pipeline` times, verifies and reports around each.

A pass edits the graph in place and returns its decisions. One that raises, or leaves a program that breaks an
invariant, is undone and named in the report; the program compiles without it and without those that need it. With
`strict` its error is raised instead.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from v41._compat import observed
from v41._compat_tools import TORCH
from v41.errors import InvariantBroken, PassFailed, PlanBroken
from v41.options import NUMERIC
from v41.passes.analysis.counts import Counts, counts
from v41.passes.canonicalize import canonicalize
from v41.passes.changes import changes, lines_of
from v41.passes.drop_lone_collectives import drop_lone_collectives
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.fuse_all_reduce import fuse_all_reduce
from v41.passes.outline_attention import outline_attention
from v41.passes.outline_compressor import outline_compressor
from v41.passes.outline_engram import outline_engram
from v41.passes.outline_experts import outline_experts
from v41.passes.outline_gate import outline_gate
from v41.passes.outline_index_scores import outline_index_scores
from v41.passes.outline_mhc import outline_mhc
from v41.passes.outline_norm_quantise import outline_norm_quantise
from v41.passes.outline_output_projection import outline_output_projection
from v41.passes.reinplace_cache_writes import reinplace_cache_writes
from v41.passes.restrict_index_scores import restrict_index_scores
from v41.passes.same_values import check_values
from v41.passes.take_in_combine import take_in_combine
from v41.passes.take_in_gathers import take_in_gathers
from v41.passes.trim_replay import trim_replay
from v41.passes.verify import CARRIED, EFFECTS, SHARED, WRITES, Facts, Memory, facts, verify
from v41.regions import REDUCED
from v41.report import Decision, PassRun

PassFunction = Callable[..., list[Decision]]


@dataclass(frozen=True)
class Pass:
    """`needs`: passes that must have run. `expects`: what every V4.1 graph has, so that no site is worth a warning in
    one; `tells`: whether its sites are found in such graphs alone. `serves`: the kind of region whose kernels need it,
    without which it has no sites."""

    run: PassFunction
    needs: tuple[PassFunction, ...] = ()
    expects: str | None = None
    tells: bool = False
    serves: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()  # sentences of verify.RULES that are this pass's business to break
    enabled: bool = True
    by_name: bool = False  # whether it is told what the user calls the inputs: called=

    @property
    def name(self) -> str:
        return self.run.__name__


PIPELINE: tuple[Pass, ...] = (
    Pass(drop_lone_collectives, breaks=(EFFECTS, CARRIED, WRITES)),  # with one rank a collective is none
    Pass(canonicalize),
    # Before regions, which are then found in both halves alike. Ranks add up the rows that are left, all of them alike.
    Pass(trim_replay, needs=(canonicalize,), by_name=True, breaks=(CARRIED,)),
    Pass(fold_sinkhorn, needs=(canonicalize,), expects="unrolled Sinkhorn loop"),
    Pass(outline_mhc, needs=(fold_sinkhorn,), expects="mHC boundary", tells=True),
    Pass(outline_index_scores, needs=(canonicalize,)),  # before the gate, which would look at its top-k
    Pass(restrict_index_scores, needs=(outline_index_scores,), serves="index_scores"),
    Pass(outline_gate, needs=(canonicalize,)),
    Pass(outline_experts, needs=(canonicalize,)),
    Pass(outline_attention, needs=(canonicalize,)),
    Pass(outline_output_projection, needs=(canonicalize,)),
    Pass(outline_engram, needs=(canonicalize,), tells=True),
    Pass(outline_compressor, needs=(canonicalize,)),
    Pass(outline_norm_quantise, needs=(outline_mhc, outline_compressor)),  # norms that lie in no other region
    Pass(fuse_all_reduce, needs=(outline_mhc,)),  # with boundaries and norms, which are regions by now
    Pass(take_in_combine, needs=(fuse_all_reduce,), serves=REDUCED),
    Pass(take_in_gathers, needs=(outline_attention,), serves="attention"),  # in front of writes in place: it moves some
    Pass(reinplace_cache_writes, breaks=(WRITES, SHARED)),
)
CUT_AT = ("mhc_boundary", "mhc_post", "mhc_exit")  # region kinds that are pieces; with kernels, these, too:
ROW_KERNELS = ("moe_gate", "norm_quantise", "compressor", "engram_gate", "attention", "index_scores")
SWITCHED_OFF = "switched off by torch (disabled_passes or its bisector)"
ALONG = "rows"  # the size whose work is captured in pieces, apart from work with other sizes


def run_pipeline(
    gm: GraphModule,
    passes: Sequence[Pass] = PIPELINE,
    *,
    check: bool | str = False,
    strict: bool = False,
    programs: bool = False,
    called: Mapping[str, str] | None = None,
    own: Collection[str] = CUT_AT,
    told: Callable[[str], None] = lambda name: None,
) -> tuple[GraphModule, list[PassRun]]:
    """The program after `passes`, and what each did. `gm` is edited; where a pass was undone, another is returned.

    `check` verifies every rule of verify.py after each pass, else only that the graph is sound; "numeric" also compares
    values (same_values.py). `programs` keeps the text of each program, and what changed, in its PassRun. With `strict`,
    a pass that would be undone raises InvariantBroken or PassFailed. `called`: input -> what the user calls it. `own`:
    kinds of region that are pieces of their own, and count as one launch. `told` hears the name of each pass as its
    turn comes.
    """
    memory: Memory = {}
    known = facts(gm, memory) if check else None
    lines = lines_of(gm) if programs else None
    runs: list[PassRun] = []
    off: dict[PassFunction, str] = {}  # passes that did not run, or were undone
    size = counts(gm, own)
    for each in passes:
        told(each.name)
        missing = next((need.__name__ for need in each.needs if need in off), None)
        if missing is not None or not each.enabled:
            why = f"needs {missing}, which is off" if missing is not None else "switched off in the list of passes"
            run = _run_of(each, [], size, size, 0.0, failure=why)
        elif each.serves is not None and each.serves not in own:
            run = _run_of(each, [], size, size, 0.0, failure=None)
        else:
            settings = each.settings | ({"called": called or {}} if each.by_name else {})
            gm, run, size = _run(gm, each, settings, known, memory, size, own, values=check == NUMERIC, strict=strict)
        if run.failure is not None:
            off[each.run] = run.failure
        elif known is not None and each.breaks:
            known = facts(gm, memory)
        if lines is not None:
            before, lines = lines, lines_of(gm)
            run.program, run.changes = text_of(gm), changes(before, lines)
        runs.append(run)
    gm.recompile()
    _warn(passes, runs)
    return gm, runs


def _run(
    gm: GraphModule,
    each: Pass,
    settings: dict[str, Any],
    known: Facts | None,
    memory: Memory,
    before: Counts,
    own: Collection[str],
    *,
    values: bool,
    strict: bool,
) -> tuple[GraphModule, PassRun, Counts]:
    restore, start = kept(gm), time.perf_counter()
    failure = warning = None
    decisions: list[Decision] | None = None
    try:
        decisions = observed(gm, each.name, lambda gm: told_by(each.run, each.run(gm, **settings)))
        if known is not None:
            verify(gm, known, name=each.name, but=each.breaks, memory=memory)
        lint(gm, bodies=known is not None)
        if values and decisions and each.by_name:
            warning = "values not compared: it rests on promises of a batch, which random numbers do not keep"
        elif values and decisions is not None:
            warning = check_values(restore(), copy_of(gm), name=each.name)
    except Exception as error:  # the one place that may: the report names the pass, and the program goes on without it
        if strict:
            raise strictly(error, each.name) from error
        gm, failure = restore(), failure_of(error)
    if decisions is None and failure is None:
        failure = SWITCHED_OFF
    milliseconds = (time.perf_counter() - start) * 1e3
    after = before if failure else counts(gm, own)
    made = _run_of(each, decisions or [], before, after, milliseconds, failure)
    made.warning = warning
    return gm, made, after


def told_by(run: PassFunction, decisions: object) -> list[Decision]:
    """What `run` returned, if that is what a pass returns. None would look like a pass that torch left out."""
    if not isinstance(decisions, list) or not all(isinstance(each, Decision) for each in decisions):
        raise TypeError(f"{run.__name__} returned {str(decisions)[:60]} where a pass returns its decisions, as a list")
    return decisions


def _run_of(
    each: Pass, decisions: list[Decision], before: Counts, after: Counts, milliseconds: float, failure: str | None
) -> PassRun:
    run = PassRun(each.name, [] if failure else decisions, before.nodes, after.nodes, milliseconds, failure)
    run.regions_before, run.regions_after = before.regions, after.regions
    run.launches_before, run.launches_after = before.launches, after.launches
    run.made = dict(after.named - before.named)
    return run


def strictly(error: Exception, name: str) -> Exception:
    """What is raised, with `strict`, where pass `name` raised `error` or left what breaks a rule."""
    if isinstance(error, InvariantBroken | PlanBroken):
        return error
    return PassFailed(_raised_at(error), run=name, error=f"{type(error).__name__}: {error}")


def failure_of(error: Exception) -> str:
    """What the report says of a pass that raised `error`, and was undone."""
    return f"{type(error).__name__}: {error}\n  at   {_raised_at(error)}"


def _raised_at(error: Exception) -> str:
    """Where a pass raised: the innermost line of passes, or else of what called torch: a pass may lie anywhere."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/passes/" in frame.filename] or frames
    if ours[-1].filename == __file__:
        behind = frames[frames.index(ours[-1]) + 1 :]
        ours += [frame for frame in behind if not frame.filename.startswith(TORCH)]
    return f"{'/'.join(ours[-1].filename.split('/')[-2:])}:{ours[-1].lineno}  {ours[-1].line}"


def _warn(passes: Sequence[Pass], runs: Sequence[PassRun]) -> None:
    """A pass without the sites that it expects is worth a warning in a V4.1 graph alone, which others have told."""
    pairs = [*zip(passes, runs, strict=True)]
    for each, run in pairs:
        told = any(other.tells and of_other.decisions for other, of_other in pairs if other is not each)
        if told and each.expects is not None and not run.decisions and run.failure is None:
            run.warning = f"no {each.expects} found" if run.warning is None else run.warning


def text_of(gm: GraphModule) -> str:
    """The program as Python, bodies of regions included."""
    return gm.print_readable(print_output=False)


def lint(gm: GraphModule, *, bodies: bool) -> None:
    """Raises where a graph contradicts itself; `bodies`: those of the subgraphs it calls as well."""
    gm.graph.lint()
    for body in dict.fromkeys(child for child in gm.children() if bodies and isinstance(child, GraphModule)):
        lint(body, bodies=True)


def copy_of(gm: GraphModule) -> GraphModule:
    """A copy that no edit of `gm` reaches. Tensors are shared, graphs and the bodies of regions are not."""
    return kept(gm)()


def kept(gm: GraphModule) -> Callable[[], GraphModule]:
    """What makes a copy of `gm` as it is now, later. Cheap until it is called: nodes and code are made then.

    Arguments of a node are immutable, and a pass replaces them; so what each node holds, listed, is a copy already.
    """
    nodes = [
        (node, node.op, node.target, node.args, node.kwargs, node.name, node.type, node.meta.copy())
        for node in gm.graph.nodes
    ]
    held = {str(target): getattr(gm, str(target)) for _, op, target, *_ in nodes if op == "get_attr"}
    bodies = {name: kept(value) for name, value in held.items() if isinstance(value, GraphModule)}
    meta = dict(gm.meta)

    def restore() -> GraphModule:
        graph, copies = Graph(), dict[Node, Node]()
        for node, op, target, args, kwargs, name, type_expr, found in nodes:
            args, kwargs = map_arg((args, kwargs), copies.__getitem__)
            if op == "output":
                graph.output(args[0])
                continue
            copies[node] = made = graph.create_node(op, target, args, kwargs, name, type_expr)
            made.meta = found.copy()
        again = GraphModule(held | {name: body() for name, body in bodies.items()}, graph)
        again.meta = meta
        return again

    return restore
