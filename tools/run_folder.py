"""run_folder: a Run as a folder of JSON files, without weights, and back.

    run.json       schema, source, versions, files, report, layers        what the tables of inspect and passes need
    config.json    the model's, in the released layout, where it is a V4.1 model
    plan.json  nodes.json  work.json  kernels.json  streams.json  changes.json      read when a command asks for them

All but config.json name the run that they are of, by a hash of its plan. `save` writes beside the folder and moves the
whole into place, so no reader ever sees a half. `load` takes what it reads for what anybody may have written:
RunUnreadable names file and fault, of types (shaped.py), of the rules of a plan, and of names that are not there.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from v41.errors import PlanBroken, PlanUnreadable, RunNotWritten, RunUnreadable
from v41.formulas import evaluate, symbols_in
from v41.model_def.config import V41Config
from v41.model_def.errors import ModelError
from v41.passes.check_plan import check_plan
from v41.plan import Piece, Plan
from v41.regions import Region
from v41.report import Change, CompileReport
from v41.tools.expected import regions_values
from v41.tools.files import check_writable, made_beside, put_folder, told
from v41.tools.inspect import LayerView, role
from v41.tools.json_output import schema
from v41.tools.kernels import KernelFacts, LaunchFacts
from v41.tools.nodes import NodeFacts, WorkFacts
from v41.tools.predicted import PieceTime, Predicted
from v41.tools.report_view import as_json, decision_values, pass_values
from v41.tools.run import Run
from v41.tools.saved_passes import decision_from, run_from
from v41.tools.shaped import check
from v41.tools.wiring import wiring

SCHEMA = schema("run")  # of all files of the folder
# what reading a file of anybody's may raise
FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    MemoryError,  # so Python calls a text that is nested too deeply
    PlanUnreadable,
    PlanBroken,
    ModelError,
)
MAIN, CONFIG = "run.json", "config.json"


def check_place(folder: Path) -> None:
    """RunNotWritten where `folder` is there and holds something else, or cannot be written."""
    if folder.exists() and not (folder / MAIN).is_file():
        raise RunNotWritten(folder, problem="it is there and holds no run")
    try:
        check_writable(folder.resolve().parent)
    except OSError as error:
        raise RunNotWritten(folder, problem=told(error)) from error


def save(run: Run, folder: Path) -> None:
    """Writes `run`. RunNotWritten where `folder` is there and holds something else, or cannot be written."""
    check_place(folder)
    plan = json.loads(run.plan.to_json())
    files: dict[str, dict[str, Any]] = {
        "plan.json": {"plan": plan},
        "nodes.json": node_values(run.nodes),
        "work.json": {"work": [asdict(each) for each in run.work]},
        "kernels.json": {"kernels": [asdict(each) for each in run.kernels]},
        "streams.json": streams_values(run.predicted),
    }
    if run.changes is not None:
        of_passes = {name: [asdict(each) for each in of_pass] for name, of_pass in run.changes.items()}
        files["changes.json"] = {"changes": of_passes}
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    files = {name: {"schema": SCHEMA, "run": digest, **facts} for name, facts in files.items()}
    if run.config is not None:
        files[CONFIG] = run.config.to_json()
    files[MAIN] = {"schema": SCHEMA, "run": digest, "files": sorted(files)} | run_values(run)
    try:
        with made_beside(folder.resolve()) as beside:
            made = beside / "run"
            made.mkdir()
            for name, facts in files.items():
                (made / name).write_text(json.dumps(facts, indent=1))
            put_folder(made, folder.resolve())
    except OSError as error:
        raise RunNotWritten(folder, problem=told(error)) from error


def run_values(run: Run) -> dict[str, Any]:
    """The facts of `v41 inspect --json`, less what the other files hold."""
    (graph,) = as_json([run.report])
    graph["passes"] = [{name: v for name, v in pass_values(each).items() if name != "changes"}
                       for each in run.report.passes]  # fmt: skip
    regions = regions_values(run.report.passes, run.by_config)
    return {
        "source": run.source,
        "versions": run.versions,
        "layers": layer_values(run),
        "regions": regions,
        "graph": graph,
        "parameters": run.parameters,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_mib": run.peak_mib,
    }


def layer_values(run: Run) -> list[dict[str, Any]]:
    wires = wiring(run.plan, run.layers, run.parameters)

    def piece_values(piece: Piece) -> dict[str, Any]:
        reads, writes = wires[piece.name]
        return {"name": piece.name, "key": piece.key, "nodes": piece.nodes, "reads": reads, "writes": writes}

    return [
        {
            "layer": view.layer,
            "role": role(run.config, view.layer) if view.layer is not None and run.config is not None else None,
            "pieces": [piece_values(piece) for piece in view.pieces],
            "regions": [
                {"kind": region.kind, "attrs": {name: str(value) for name, value in region.attrs.items()}}
                for region in view.regions
            ],
            "refused": [
                {"node": d.node, "body": d.body, "rule": d.rule, "culprit": d.culprit, "source": d.source}
                for d in view.refused
            ],
        }
        for view in run.layers
    ]


def node_values(nodes: list[NodeFacts]) -> dict[str, Any]:
    """Lines of the model once, and where nodes have them their numbers."""
    numbers: dict[str, int] = {}
    for node in nodes:
        for line in (node.source, *node.path):
            numbers.setdefault(line, len(numbers))
    told = [asdict(node) | {"source": numbers[node.source], "path": [numbers[line] for line in node.path]}
            for node in nodes]  # fmt: skip
    return {"lines": list(numbers), "nodes": told}


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(folder: Path) -> Run:
    """The run that `save` wrote. RunUnreadable where something is missing or is not what it should be."""

    def made(facts: dict[str, Any]) -> Run:
        plan, config = part("plan.json", plan_from, facts), None
        missing = [name for name in facts["files"] if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{', '.join(missing)} is not there")
        if CONFIG in facts["files"]:
            config = V41Config.from_json(folder / CONFIG)
        report = report_from(facts["graph"], plan)
        views = [layer_from(each, report, plan, config) for each in facts["layers"]]
        numbers = {name: float(facts[name]) for name in ("cpu_seconds", "peak_mib")}
        texts = {name: _texts(facts[name]) for name in ("versions", "parameters")}
        _known("an input", texts["parameters"], plan.values)
        seconds = {str(name): float(value) for name, value in facts["seconds"].items()}
        kept = "changes.json" in facts["files"]
        parts: dict[str, Callable[[], Any]] = {
            "changes": lambda: part("changes.json", changes_from, facts) if kept else None,
            "nodes": lambda: part("nodes.json", lambda facts: nodes_from(facts, plan), facts),
            "work": lambda: part("work.json", work_from, facts),
            "kernels": lambda: part("kernels.json", lambda facts: kernels_from(facts, plan), facts),
            "predicted": lambda: part("streams.json", lambda facts: streams_from(facts, plan), facts),
        }
        return Run(str(facts["source"]), texts["versions"], config, report, views, texts["parameters"], seconds,
                   **numbers, parts=parts)  # fmt: skip

    def part(name: str, made: Callable[[dict[str, Any]], Any], main: dict[str, Any]) -> Any:
        return _read(folder / name, made, main["run"])

    run: Run = _read(folder / MAIN, made)
    return run


def _read(path: Path, made: Callable[[dict[str, Any]], Any], of: str | None = None) -> Any:
    """What `made` makes of the facts in a file of this schema, and of the run `of`."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no file")
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["schema"] != SCHEMA:
            raise ValueError(f"its schema is {facts['schema']!r}, and this v41 reads {SCHEMA!r}")
        if of is not None and facts["run"] != of:
            raise ValueError("it is of another run than run.json")
        return made(facts)
    except FAULTS as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise RunUnreadable(path, reason=f"{type(error).__name__}: {first}") from error


def plan_from(facts: dict[str, Any]) -> Plan:
    """A plan that keeps its rules."""
    plan = Plan.from_json(json.dumps(facts["plan"]))
    check(plan)
    check_plan(plan)
    _formulas(buffer.bytes for buffer in plan.buffers.values())
    return plan


def _formulas(texts: Iterable[str], symbols: Iterable[str] | None = None) -> None:
    """ValueError for the first that is none; KeyError where it names another symbol than these."""
    for text in dict.fromkeys(texts):
        evaluate(text, dict.fromkeys(symbols_in(text) if symbols is None else symbols, 1))


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    there = frozenset(known)
    for name in names:
        if name not in there:
            raise KeyError(f"{what} that is not in the plan: {name}")


def report_from(graph: dict[str, Any], plan: Plan) -> CompileReport:
    options = {str(name): (each["value"], str(each["set_by"])) for name, each in graph["options"].items()}
    report = CompileReport(
        options=options,
        passes=[run_from(each) for each in graph["passes"]],
        pieces=int(graph["pieces"]),
        artifacts=int(graph["artifacts"]),
        kernels={str(name): list(pieces) for name, pieces in graph["kernels"].items()},
        fallbacks=[str(each) for each in graph["fallbacks"]],
        graph_break=graph["graph_break"],
        given_up=graph["given_up"],
        recompiles=int(graph["recompiles"]),
        cache=str(graph["cache"]),
        seconds={str(name): float(value) for name, value in graph["seconds"].items()},
        plan=plan,
    )
    check(report)
    _known("an option", ["codegen"], options)
    if not report.passes:
        raise ValueError("no pass ran")
    return report


def layer_from(facts: dict[str, Any], report: CompileReport, plan: Plan, config: V41Config | None) -> LayerView:
    pieces = {piece.name: piece for piece in plan.pieces}
    refused = {(d.body, d.node): d for run in report.passes for d in run.decisions if not d.applied}
    layer = facts["layer"]
    made = LayerView(
        None if layer is None else int(layer),
        [Region(str(each["kind"]), {name: literal(value) for name, value in each["attrs"].items()})
         for each in facts["regions"]],
        [refused[each.get("body", ""), each["node"]] for each in facts["refused"]],
        [pieces[each["name"]] for each in facts["pieces"]],
    )  # fmt: skip
    if config is not None and made.layer is not None and not 0 <= made.layer < config.num_hidden_layers:
        raise ValueError(f"the config has no layer {made.layer}")
    return made


def literal(text: str) -> object:
    """A number, tuple or dict that was spelled as Python spells it; the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return str(text)


def changes_from(facts: dict[str, Any]) -> dict[str, list[Change]]:
    return {str(name): [_made(Change, each) for each in changes] for name, changes in facts["changes"].items()}


def nodes_from(facts: dict[str, Any], plan: Plan) -> list[NodeFacts]:
    lines = facts["lines"]
    nodes = [_made(NodeFacts, each | {"source": lines[each["source"]], "path": [lines[line] for line in each["path"]]})
             for each in facts["nodes"]]  # fmt: skip
    _known("a piece", (node.piece for node in nodes), (piece.name for piece in plan.pieces))
    return nodes


def work_from(facts: dict[str, Any]) -> list[WorkFacts]:
    works: list[WorkFacts] = [_made(WorkFacts, each) for each in facts["work"]]
    formulas = [(work.read, work.written, work.apart, work.flops or "0") for work in works]
    _formulas(text for each in formulas for text in each)
    return works


def kernels_from(facts: dict[str, Any], plan: Plan) -> list[KernelFacts]:
    kernels: list[KernelFacts] = [
        _made(KernelFacts, each | {"launches": [_made(LaunchFacts, launch) for launch in each["launches"]]})
        for each in facts["kernels"]
    ]
    _known("a piece", (name for kernel in kernels for name in kernel.pieces), (piece.name for piece in plan.pieces))
    return kernels


def streams_values(found: Predicted) -> dict[str, Any]:
    """The plans with side streams, and how long pieces take; the plan itself has a file of its own."""
    sides = found.plan.overlapped and json.loads(found.plan.overlapped.to_json())
    times = {key: asdict(time) for key, time in found.times.items()}
    return {"sides": sides, "times": times, "judged": [decision_values(each) for each in found.judged]}


def streams_from(facts: dict[str, Any], plan: Plan) -> Predicted:
    sides = facts["sides"] and Plan.from_json(json.dumps(facts["sides"]))
    whole = replace(plan, overlapped=sides or None)
    times: dict[str, PieceTime] = {key: _made(PieceTime, each) for key, each in facts["times"].items()}
    made = Predicted(whole, times, [decision_from(each) for each in facts["judged"]])
    check(made)
    check_plan(whole)
    _formulas((time.moved for time in times.values()), ["rows"])
    _known("a time", (piece.key for each in (whole, *whole.sides) for piece in each.pieces), times)
    return made


def _made(kind: Any, facts: dict[str, Any]) -> Any:
    """A dataclass of exactly these fields, lists as the tuples they were. KeyError where one is missing."""
    values = {field.name: facts[field.name] for field in fields(kind)}
    made = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    check(made)
    return made


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in facts.items()}
