"""A node is told from its line of the model to what runs it, under every name it goes by; others are answered."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.small_models import run_of_balanced, run_of_routed
from v41.errors import AmbiguousNode, UnknownNode
from v41.report import Change
from v41.tools.cli import main
from v41.tools.explain_command import Story, explain, lineage, lines, said
from v41.tools.identity import Names
from v41.tools.kernels import KernelFacts
from v41.tools.nodes import NodeFacts
from v41.tools.run import Run
from v41.tools.run_folder import load, save


def story(name: str, run: Run | None = None) -> Story:
    (found,) = explain(run or run_of_balanced(), name)
    return found


def at(name: str, body: str) -> NodeFacts:
    return NodeFacts(name, body, "piece_0", f"{name}()", "m.py:1", (), None, None, (body, name))


def inside() -> NodeFacts:
    """A division of the second loop."""
    return next(node for node in run_of_balanced().nodes if node.body == "sinkhorn_1" and "div" in node.text)


def test_a_node_of_a_region_is_told_from_its_line_to_what_runs_it() -> None:
    node = inside()
    told = story(node.name)
    assert told.title == f"sinkhorn_1/{node.name}, region sinkhorn"
    assert told.facts["model"][-1].endswith("m = m / (m.sum(-1 - turn % 2, keepdim=True) + eps)")
    assert told.facts["passes"] == ["fold_sinkhorn  moved it into sinkhorn_1"]
    assert re.match(r"piece_1, of layer 1: begins at end of checks of sizes; artifact \w{8}$", told.facts["piece"][0])
    assert told.facts["is"] == [node.text] and told.facts["runs"][0].startswith("through Inductor on a GPU")


def test_readers_are_those_that_name_it() -> None:
    run = run_of_balanced()
    for node in run.nodes:
        told = story(node.identity, run).facts["read by"][0]
        wanted = [
            each.name for each in run.nodes
            if each.body == node.body and node.name in re.findall(r"\w+", each.text.partition("(")[2])
        ]  # fmt: skip
        assert told == (", ".join(wanted) or "what is outside")


def test_a_region_is_told_with_its_pass_attributes_and_lines() -> None:
    told = story("sinkhorn_0")
    assert told.title == "sinkhorn_0  region sinkhorn"
    assert told.facts["made by"][0].startswith("fold_sinkhorn, at tools/small_models.py:")
    assert told.facts["is"] == ["first_axis = -1", "steps = 3", "eps = 1e-06"]
    assert told.facts["holds"][0].startswith("   9 nodes of tools/small_models.py:")
    assert told.facts["called"] == ["invoke_subgraph in piece_1"]


def test_a_name_of_several_nodes_is_answered_with_what_tells_them_apart() -> None:
    run = run_of_routed("eager")
    names = Names(run.nodes)
    name, same = next((name, same) for name, same in names.by_name.items() if len(same) > 1)
    with pytest.raises(AmbiguousNode) as refusal:
        explain(run, name)
    for node in same:
        assert f"{node.identity} " in str(refusal.value) and node.source in str(refusal.value)
        told = story(node.identity, run)
        assert told.title.startswith(node.identity.removeprefix("/")) and told.facts["is"] == [node.text]
    (alone,) = next(same for same in names.by_name.values() if len(same) == 1)
    assert story(alone.name, run) == story(alone.identity, run)


def test_a_node_of_the_program_goes_by_its_piece_too() -> None:
    run = run_of_routed("eager")
    (cat,) = [node for node in run.nodes if node.name == "cat"]
    assert story(f"{cat.piece}/cat", run) == story("/cat", run) == story("cat", run)
    with pytest.raises(UnknownNode, match="/cat, the nearest"):
        explain(run, "/catt")
    with pytest.raises(UnknownNode):
        explain(run, "piece_99/cat")


def test_of_a_body_that_is_called_often_every_piece_is_told() -> None:
    """The first piece calls one of two regions that share a loop, the second piece the other, which has a kernel."""

    def node(name: str, body: str, piece: str, text: str) -> NodeFacts:
        return NodeFacts(name, body, piece, text, "m.py:1", (), None, None, (body, name))

    nodes = [
        node("div", "loop_0", "piece_0", "aten.div(x)"), node("call", "left_0", "piece_0", "region loop_0(x)"),
        node("one", "", "piece_0", "region left_0(x)"), node("call", "right_0", "piece_1", "region loop_0(x)"),
        node("two", "", "piece_1", "region right_0(x)"),
    ]  # fmt: skip
    kernel = KernelFacts("right_0ab1", ("right",), ("piece_1",), "", ())
    parts = {**run_of_balanced().parts, "nodes": lambda: nodes, "kernels": lambda: [kernel]}
    run = replace(run_of_balanced(), parts=parts)
    told = story("div", run).facts
    assert [line.split(",")[0] for line in told["piece"]] == ["piece_0", "piece_1"]
    inductor, own = told["runs"]
    assert inductor.startswith("piece_0: through Inductor") and own.startswith("piece_1: kernel right_0ab1 on a GPU")
    assert story("loop_0", run).facts["called"] == ["call in left_0", "call in right_0"]


def test_a_piece_and_an_input_are_told() -> None:
    piece = story("piece_1")
    assert piece.facts["holds"] == ["18 nodes, 2 x sinkhorn"] and piece.facts["sizes"] == ["rows"]
    assert piece.facts["returns"] == ["sum_8  f32[u0, 8]"]
    (weight,) = [each for each, name in run_of_balanced().parameters.items() if name == "layers.1.weight"]
    for name in ("layers.1.weight", weight):
        told = story(name)
        assert told.facts == {"is": ["f32[8, 8]"], "memory": ["of the caller, 256 bytes"], "read by": ["piece_1"]}


def test_a_line_of_the_model_lists_what_came_of_it() -> None:
    line = inside().source.partition("  ")[0]
    for name in (line, line.partition("/")[2]):
        told = story(name)
        assert told.facts["became"] == [f"   9 nodes in sinkhorn_{i}, region sinkhorn" for i in (0, 1)]
    with pytest.raises(UnknownNode):
        explain(run_of_balanced(), line.partition("/")[2][1:])  # models.py:29 is another file


def test_a_node_that_is_gone_is_told_with_what_is_there_instead() -> None:
    changes = [
        Change("rewired", "add_1", "aten.add.Tensor(old, 1)", "aten.add.Tensor(new, 1)", "m.py:2"),
        Change("removed", "old", "aten.view.default(x, [8])", None, "m.py:1  x.view(8)"),
    ]
    run = replace(run_of_balanced(), parts={**run_of_balanced().parts, "changes": lambda: {"tidy": changes}})
    assert list(lines([story("old", run)])) == [
        "old  is gone",
        "  model    m.py:1  x.view(8)",
        "  was      aten.view.default(x, [8])",
        "  gone     taken away by tidy",
        "  instead  add_1 = aten.add.Tensor(new, 1)",
    ]


def test_what_a_pass_did_is_said() -> None:
    assert said(Change("added", "a", None, "f(x)", "m.py:1")) == "made it: f(x)"
    assert said(Change("rewired", "a", "f(x)", "f(y)", "m.py:1")) == "has it read something else: f(x) -> f(y)"
    assert lineage(run_of_balanced(), at("no_such", "")) == []


def test_a_lineage_is_of_the_node_in_its_body_and_of_no_namesake() -> None:
    made = Change("added", "mul", None, "aten.mul.Tensor(x, 2)", "m.py:1")
    changed = Change("rewired", "mul", "aten.mul.Tensor(x, 2)", "aten.mul.Tensor(y, 2)", "m.py:1")
    moved = Change("moved", "mul", "aten.mul.Tensor(y, 2)", "aten.mul.Tensor(y, 2)", "m.py:1", "region_0")
    other = Change("added", "mul", None, "aten.mul.Tensor(z, 3)", "m.py:9", "shared_0")
    changes = {"tidy": [made, other], "fold": [changed], "outline": [moved]}
    run = replace(run_of_balanced(), parts={**run_of_balanced().parts, "changes": lambda: changes})
    assert lineage(run, at("mul", "region_0")) == [("tidy", made), ("fold", changed), ("outline", moved)]
    assert lineage(run, at("mul", "shared_0")) == [("tidy", other)]
    assert lineage(run, at("mul", "")) == [("tidy", made), ("fold", changed)]
    opened = replace(at("mul_7", ""), origin=("shared_0", "mul"))
    assert lineage(run, opened) == [("tidy", other)]


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNode, match=r"sinkhorn_[01], the nearest"):
        explain(run_of_balanced(), "sinkhorn_2")


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_of_balanced(), tmp_path / "run")
    name = inside().name
    assert main(["explain", name, "-m", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines() == list(lines(explain(load(tmp_path / "run"), name)))
    assert main(["explain", name, "-m", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "v41.explain.1" and told["found"][0]["title"].startswith(f"sinkhorn_1/{name}")
    assert main(["explain", "no_such_node", "-m", str(tmp_path / "run")]) == 2
    assert "no node, region, piece or line" in capsys.readouterr().err


def test_partition_tells_every_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_of_balanced(), tmp_path / "run")
    assert main(["partition", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["piece", "layer", "artifact", "sizes", "capture", "begins", "nodes", "in", "out"]
    keys = [piece.key[:8] for piece in run_of_balanced().plan.pieces]
    assert out[1].split() == f"piece_0 0 {keys[0]} rows yes checks of sizes 4 0 2".split()
    assert out[2].split() == f"piece_1 1 {keys[1]} rows yes end of checks of sizes 18 2 1".split()
    assert out[3] == "2 pieces, 2 artifacts, 22 nodes"
    assert main(["partition", str(tmp_path / "run"), "--json", "--strict"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["borders"] == {"checks of sizes": 1, "end of checks of sizes": 1}
    assert told["layers"] == {"piece_0": 0, "piece_1": 1} and len(told["plan"]["pieces"]) == 2
