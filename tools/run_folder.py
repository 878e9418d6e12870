"""run_folder: a Run as a folder of JSON files, without weights, and back.

    run.json       schema, source, versions, report, layers, seconds      what the tables of inspect and passes need
    config.json    the model's, in the released layout, where it is a V4.1 model
    plan.json  nodes.json  work.json  kernels.json  changes.json          read when a command asks for them

`save` writes beside the folder and moves the whole into place, so no reader ever sees a half. `load` takes what it
reads for what anybody may have written: RunUnreadable names file and fault.
"""

from __future__ import annotations

import ast
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from v41.errors import PlanUnreadable, RunNotWritten, RunUnreadable
from v41.model_def.config import V41Config
from v41.model_def.errors import ModelError
from v41.plan import Piece, Plan
from v41.regions import Region
from v41.report import Change, CompileReport, Decision
from v41.tools.expected import regions_values
from v41.tools.inspect import LayerView, role
from v41.tools.json_output import schema
from v41.tools.kernels import KernelFacts, LaunchFacts
from v41.tools.nodes import NodeFacts, WorkFacts
from v41.tools.report_view import as_json, pass_values
from v41.tools.run import Run
from v41.tools.saved_passes import run_from
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
    PlanUnreadable,
    ModelError,
)
MAIN = "run.json"


def save(run: Run, folder: Path) -> None:
    """Writes `run`. RunNotWritten where `folder` is there and holds something else, or cannot be written."""
    if folder.exists() and not (folder / MAIN).is_file():
        raise RunNotWritten(folder, problem="it is there and holds no run")
    config = run.config.to_json() if run.config is not None else None
    files = {
        MAIN: run_values(run),
        "plan.json": {"schema": SCHEMA, "plan": json.loads(run.plan.to_json())},
        "nodes.json": {"schema": SCHEMA, **node_values(run.nodes)},
        "work.json": {"schema": SCHEMA, "work": [asdict(each) for each in run.work]},
        "kernels.json": {"schema": SCHEMA, "kernels": [asdict(each) for each in run.kernels]},
    }
    if run.changes is not None:
        told = {name: [asdict(each) for each in of_pass] for name, of_pass in run.changes.items()}
        files["changes.json"] = {"schema": SCHEMA, "changes": told}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for name, facts in files.items():
                (made / name).write_text(json.dumps(facts, indent=1))
            if config is not None:
                (made / "config.json").write_text(json.dumps(config, indent=1))
            made.chmod(0o755)
            _into_place(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise RunNotWritten(folder, problem=f"{type(error).__name__}: {error}") from error


def _into_place(made: Path, folder: Path) -> None:
    """`made` as `folder`, whose old run goes once the new one is there."""
    old = made.with_name(made.name + ".old")
    try:
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
    except BaseException:  # Ctrl-C as well
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file, or leaves it as it was. RunNotWritten where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            (made / path.name).write_text(text)
            (made / path.name).replace(path)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise RunNotWritten(path, problem=f"{type(error).__name__}: {error}") from error


def run_values(run: Run) -> dict[str, Any]:
    """The facts of `v41 inspect --json`, less what the other files hold."""
    (graph,) = as_json([run.report])
    graph["passes"] = [{name: v for name, v in pass_values(each).items() if name != "changes"}
                       for each in run.report.passes]  # fmt: skip
    regions = regions_values(run.report.passes, run.by_config)
    return {
        "schema": SCHEMA,
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
                {"node": d.node, "rule": d.rule, "culprit": d.culprit, "source": d.source} for d in view.refused
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
        plan: Plan = _read(folder / "plan.json", lambda facts: Plan.from_json(json.dumps(facts["plan"])))
        path = folder / "config.json"
        config = V41Config.from_json(path) if path.is_file() else None
        report = report_from(facts["graph"], plan)
        views = [layer_from(each, report, plan) for each in facts["layers"]]
        numbers = {name: float(facts[name]) for name in ("cpu_seconds", "peak_mib")}
        texts = {name: _texts(facts[name]) for name in ("versions", "parameters")}
        seconds = {str(name): float(value) for name, value in facts["seconds"].items()}
        return Run(str(facts["source"]), texts["versions"], config, report, views, texts["parameters"], seconds,
                   **numbers, parts=parts)  # fmt: skip

    parts: dict[str, Callable[[], Any]] = {
        "changes": lambda: _read(folder / "changes.json", changes_from) if (folder / "changes.json").exists() else None,
        "nodes": lambda: _read(folder / "nodes.json", nodes_from),
        "work": lambda: _read(folder / "work.json", lambda facts: [_made(WorkFacts, each) for each in facts["work"]]),
        "kernels": lambda: _read(folder / "kernels.json", lambda facts: [kernel_from(k) for k in facts["kernels"]]),
    }
    run: Run = _read(folder / MAIN, made)
    return run


def _read(path: Path, made: Callable[[dict[str, Any]], Any]) -> Any:
    """What `made` makes of the facts in a file of this schema."""
    try:
        facts = json.loads(path.read_text())
        if facts["schema"] != SCHEMA:
            raise ValueError(f"its schema is {facts['schema']!r}, and this v41 reads {SCHEMA!r}")
        return made(facts)
    except FAULTS as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise RunUnreadable(path, reason=f"{type(error).__name__}: {first}") from error


def report_from(graph: dict[str, Any], plan: Plan) -> CompileReport:
    options = {str(name): (each["value"], str(each["set_by"])) for name, each in graph["options"].items()}
    return CompileReport(
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


def layer_from(facts: dict[str, Any], report: CompileReport, plan: Plan) -> LayerView:
    pieces = {piece.name: piece for piece in plan.pieces}
    refused: dict[str, Decision] = {d.node: d for run in report.passes for d in run.decisions if not d.applied}
    layer = facts["layer"]
    return LayerView(
        None if layer is None else int(layer),
        [Region(str(each["kind"]), {name: literal(value) for name, value in each["attrs"].items()})
         for each in facts["regions"]],
        [refused[each["node"]] for each in facts["refused"]],
        [pieces[each["name"]] for each in facts["pieces"]],
    )  # fmt: skip


def literal(text: str) -> object:
    """A number, tuple or dict that was spelled as Python spells it; the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return str(text)


def changes_from(facts: dict[str, Any]) -> dict[str, list[Change]]:
    return {str(name): [_made(Change, each) for each in changes] for name, changes in facts["changes"].items()}


def nodes_from(facts: dict[str, Any]) -> list[NodeFacts]:
    lines = facts["lines"]
    return [_made(NodeFacts, each | {"source": lines[each["source"]], "path": [lines[line] for line in each["path"]]})
            for each in facts["nodes"]]  # fmt: skip


def kernel_from(facts: dict[str, Any]) -> KernelFacts:
    made: KernelFacts = _made(KernelFacts, facts | {"launches": [_made(LaunchFacts, e) for e in facts["launches"]]})
    return made


def _made(kind: Any, facts: dict[str, Any]) -> Any:
    """A dataclass of exactly these fields, lists as the tuples they were. KeyError where one is missing."""
    values = {field.name: facts[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in facts.items()}
