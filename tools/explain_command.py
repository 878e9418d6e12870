"""`v41 explain NODE`: where a node comes from, what passes made of it, where it lies now and what runs it.

    add_41  in mhc_boundary_3, region mhc_boundary seam
      model   model_def/model.py:91  X, x, A, C, B = boundary(X, y, C, B, A, layer.attn_mix)
              model_def/mhc.py:66    m = m / (m.sum(-1, keepdim=True) + eps)           layers.1.attn
      is      aten.add.Tensor(sum_9, 1e-06)  f32[u0, 4, 1]
      passes  fold_sinkhorn  moved it into sinkhorn_3
              outline_mhc    moved it into mhc_boundary_3
      piece   piece_8, of layer 1: begins at region mhc_boundary; artifact f09f7f0f, which 2 pieces share
      runs    kernel mhc_boundary_3fa2b1c7 on a GPU

NODE is a node, BODY/NODE where bodies share names, a region or another body (mhc_boundary_3), a piece, an input, or a
line of the model (mhc.py:66), which lists what came of it. Of a node that is gone it says which pass took it away.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from v41.errors import UnknownNode
from v41.plan import Piece
from v41.report import Change
from v41.tools.json_output import print_json
from v41.tools.nearest import choices
from v41.tools.nodes import NodeFacts
from v41.tools.pass_runs import console_of
from v41.tools.run import Run
from v41.tools.sources import run_named

LISTED = 6  # nodes of one name that are told


@dataclass(frozen=True)
class Story:
    """Of one node, body, piece or line: a title, and what is known of it, as labels with lines."""

    title: str
    facts: dict[str, list[str]]


def explain_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    run = run_named(arguments, console, changes=True)
    stories = explain(run, arguments.name)
    if arguments.json:
        print_json("explain", {"source": run.source, "name": arguments.name, "found": [asdict(s) for s in stories]})
    else:
        for line in lines(stories):
            console.print(Text(line), soft_wrap=True)
    return 0


def lines(stories: Sequence[Story]) -> Iterator[str]:
    for story in stories[:LISTED]:
        yield story.title
        for label, told in story.facts.items():
            for number, line in enumerate(told):
                yield f"  {label if number == 0 else '':7} {line}"
    if len(stories) > LISTED:
        yield f"and {len(stories) - LISTED} more: name one as BODY/NODE"


def explain(run: Run, name: str) -> list[Story]:
    """What goes by that name. UnknownNode says what may have been meant."""
    body, _, short = name.rpartition("/")
    nodes = {(node.body, node.name): node for node in reversed(run.nodes) if node.name == short}  # copies are one
    found = [of_node(run, node) for node in reversed(nodes.values()) if not body or node.body == body]
    found += [of_piece(run, piece) for piece in run.plan.pieces if piece.name == name]
    inside = [node for node in run.nodes if node.body == name]
    found += [of_body(run, name, inside)] if inside else []
    found += [of_input(run, each) for each, called in run.parameters.items() if name in (each, called)]
    if not found:
        found += of_gone(run, short)
    if not found and re.search(r":\d+$", name):
        found += of_line(run, name)
    if not found:
        names = {node.name for node in run.nodes} | {node.body for node in run.nodes if node.body}
        names |= {piece.name for piece in run.plan.pieces} | set(run.parameters.values())
        raise UnknownNode("v41 explain", name=name, known=choices(name, sorted(names)))
    return found


def of_node(run: Run, node: NodeFacts) -> Story:
    where = f"  in {node.body}" if node.body else ""
    region = f", region {node.region}" if node.region else ""
    facts = {
        "model": [*(node.path or (node.source,))],
        "module": [node.module] if node.module else [],
        "is": [node.text],
        "read by": [", ".join(readers(run, node)) or "what is outside"],
        "passes": [f"{name}  {said(change)}" for name, change in lineage(run, node.name, node.body)]
        or ["none touched it" if run.changes is not None else "not kept in this run"],
        **placed(run, node.piece),
    }
    return Story(f"{node.name}{where}{region}", {label: told for label, told in facts.items() if told})


def readers(run: Run, node: NodeFacts) -> list[str]:
    """Nodes of the same body that read it."""
    mention = re.compile(rf"\b{re.escape(node.name)}\b")
    near = (each for each in run.nodes if each.body == node.body)
    return [*dict.fromkeys(each.name for each in near if mention.search(each.text.partition("(")[2]))]


def lineage(run: Run, name: str, body: str) -> list[tuple[str, Change]]:
    """What each pass did to the node that lies in `body` now, in order; also before it was moved there."""
    body = body.partition("~")[0]  # passes know a body by the name that its owner has for it
    every = [(of_pass, change) for of_pass, changes in (run.changes or {}).items() for change in changes]
    found = [(of_pass, change) for of_pass, change in every if change.node == name]
    was_outside = any(change.kind == "moved" and change.body == body for _, change in found)
    return [each for each in found if each[1].body == body or (was_outside and not each[1].body)]


def said(change: Change) -> str:
    match change.kind:
        case "moved":
            return f"moved it into {change.body}"
        case "added":
            return f"made it{f' in {change.body}' if change.body else ''}: {change.after}"
        case "removed":
            return f"took it away: it was {change.before}"
        case _:
            return f"has it read something else: {change.before} -> {change.after}"


def placed(run: Run, piece: str) -> dict[str, list[str]]:
    """The piece, and what runs it."""
    found = next(each for each in run.plan.pieces if each.name == piece)
    layer, shared = run.layer_of.get(piece), run.plan.keys[found.key]
    of_layer = f", of layer {layer}" if layer is not None else ""
    others = f", which {len(shared)} pieces share" if len(shared) > 1 else ""
    return {
        "piece": [f"{piece}{of_layer}: begins at {found.border}; artifact {found.key[:8]}{others}"],
        "runs": [runs(run, found)],
    }


def runs(run: Run, piece: Piece) -> str:
    if run.codegen == "eager":
        return "its ATen nodes, one by one"
    kernel = next((each for each in run.kernels if piece.name in each.pieces), None)
    if kernel is None:
        return "through Inductor on a GPU, as ATen nodes on a CPU"
    if kernel.refusal is not None:
        return f"through Inductor on a GPU: no kernel is generated, since {kernel.refusal}"
    return f"kernel {kernel.name} on a GPU (v41 kernels --show {kernel.name}), as ATen nodes on a CPU"


def of_piece(run: Run, piece: Piece) -> Story:
    plan = run.plan
    kinds = Counter(node.region for node in run.nodes if node.piece == piece.name and not node.body and node.region)
    facts = {
        "begins": [f"at {piece.border}: {piece.source}"],
        "holds": [f"{piece.nodes} nodes" + "".join(f", {n} x {kind}" for kind, n in kinds.items())],
        "sizes": [", ".join(plan.names_of(piece)) or "none"],
        "reads": _valued(run, piece.reads),
        "writes": _valued(run, piece.writes),
        "returns": _valued(run, piece.returns),
        "frees": [", ".join(piece.frees)] if piece.frees else [],
        "capture": [piece.uncapturable or "in a CUDA graph"],
        **placed(run, piece.name),
    }
    return Story(piece.name, {label: told for label, told in facts.items() if told})


def _valued(run: Run, names: Sequence[str]) -> list[str]:
    called = ((name, run.parameters.get(name)) for name in names)
    return [f"{name}  {run.plan.values[name]}{f'  {told}' if told else ''}" for name, told in called]


def of_body(run: Run, name: str, inside: Sequence[NodeFacts]) -> Story:
    """A region, or a body that layers share."""
    calls = [node for node in run.nodes if re.match(rf"(?:region|subgraph) {re.escape(name)}\(", node.text)]
    call = next(iter(calls), None)
    decided = [(each.name, decision) for each in run.report.passes for decision in each.decisions
               if call is not None and decision.applied and decision.node == call.name]  # fmt: skip
    attrs = [f"{key} = {value}" for _, decision in decided if decision.region is not None
             for key, value in decision.region.attrs.items()]  # fmt: skip
    facts = {
        "made by": [f"{of_pass}, at {decision.source}" for of_pass, decision in decided],
        "called": [f"{node.name} in {node.piece}" for node in calls],
        "is": attrs,
        "holds": [f"{count:4} nodes of {line}" for line, count in Counter(n.source for n in inside).most_common()],
        **(placed(run, call.piece) if call is not None else {}),
    }
    kind = f"  region {call.region}" if call is not None and call.region else ""
    return Story(f"{name}{kind}", {label: told for label, told in facts.items() if told})


def of_input(run: Run, name: str) -> Story:
    plan = run.plan
    buffer = plan.buffers.get(name)
    facts = {
        "is": [plan.values[name]],
        "memory": [f"of the {buffer.owner}, {buffer.bytes} bytes"] if buffer is not None else [],
        "read by": [", ".join(piece.name for piece in plan.pieces if name in piece.reads) or "nobody"],
        "written": [", ".join(piece.name for piece in plan.pieces if name in piece.writes)],
    }
    return Story(f"{name}  input {run.parameters[name]}", {label: told for label, told in facts.items() if any(told)})


def of_gone(run: Run, name: str) -> list[Story]:
    """A node that some pass removed: what it was, and who read it then and what they read now."""
    stories = []
    for of_pass, changes in (run.changes or {}).items():
        for change in changes:
            if change.node == name and change.kind == "removed":
                mention = re.compile(rf"\b{re.escape(name)}\b")
                now = [f"{each.node} = {each.after}" for each in changes
                       if each.kind == "rewired" and each.before and mention.search(each.before)]  # fmt: skip
                facts = {"model": [change.source], "was": [str(change.before)], "gone": [f"taken away by {of_pass}"],
                         "instead": now}  # fmt: skip
                stories.append(Story(f"{name}  is gone", {label: told for label, told in facts.items() if told}))
    return stories


def of_line(run: Run, name: str) -> list[Story]:
    """What came of a line of the model: nodes, by body."""
    nodes = (node for node in run.nodes if not node.text.startswith(("region ", "subgraph ")))
    found = [node for node in nodes if any(_is_line(line, name) for line in node.path)]
    if not found:
        return []
    where = Counter((node.body or node.piece, node.region) for node in found)
    told = [f"{count:4} nodes in {body}{f', region {region}' if region else ''}"
            for (body, region), count in where.items()]  # fmt: skip
    line = next(line for node in found for line in node.path if _is_line(line, name))
    names = ", ".join(f"{node.body}/{node.name}" if node.body else node.name for node in found[:LISTED])
    return [Story(line, {"became": told, "such as": [names]})]


def _is_line(line: str, name: str) -> bool:
    place = line.partition("  ")[0]  # "model_def/mhc.py:66"
    return place == name or place.endswith("/" + name)
