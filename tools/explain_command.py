"""`v41 explain NODE`: where a node comes from, what passes made of it, where it lies now and what runs it.

    mhc_boundary_3/add_41, region mhc_boundary seam
      model   model_def/model.py:91  X, x, A, C, B = boundary(X, y, C, B, A, layer.attn_mix)
              model_def/mhc.py:66    m = m / (m.sum(-1, keepdim=True) + eps)           layers.1.attn
      is      aten.add.Tensor(sum_9, 1e-06)  f32[u0, 4, 1]
      passes  fold_sinkhorn  moved it into sinkhorn_3
              outline_mhc    moved it into mhc_boundary_3
      piece   piece_8 and 3 more, of layers 1, 2: begin at region mhc_boundary; artifact f09f7f0f
      runs    kernel mhc_boundary_3fa2b1c7 on a GPU

NODE is a node, a region or another body (mhc_boundary_3), a piece, an input, or a line of the model (mhc.py:66), which
lists what came of it. A node is BODY/NODE, PIECE/NODE, or /NODE in the program itself (identity.py); its bare name will
do where no other node has it, else all of that name are listed. Of a node that is gone it says which pass took it away.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from v41.errors import AmbiguousNode, UnknownNode
from v41.plan import Piece
from v41.report import Change
from v41.tools.identity import Names
from v41.tools.json_output import print_json
from v41.tools.nearest import choices
from v41.tools.nodes import NodeFacts
from v41.tools.pass_runs import console_of, told_by
from v41.tools.run import Run
from v41.tools.sources import run_named
from v41.tools.tables import counted, say

LISTED = 12  # nodes of one name, or calls of one body, that are told


@dataclass(frozen=True)
class Story:
    """Of one node, body, piece or line: a title, and what is known of it, as labels with lines."""

    title: str
    facts: dict[str, list[str]]


def explain_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    run = run_named(arguments, changes=True)
    stories = explain(run, arguments.name)
    if arguments.json:
        print_json("explain", {"source": run.source, "name": arguments.name, "found": [asdict(s) for s in stories]})
    else:
        for line in lines(stories):
            say(console, line)
    return int(arguments.strict and told_by(run).troubled)


def lines(stories: Sequence[Story]) -> Iterator[str]:
    for story in stories:
        yield story.title
        for label, told in story.facts.items():
            for number, line in enumerate(told):
                yield f"  {label if number == 0 else '':7}  {line}"


def explain(run: Run, name: str) -> list[Story]:
    """What goes by that name: one node, or something of another kind. AmbiguousNode lists the nodes that it may be,
    UnknownNode says what may have been meant."""
    names = Names(run.nodes)
    found = [of_piece(run, piece) for piece in run.plan.pieces if piece.name == name]
    found += [of_body(run, names, name)] if name in names.by_body else []
    found += [of_input(run, each) for each, called in run.parameters.items() if name in (each, called)]
    nodes = names.of(name)
    if len(nodes) > 1 or (nodes and found):
        raise AmbiguousNode("v41 explain", name=name, count=len(nodes), candidates=candidates(nodes))
    found += [of_node(run, names, node) for node in nodes]
    if not found:
        found += of_gone(run, name)
    if not found and re.search(r":\d+$", name):
        found += of_line(run, name)
    if not found:
        known = {*names.by_name, *names.by_body, *run.parameters.values()} | {each.name for each in run.plan.pieces}
        known = {node.identity for node in run.nodes} if "/" in name else known
        known = {each for each in known if not each.rpartition("/")[2].startswith("_")}  # torch's own
        raise UnknownNode("v41 explain", name=name, known=choices(name, sorted(known)))
    return found


def candidates(nodes: Sequence[NodeFacts]) -> str:
    """A line each: what it is called and no other is, and where it comes from."""
    width = max(len(node.identity) for node in nodes)
    more = [f"       and {len(nodes) - LISTED} more"] * (len(nodes) > LISTED)
    return "\n".join([f"       {node.identity:{width}}  {node.source}" for node in nodes[:LISTED]] + more)


def of_node(run: Run, names: Names, node: NodeFacts) -> Story:
    region = f", region {node.region}" if node.region else ""
    facts = {
        "model": [*(node.path or (node.source,))],
        "module": [node.module] if node.module else [],
        "is": [node.text],
        "read by": [", ".join(readers(names, node)) or "what is outside"],
        "passes": [f"{name}  {said(change)}" for name, change in lineage(run, node)]
        or ["none touched it" if run.changes is not None else "not kept in this run"],
        **placed(run, names.pieces(node)),
    }
    title = node.identity if node.body else node.name
    return Story(f"{title}{region}", {label: told for label, told in facts.items() if told})


def readers(names: Names, node: NodeFacts) -> list[str]:
    """Nodes of the same body that read it."""
    mention = re.compile(rf"\b{re.escape(node.name)}\b")
    near = names.by_body[node.body] if node.body else [each for each in names.nodes if not each.body]
    return [*dict.fromkeys(each.name for each in near if mention.search(each.text.partition("(")[2]))]


def lineage(run: Run, node: NodeFacts) -> list[tuple[str, Change]]:
    """What each pass did to it, in order: read backwards from where the passes left it, out of each body that it was
    moved into, until the pass that made it."""
    body, name = node.origin
    found: list[tuple[str, Change]] = []
    for of_pass, changes in reversed((run.changes or {}).items()):
        for change in changes:
            if (change.body, change.node) == (body, name):
                found.append((of_pass, change))
                if change.kind == "added":
                    return found[::-1]
                if change.kind == "moved":
                    body = body.rpartition("/")[0]
                break
    return found[::-1]


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


def placed(run: Run, pieces: Sequence[str]) -> dict[str, list[str]]:
    """The pieces that hold it, those of one artifact together, and what runs them."""
    by_name = {piece.name: piece for piece in run.plan.pieces}
    alike: dict[str, list[Piece]] = {}
    for name in pieces:
        alike.setdefault(by_name[name].key, []).append(by_name[name])
    ways = [runs(run, same[0]) for same in alike.values()]
    several = len(set(ways)) > 1
    return {
        "piece": [_piece_line(run, same) for same in alike.values()],
        "runs": [f"{same[0].name}: {way}" for same, way in zip(alike.values(), ways, strict=True)]
        if several
        else ways[:1],
    }


def _piece_line(run: Run, same: Sequence[Piece]) -> str:
    first, count = same[0], len(run.plan.keys[same[0].key])
    numbers = dict.fromkeys(run.layer_of.get(piece.name) for piece in same)
    layers = [str(layer) for layer in numbers if layer is not None]
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    of_layer = f", of layer{'s' * (len(layers) > 1)} {', '.join(layers)}" if layers else ""
    others = f", which {count} pieces share" if count > len(same) else ""
    begin = "begins" if len(same) == 1 else "begin"
    return f"{first.name}{more}{of_layer}: {begin} at {first.border}; artifact {first.key[:8]}{others}"


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
        "holds": [counted(piece.nodes, "node") + "".join(f", {n} x {kind}" for kind, n in kinds.items())],
        "sizes": [", ".join(plan.names_of(piece)) or "none"],
        "reads": _valued(run, piece.reads),
        "writes": _valued(run, piece.writes),
        "returns": _valued(run, piece.returns),
        "frees": [", ".join(piece.frees)] if piece.frees else [],
        "capture": [piece.uncapturable or "in a CUDA graph"],
        **placed(run, [piece.name]),
    }
    return Story(piece.name, {label: told for label, told in facts.items() if told})


def _valued(run: Run, names: Sequence[str]) -> list[str]:
    called = ((name, run.parameters.get(name)) for name in names)
    return [f"{name}  {run.plan.values[name]}{f'  {told}' if told else ''}" for name, told in called]


def of_body(run: Run, names: Names, name: str) -> Story:
    """A region, or a body that layers share."""
    calls, inside = names.calls.get(name, []), names.by_body[name]
    made = dict.fromkeys(
        f"{of_pass}, at {call.source}"
        for call in calls for of_pass, change in lineage(run, call) if change.kind == "added"
    )  # fmt: skip
    lines_of = Counter(node.source for node in inside)
    where = [f"{call.name} in {call.body or call.piece}" for call in calls]
    facts = {
        "made by": [*made],
        "called": [*where[:LISTED], *[f"and {len(where) - LISTED} more"] * (len(where) > LISTED)],
        "is": [f"{key} = {value}" for call in calls[:1] for key, value in (call.attrs or {}).items()],
        "holds": [f"{counted(count, 'node', 4)} of {line}" for line, count in lines_of.most_common()],
        **placed(run, names.pieces_of(name)),
    }
    kind = f"  region {calls[0].region}" if calls and calls[0].region else ""
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
    """A node that some pass removed: what it was, and who read it then and what they read now. Of a bare name, all."""
    stories = []
    place, slash, short = name.rpartition("/")
    for of_pass, changes in (run.changes or {}).items():
        for change in changes:
            if change.node == short and change.kind == "removed" and (not slash or change.body == place):
                mention = re.compile(rf"\b{re.escape(short)}\b")
                now = [f"{each.node} = {each.after}" for each in changes
                       if each.kind == "rewired" and each.body == change.body
                       and each.before and mention.search(each.before)]  # fmt: skip
                facts = {"model": [change.source], "was": [str(change.before)], "gone": [f"taken away by {of_pass}"],
                         "instead": now}  # fmt: skip
                title = f"{change.body}/{short}" if change.body else short
                stories.append(Story(f"{title}  is gone", {label: told for label, told in facts.items() if told}))
    return stories


def of_line(run: Run, name: str) -> list[Story]:
    """What came of a line of the model: nodes, by body."""
    nodes = (node for node in run.nodes if not node.text.startswith(("region ", "subgraph ")))
    found = [node for node in nodes if any(_is_line(line, name) for line in node.path)]
    if not found:
        return []
    where = Counter((node.body or node.piece, node.region) for node in found)
    told = [f"{counted(count, 'node', 4)} in {body}{f', region {region}' if region else ''}"
            for (body, region), count in where.items()]  # fmt: skip
    line = next(line for node in found for line in node.path if _is_line(line, name))
    names = ", ".join(node.identity for node in found[:LISTED])
    return [Story(line, {"became": told, "such as": [names]})]


def _is_line(line: str, name: str) -> bool:
    place = line.partition("  ")[0]  # "model_def/mhc.py:66"
    return place == name or place.endswith("/" + name)
