"""alone: our passes inside plain Inductor, or inside any stack that compiles with it, without the rest of v41.

    fold = inductor_pass(fold_sinkhorn)
    torch.compile(model, options={"post_grad_custom_post_pass": fold})       (or post_grad_custom_pre_pass)

    before   Inductor's post-grad graph: functional ATen, in any model
    after    the same with canonicalize, then fold_sinkhorn run over it; regions that nothing lowered are inlined again

What a pass needs runs before it. A later pass of one's own may replace regions by what it has for them, a custom
operator say: `inductor_pass(fold_sinkhorn, call_my_kernel)`. What stays of them is inlined, since Inductor fuses
nothing across the border of a subgraph. A graph that breaks under a pass is restored, as in v41's own pipeline. Passes
that serve kernels (`Pass.serves`: restrict_index_scores, take_in_combine, take_in_gathers) run here whether such a
kernel is there or not: who names one has something for what it makes, or wants the graph as it is then. take_in_combine
takes sums over ranks that stand in front of norms or boundaries, so outline_norm_quantise or outline_mhc is named
before it.

Decisions come as reports: `with v41.collect() as reports` around the first call. A graph that Inductor took from its
cache has none, for then no pass ran.

Inductor's caches hold a graph by the passes' key too: the source files of each pass and of what it imports of its own
package and of v41; what its code says, which may have been edited in the process; its settings; schema and fake
implementation of every custom operator in the process, which torch's own key leaves out; for a pass that goes by what
the user calls inputs (trim_replay) these names, and those of sizes. Where a part cannot be told (a setting that is an
object), nothing is cached.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from v41._compat import custom_graph_pass, sort_nodes
from v41._compat_cache import NotStorable, code_hash, custom_operators
from v41._compat_trace import inputs_called, told_of_inputs
from v41.passes import pipeline
from v41.passes import verify as rules
from v41.passes.matching import aten, programs
from v41.passes.pipeline import PIPELINE, Pass, PassFunction, run_pipeline
from v41.regions import inline, regions
from v41.report import CompileReport, publish

HOUSE = __name__.split(".")[0]
DRIVER = (sys.modules[__name__], pipeline, rules)  # what runs around every pass, by its own text


def inductor_pass(*passes: PassFunction | Pass, verify: bool = False) -> Any:
    """A torch CustomGraphPass that runs `passes`, each behind what it needs, over every graph Inductor compiles.

    A `Pass` carries settings. `verify` holds each graph to all invariants after every pass, and undoes one that breaks
    any. The result goes into `post_grad_custom_post_pass` or `post_grad_custom_pre_pass`.
    """
    order = in_order(passes)
    by_name = any(each.by_name for each in order)

    def run(graph: Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        sort_nodes(graph)
        reshaped = graph.find_nodes(op="call_function", target=aten.reshape.default) != []
        result, runs = run_pipeline(gm, order, check=verify, called=inputs_called(gm) if by_name else None)
        if result is not gm:
            _take_over(gm, result)
        for program in programs(gm):
            while calls := list(regions(program)):
                for call in calls:
                    inline(program, call)
            if reshaped:  # as Inductor has it, which may lay memory out otherwise; passes look for views
                for view in program.graph.find_nodes(op="call_function", target=aten.view.default):
                    view.target = aten.reshape.default
            program.recompile()
        publish(CompileReport(options={"verify": (verify, "inductor_pass")}, passes=runs))

    return custom_graph_pass(run, lambda: key_of(order, verify))


def in_order(passes: Sequence[PassFunction | Pass]) -> tuple[Pass, ...]:
    """Each pass as it is given, else as the pipeline has it, once, behind what it needs. A function that is not in the
    pipeline needs nothing."""
    known = {each.run: each for each in PIPELINE}
    asked = [each if isinstance(each, Pass) else known.get(each, Pass(each)) for each in passes]
    known |= {each.run: each for each in asked}
    order: list[Pass] = []

    def add(each: Pass) -> None:
        for need in each.needs:
            if all(need is not other.run for other in order):
                add(known.get(need, Pass(need)))
        named = replace(each, serves=None)  # whoever lowers its regions
        if named not in order:
            order.append(named)

    for each in asked:
        add(each)
    return tuple(order)


def _take_over(gm: GraphModule, result: GraphModule) -> None:
    """Makes the program of `gm` that of `result`, a copy of an earlier state. Inductor holds `gm` and its graph."""
    graph, output = gm.graph, gm.graph.output_node()
    meta = output.meta
    for node in reversed(graph.nodes):
        graph.erase_node(node)
    for name, child in list(result.named_children()):
        setattr(gm, name, child)
    graph.output(graph.graph_copy(result.graph, {})).meta = meta
    gm.recompile()


# ---- the key ---------------------------------------------------------------------------------------------------------


def key_of(passes: Sequence[Pass], verify: bool) -> str | None:
    """64 hexadecimal digits for all that decides what `passes` do to a graph; None where a part cannot be told."""
    told = [f"verify {verify}", *(f"{name} {facts}" for name, facts in custom_operators().items())]
    if any(each.by_name for each in passes):
        told.extend(told_of_inputs())
    try:
        for each in passes:
            told.append(f"{each.name} {code_hash(each.run)} {each.breaks} {''.join(_spell(each.settings))}")
    except NotStorable:
        return None
    files = {path: None for each in passes for path in sources_of(each.run.__module__)}
    files |= dict.fromkeys(Path(str(module.__file__)) for module in DRIVER)
    told += [f"{path.name} {_hash_of(path)}" for path in sorted(files)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _spell(value: Any) -> Iterator[str]:
    """A setting as text that differs where its value does. NotStorable for what has no such text."""
    match value:
        case dict():
            yield "{"
            for name in sorted(value, key=repr):
                yield from (*_spell(name), ": ", *_spell(value[name]), ", ")
            yield "}"
        case tuple() | list():
            yield f"{type(value).__name__}("
            for item in value:
                yield from (*_spell(item), ", ")
            yield ")"
        case set() | frozenset():
            yield from ("set", *_spell(sorted(value, key=repr)))
        case FunctionType():
            yield f"function {code_hash(value)}"
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            yield f"{type(value).__name__} {value!r}"
        case _:
            raise NotStorable(f"the setting {value!r} is a {type(value).__name__}")


@cache
def sources_of(module: str) -> tuple[Path, ...]:
    """The file of `module` and of all that it imports, directly or not, of its own top-level package and of v41."""
    packages = {module.split(".")[0], HOUSE}
    found: dict[str, Path] = {}
    stack = [module]
    while stack:
        name = stack.pop()
        path = _file_of(name) if name not in found and name.split(".")[0] in packages else None
        if path is None:
            continue
        found[name] = path
        stack.extend(_imports(path, name))
        stack.append(name.rpartition(".")[0])  # the package around it ran as well
    return tuple(sorted(found.values()))


def _file_of(name: str) -> Path | None:
    """The source file of a module; None for what is no module, or has none."""
    loaded: ModuleType | None = sys.modules.get(name)
    if loaded is not None:
        path = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(name) if name else None
        except (ImportError, ValueError):
            return None
        path = spec.origin if spec is not None else None
    return Path(path) if path and path.endswith(".py") else None


def _imports(path: Path, module: str) -> Iterator[str]:
    """What the text of `path` may import when it runs, inside functions as well: `from a import b` may mean a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _run(ast.parse(_text_of(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package) if node.level and package else base
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and all below it, save what only a type checker reads."""
    yield node
    unread = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for child in node.orelse if isinstance(node, ast.If) and unread else ast.iter_child_nodes(node):
        yield from _run(child)


@cache
def _text_of(path: Path) -> bytes:
    """Read once: what is on disk later is not what runs."""
    return path.read_bytes()


def _hash_of(path: Path) -> str:
    return hashlib.sha256(_text_of(path)).hexdigest()
