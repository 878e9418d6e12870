"""The place nearest to a site is found in whatever lies around, with what is other there; else none is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.small_models import run_of_balanced, run_of_routed
from v41.report import PassRun
from v41.tools import likeness
from v41.tools.cli import main
from v41.tools.likeness import known_shapes, nearest_miss, operators, shapes_of, short
from v41.tools.nodes import NodeFacts
from v41.tools.run_folder import save

NOISE = ["aten.neg.default", "aten.rsqrt.default", "aten.view.default", "aten.copy_.default"]
SHAPES = [(name, shape) for name, shapes in known_shapes().items() for shape in shapes if len(shape) > 5]


def nodes(names: list[str], body: str = "") -> list[NodeFacts]:
    def told(i: int, name: str) -> NodeFacts:
        return NodeFacts(f"n{i}", body, "piece_0", f"{name}(x)", f"m.py:{i}", (), None, None, (body, f"n{i}"))

    return [told(i, name) for i, name in enumerate(names)]


noise = st.lists(st.sampled_from(NOISE), max_size=30)


@given(st.sampled_from(SHAPES), st.integers(1, 10**6), noise, noise)
def test_a_site_with_one_operator_less_is_the_nearest_miss(
    pair: tuple[str, tuple[str, ...]], number: int, before: list[str], after: list[str]
) -> None:
    """Or another shape that is as near: one may be a part of another."""
    name, shape = pair
    at = 1 + number % (len(shape) - 2)
    near = nearest_miss(name, nodes([*before, *shape[:at], *shape[at + 1 :], *after]))
    assert near is not None and near.share > 0.75
    if near.shape == shape and near.found == len(shape) - 1 == near.length:
        assert near.differences == (f"{short(shape[at])} is missing",)


@given(st.sampled_from(SHAPES), noise)
def test_what_is_not_half_like_a_site_is_none(pair: tuple[str, tuple[str, ...]], around: list[str]) -> None:
    name, shape = pair
    few = list(shape[: len(shape) // 4])
    near = nearest_miss(name, nodes([*around, *few]))
    assert near is None or near.share >= likeness.WORTH


def test_regions_are_sites_already_and_a_body_is_told_apart() -> None:
    shape = list(known_shapes()["outline_gate"][0])
    outside = nodes(shape)
    inside = [replace(node, region="moe_gate", body="moe_gate_0") for node in outside]
    assert nearest_miss("outline_gate", inside) is None
    halves = [*outside[:14], *(replace(node, body="other") for node in outside[14:])]
    near = nearest_miss("outline_gate", halves)
    whole = nearest_miss("outline_gate", outside)
    assert whole is not None and whole.found == len(shape)
    assert near is not None and near.found < len(shape)  # one of the halves alone
    assert nearest_miss("canonicalize", outside) is None


def test_shapes_are_those_of_the_regions_of_a_run() -> None:
    found = shapes_of(run_of_balanced())
    assert found == {"fold_sinkhorn": [("aten.sum.dim_IntList", "aten.add.Tensor", "aten.div.Tensor") * 3]}
    assert {"outline_mhc", "outline_gate", "outline_experts", "outline_attention"} <= known_shapes().keys()


def test_why_not_names_it_where_a_pass_judged_no_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_balanced()
    shape = ["aten.exp.default", "region sinkhorn", "aten.topk.default", "aten.sum.dim_IntList"]
    monkeypatch.setattr(likeness, "known_shapes", lambda: {"outline_gate": [tuple(shape)]})
    save(run, tmp_path / "run")
    assert main(["why-not", "outline_gate", "-m", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "outline_gate judged no site"
    assert out[1].startswith("nearest miss, by the order of operators alone: 3 of 4 operators of a site, from ")
    assert main(["why-not", "outline_gate", "-m", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["nearest"]
    assert (told["found"], told["of"], told["differences"]) == (3, 4, ["topk is missing"])
    assert main(["why-not", "fold_sinkhorn", "-m", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nearest"] is None
    assert PassRun("outline_gate", [], 0, 0, 0.0).decisions == []


@pytest.mark.slow
def test_the_shapes_kept_are_those_of_the_plain_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two layers here, of all kinds of layers in the file."""
    from v41.tools.run_folder import load

    assert main(["capture", "tiny", "--layers", "2", "-o", str(tmp_path / "run")]) == 0
    kept = known_shapes()
    for name, shapes in shapes_of(load(tmp_path / "run")).items():
        if name in kept:
            assert set(shapes) <= set(kept[name]), f"{name}: keep its shapes anew"


def test_an_operator_is_said_short() -> None:
    assert [short("aten.sum.dim_IntList"), short("region sinkhorn")] == ["sum", "region sinkhorn"]


def test_shapes_are_those_of_bodies_in_shared_bodies_too() -> None:
    """Such a region goes by the name of its owner as well, and where the owner was opened by another one."""
    for codegen in ("inductor", "triton"):
        (shape,) = {*shapes_of(run_of_routed(codegen))["outline_gate"]}
        assert shape.count("aten.topk.default") == 1 and shape.count("aten.sqrt.default") == 1
    names = [name for name, _ in operators(nodes(["region shared_1/moe_gate_0(x)"]))]
    assert names == ["region moe_gate"]
