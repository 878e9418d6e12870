"""What is compiled ahead is what launches ask Triton for; what is not known ahead is left to them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.strategies.plans import piece
from v41.lowering import ahead
from v41.lowering.ahead import Ahead, compile_ahead, like
from v41.lowering.generated import GeneratedPiece
from v41.lowering.rowwise import generate
from v41.lowering.tuned import tuning
from v41.plan import Plan
from v41.tools.bench.rowwise_cases import cases

CUDA = torch.device("cuda", 0)
NORM = cases(20)["norm"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be compiled."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ahead, "_compile", found.append)
    monkeypatch.setattr(ahead, "steps_of", lambda kernel, given: [("name", (1, 1), given, {"ROWS": 4}, {})])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return found


def norm(group: str | None = None) -> GeneratedPiece:
    kernel: Any = generate(NORM.body(), "norm")
    kernel._module = SimpleNamespace(name="function")
    return GeneratedPiece(kernel, None, group)


def test_launches_compile_nothing_more() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ask = [sys.executable, "-m", "tests.lowering.ahead_of_launches", "1", "16"]
    done = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.rpartition("_")[0] or name for name in found["ahead"]} == {
        "norm_rope_fp8", "norm", "attention", "scores", "select"
    }  # fmt: skip
    assert found["after"] == []


def test_calls_that_ask_for_one_kernel_compile_it_once(compiled: list[Any]) -> None:
    jobs = [(norm(), NORM.inputs(rows, "cpu"), {}) for rows in (3, 3)]
    compile_ahead(jobs, CUDA)
    ((function, _, arguments, named),) = compiled
    assert (function, arguments, named) == ("function", [torch.bfloat16, torch.bfloat16], {"ROWS": 4})


def test_numbers_that_triton_tells_apart_are_kernels_of_their_own(compiled: list[Any]) -> None:
    compile_ahead([(norm(), [number], {}) for number in (1, 2, 3, 16, 32, 1 << 31)], CUDA)
    assert [arguments for _, _, arguments, _ in compiled] == [[1], [2], [16], [1 << 31]]


def test_sizes_are_those_of_the_step(compiled: list[Any]) -> None:
    rows = ShapeEnv().create_unbacked_symint()
    assert like(rows * 3 + 1, {str(rows): 5}) == 16
    compile_ahead([(norm(), [rows], {str(rows): 7})], CUDA)
    assert [arguments for _, _, arguments, _ in compiled] == [[7]]


def test_what_is_not_known_is_left(compiled: list[Any]) -> None:
    rows, given = ShapeEnv().create_unbacked_symint(), NORM.inputs(3, "cpu")
    compile_ahead([(norm(), [rows], {}), (norm("a group"), given, {}), (print, given, {})], CUDA)
    compile_ahead([(norm(), given, {})], torch.device("cpu"))
    with tuning():
        compile_ahead([(norm(), given, {})], CUDA)
    assert compiled == []


def test_what_cannot_be_prepared_keeps_nothing_else(compiled: list[Any]) -> None:
    """Its launch says why."""
    rows = ShapeEnv().create_unbacked_symint()
    odd, broken = math.ceil(rows * 0.75), norm()
    broken.kernel._module = SimpleNamespace()
    jobs = [(norm(), [odd], {str(rows): 7}), (broken, [rows], {str(rows): 7}), (norm(), [rows], {str(rows): 7})]
    compile_ahead(jobs, CUDA)
    assert [arguments for _, _, arguments, _ in compiled] == [[7]]


def test_where_no_threads_may_start_launches_compile(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    compile_ahead([(norm(), NORM.inputs(3, "cpu"), {})], CUDA)
    assert compiled == []


def test_what_fails_keeps_nothing_else_and_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch asks again, and raises what Triton does."""
    asked = list[int]()

    def warmup(rows: int, grid: Any, **named: Any) -> None:
        asked.append(rows)
        if rows == 1:
            raise ValueError("a product of shapes that no core has")  # as Triton's own errors, no RuntimeError

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ahead, "steps_of", lambda kernel, given: [("name", (1, 1), given, {}, {})])
    piece = norm()
    piece.kernel._module = SimpleNamespace(name=SimpleNamespace(warmup=warmup))
    compile_ahead([(piece, [rows], {}) for rows in (1, 2, 16)], CUDA)
    assert sorted(asked) == [1, 2, 16]


def test_a_step_compiles_what_the_plan_of_its_rows_launches(compiled: list[Any]) -> None:
    def planned(body: Any, **facts: Any) -> Plan:
        return Plan(("u0",), (), {"u0": "int u0"}, (replace(piece("norm: ->"), body=body),),
                    {"u0": "rows"}, **facts)  # fmt: skip

    def body_of(count: int) -> GraphModule:
        graph = Graph()
        graph.placeholder("number").meta["val"] = count
        graph.output(())
        return GraphModule({}, graph)

    side = planned(body_of(5), pays_at=(4,))
    plan, artifacts = planned(body_of(3), overlapped=side), {"norm": norm()}
    for rows, whole in ((4, True), (4, False), (8, True)):
        Ahead(plan, artifacts, CUDA)({"u0": rows}, whole)
    assert [arguments for _, _, arguments, _ in compiled] == [[5], [3], [3]]
    compiled.clear()
    Ahead(plan.without_bodies(), artifacts, CUDA)({"u0": 4}, True)
    assert compiled == []
