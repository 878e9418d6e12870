"""The page and the graphs hold what the run holds, load nothing from anywhere, and take no text for markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.small_models import run_of_balanced
from v41.errors import UnknownNode
from v41.passes.pipeline import PIPELINE
from v41.tools.cli import main
from v41.tools.drawing import MOST, drawing
from v41.tools.graph_export import Key, dot, edges, key_of, model_explorer, unique
from v41.tools.html_page import bars, page
from v41.tools.nodes import NodeFacts
from v41.tools.run import Run
from v41.tools.run_folder import save
from v41.tools.steps import step_of_rows

HOSTILE = '</script><img src="http://example.org/x">&amp;{{ 7 * 7 }}'
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """What is in a page; fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in ("td", "th", "tr", "p", "option"):
            self.open.pop()  # these may stay open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str, name: str | None = None) -> int:
        return sum(each == tag and name in (None, attrs.get("class")) for each, attrs in self.tags)


def hostile() -> Run:
    """A run whose every text of the model is an attack."""
    run = run_of_balanced()
    nodes = [replace(node, source=HOSTILE, text=node.text + HOSTILE) for node in run.nodes]
    kept = (run.changes or {}).items()
    changes = {name: [replace(each, source=HOSTILE) for each in of_pass] for name, of_pass in kept}
    return replace(run, source=HOSTILE, parts={**run.parts, "nodes": lambda: nodes, "changes": lambda: changes})


@pytest.mark.parametrize("made", [run_of_balanced, hostile])
def test_the_page_is_whole_and_loads_nothing(made) -> None:  # type: ignore[no-untyped-def]
    found = Page(page(made()))
    assert found.open == [] and "img" not in dict(found.tags) and found.count("script") == 1
    loads = [(tag, name) for tag, attrs in found.tags for name in attrs if name in ("src", "href", "srcset", "action")]
    assert loads == [] and "default-src 'none'" in str(dict(found.tags[:4]).get("meta"))
    assert found.count("section", "pass") == len(PIPELINE) and found.count("details") == 3 + 2
    assert found.count("svg") == 1 + 1  # a region, and the one stream


def test_text_of_a_model_is_text() -> None:
    found = Page(page(hostile()))
    assert any(HOSTILE in text for text in found.texts) and "{{ 7 * 7 }}" in "".join(found.texts)


def test_slider_and_timeline_hold_what_the_run_holds() -> None:
    run = run_of_balanced()
    found = Page(page(run))
    (slider,) = [attrs for tag, attrs in found.tags if tag == "input"]
    assert slider["max"] == str(len(run.report.passes) - 1)
    step = step_of_rows(run.plan, None, 16)
    shares = [float(str(attrs["style"]).partition(": ")[2]) for tag, attrs in found.tags if tag == "i"]
    total = sum(bar["weight"] for bar in bars(run, step))
    assert shares == pytest.approx([1000 * bar["weight"] / total for bar in bars(run, step)])
    assert sum(shares) == pytest.approx(1000) and min(shares) > 0  # a line is filled by shares that add up to 1 or more


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_the_script_moves_between_passes_and_regions(tmp_path: Path) -> None:
    """Run with a stand-in for the page: what the slider points at is shown, the others are hidden."""
    script = re.search(r"<script>(.*)</script>", page(run_of_balanced()), re.DOTALL)
    assert script is not None
    (tmp_path / "page.js").write_text("""
        const made = { ".pass": [{}, {}, {}], ".drawing": [{}, {}] }, heard = {};
        const document = { querySelectorAll: (name) => made[name],
          getElementById: (id) => ({ addEventListener: (kind, does) => { heard[id] = does; } }) };
    """ + script[1] + """
        heard.pass({ target: { value: "2" } }); heard.region({ target: { selectedIndex: 1 } });
        console.log(JSON.stringify(Object.values(made).map((all) => all.map((each) => each.hidden))));
    """)  # fmt: skip
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert json.loads(done.stdout) == [[True, True, False], [True, False]], done.stderr


def test_edges_are_what_nodes_read() -> None:
    nodes = unique(run_of_balanced().nodes)
    assert len({key_of(node) for node in nodes}) == len(nodes)
    reads = edges(nodes)
    by_name = {node.name: node for node in nodes}
    assert reads[key_of(by_name["add"])] == [("", "unsqueeze"), ("", "unsqueeze_1")]
    (call,) = [node for node in nodes if node.text.startswith("region sinkhorn_0(")]
    assert reads[key_of(call)] == [("", "exp")]
    first = next(node for node in nodes if node.body == "sinkhorn_0")
    assert ("", "exp") in reads[key_of(first)]  # what the body takes goes by its name outside
    assert ("sinkhorn_0", "div_2") in reads[key_of(by_name["sum_4"])]  # and what it returns by the one inside


def test_dot_has_every_node_and_edge() -> None:
    run = run_of_balanced()
    text = dot(run)
    lines = [line for line in text.splitlines() if "[label=" not in line]
    told = {tuple(line.strip(" ;").split(" -> ")) for line in lines if " -> " in line}
    wanted = {(f'"{"/".join(a)}"', f'"{"/".join(b)}"') for b, each in edges(unique(run.nodes)).items() for a in each}
    assert told == wanted and text.count("[label=") == len(unique(run.nodes)) and text.count("{") == text.count("}")
    assert text.count('  subgraph "cluster') == 2 and dot(run, "sinkhorn_1").count("[label=") == 9
    with pytest.raises(UnknownNode, match="sinkhorn_"):
        dot(run, "sinkhorn_9")
    assert r"\"" in dot(hostile())


def test_model_explorer_gets_a_graph_that_holds_together() -> None:
    (graph,) = model_explorer(run_of_balanced())["graphs"]
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids) == len(unique(run_of_balanced().nodes))
    assert {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]} <= set(ids)
    assert {node["namespace"] for node in graph["nodes"]} >= {"layer 0/piece_0", "layer 1/piece_1/sinkhorn_0"}


def test_a_drawing_stands_what_is_read_above_who_reads() -> None:
    names = [f"n{i}" for i in range(MOST + 5)]
    texts = [f"aten.neg.default({names[max(i - 1, 0)]})  f32[<u0>]" for i in range(len(names))]
    lines = zip(names, texts, strict=True)
    nodes = [NodeFacts(n, "b", "piece_0", text, "<m>", (), None, None, ("b", n)) for n, text in lines]
    reads: dict[Key, list[Key]] = edges(nodes)
    found = ElementTree.fromstring(drawing(nodes, reads))
    assert len(found.findall("g")) == MOST and len(found.findall("path")) == MOST - 1
    heights = [int(box.attrib["y"]) for box in found.iter("rect")]
    assert heights == sorted(heights) and len(set(heights)) == MOST
    assert ElementTree.fromstring(drawing([], {})).attrib["viewBox"]


def test_the_command_writes_files_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_of_balanced(), tmp_path / "run")
    files = {name: tmp_path / "out" / f"graph.{name}" for name in ("html", "dot", "json")}
    options = ["--html", str(files["html"]), "--dot", str(files["dot"]), "--model-explorer", str(files["json"])]
    assert main(["inspect", str(tmp_path / "run"), *options]) == 0
    assert capsys.readouterr().err.split() == [word for path in files.values() for word in ("written", str(path))]
    assert Page(files["html"].read_text()).count("svg") == 2 and files["dot"].read_text() == dot(run_of_balanced())
    assert json.loads(files["json"].read_text()) == model_explorer(run_of_balanced())
    assert sorted((tmp_path / "out").iterdir()) == sorted(files.values())
    assert main(["inspect", str(tmp_path / "run"), "--html", str(tmp_path / "run" / "run.json" / "x")]) == 2
