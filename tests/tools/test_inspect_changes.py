"""Two inspections differ where the compiler found or did something else, and in no name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from v41.tools import inspect_command
from v41.tools.cli import main
from v41.tools.inspect_changes import changes

RULE = "the streams are collapsed once, for one norm"


def views() -> list[dict[str, Any]]:
    """What --json says of the ends and of two layers."""

    def region(eps: float) -> dict[str, Any]:
        return {"kind": "mhc_boundary", "attrs": {"eps": str(eps), "streams": "4"}}

    def view(layer: int | None) -> dict[str, Any]:
        return {
            "layer": layer,
            "role": "window" if layer is not None else None,
            "pieces": [
                {"name": f"piece_{layer}_{i}", "key": key, "nodes": 9, "reads": ["own 0.0", "w"], "writes": []}
                for i, key in enumerate("abb")
            ],
            "regions": [region(1e-6), region(1e-6)] if layer is not None else [],
            "refused": [],
        }

    return [view(None), view(0), view(1)]


def refusal(node: str) -> dict[str, str]:
    return {"node": node, "rule": RULE, "culprit": f"sum_of_{node}", "source": "model_def/mhc.py:67  sum(1)"}


def test_names_of_nodes_and_pieces_are_no_difference() -> None:
    before, after = views(), views()
    before[2]["refused"], after[2]["refused"] = [refusal("mul_7")], [refusal("mul_8")]
    after[1]["pieces"][0]["name"] = "piece_9"
    assert changes(before, after) == []


def test_each_difference_is_told_once_in_its_layer() -> None:
    before, after = views(), views()
    after[0]["pieces"][2]["key"] = "c"
    after[1]["regions"][1]["attrs"] = {"eps": "0.5", "norm": "True"}
    after[2]["role"] = "ratio 1"
    assert changes(before, after) == [
        (None, "1 of 3 pieces became 1 other"),
        (0, "mhc_boundary 2 of 2: eps 1e-06 -> 0.5"),
        (0, "mhc_boundary 2 of 2: streams 4 -> -"),
        (0, "mhc_boundary 2 of 2: norm - -> True"),
        (1, "role: window -> ratio 1"),
    ]


def test_other_wires_and_another_order_of_the_same_pieces_are_told() -> None:
    before, after = views(), views()
    after[1]["pieces"][1]["reads"] = ["own 0.1", "w"]
    after[1]["pieces"][2]["writes"] = ["w"]
    after[2]["pieces"].reverse()
    assert changes(before, after) == [
        (0, "piece 2 of 3: reads own 0.0 -> own 0.1"),
        (0, "piece 3 of 3: writes - -> w"),
        (1, "the 3 pieces come in another order"),
    ]


def test_a_refusal_is_told_with_its_rule_and_line_both_ways() -> None:
    before, after = views(), views()
    after[2]["regions"].pop()
    after[2]["refused"] = [refusal("mul_7")]
    line = f'"{RULE}"  model_def/mhc.py:67  sum(1)'
    lost, back = "mhc_boundary, mhc_boundary -> mhc_boundary", "mhc_boundary -> mhc_boundary, mhc_boundary"
    assert changes(before, after) == [(1, f"regions: {lost}"), (1, f"newly refused: {line}")]
    assert changes(after, before) == [(1, f"regions: {back}"), (1, f"no longer refused: {line}")]


def test_a_layer_of_one_of_them_alone_is_told() -> None:
    assert changes(views()[:2], views()) == changes(views(), views()[:2]) == [(1, "is in one of them alone")]


def test_the_command_compares_with_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capture is stood in for: what is read, printed and returned is under test."""
    now, saved = views(), tmp_path / "saved.json"
    saved.write_text(json.dumps({"layers": copy.deepcopy(now)}))
    monkeypatch.setattr(inspect_command, "run_named", lambda *_, **__: None)
    monkeypatch.setattr(inspect_command, "layer_values", lambda run: now)
    assert main(["inspect", "--against", str(saved)]) == 0
    assert capsys.readouterr().out == "nothing differs\n"
    now[2]["regions"][0]["attrs"]["eps"] = "0.5"
    assert main(["inspect", "--against", str(saved)]) == 1
    assert capsys.readouterr().out == "layer 1   mhc_boundary 1 of 2: eps 1e-06 -> 0.5\n"


DAMAGED = {
    "no file": None,
    "empty": "",
    "a list": "[]",
    "no layers": "{}",
    "a number": '{"layers": 5}',
    "null": '{"layers": null}',
    "numbers": '{"layers": [1]}',
    "a word": '{"layers": "abc"}',
    "an empty layer": '{"layers": [{}]}',
    "deep": "[" * 200_000,
    "null inside": json.dumps({"layers": [views()[1] | {"regions": None}]}),
    "an empty piece": json.dumps({"layers": [views()[1] | {"pieces": [{}]}]}),
    "a layer by name": json.dumps({"layers": [views()[1] | {"layer": "first"}]}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_file_without_an_inspection_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    if text is not None:
        saved.write_text(text)
    assert main(["inspect", "--against", str(saved)]) == 2
    told = capsys.readouterr().err
    assert str(saved) in told and "v41 inspect --preset NAME --json" in told
