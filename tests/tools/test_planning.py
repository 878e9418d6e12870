"""What the tools tell of a GPU is what the backend decides for one: pieces, kernels, refusals, in all views alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from v41 import backend
from v41._compat_trace import mark_rows
from v41.lowering import generated
from v41.lowering.rowwise import Unsupported
from v41.model_def.config import V41Config
from v41.model_def.moe import Gate
from v41.report import CompileReport, collect
from v41.tools.cost_command import fused, totals
from v41.tools.explain_command import explain
from v41.tools.gpus import GPUS
from v41.tools.inspect import capture_call
from v41.tools.run import Run, run_of
from v41.tools.steps import step_of_rows


class Routed(nn.Module):
    """A router between two other operations, and a loop: one region with a kernel of its own, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(V41Config.preset("tiny"))

    def forward(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        weights, picks = self.gate(x.relu())
        for axis in (-1, -2, -1):
            m = m / (m.sum(axis, keepdim=True) + 1e-6)
        return weights.cos(), picks + m.sum().long()


def routed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    x, m = torch.rand(5, V41Config.preset("tiny").hidden_size).bfloat16(), torch.rand(5, 4, 4)
    mark_rows(x)
    mark_rows(m)
    return Routed(), (x, m)


@cache
def planned(codegen: str) -> Run:
    torch._dynamo.reset()
    return run_of(capture_call(routed, codegen=codegen), "routed")


def compiled(monkeypatch: pytest.MonkeyPatch) -> CompileReport:
    """The report of the backend itself, told that it is on a GPU; Inductor is left out, and nothing runs."""
    monkeypatch.setattr(backend, "effective_codegen", lambda *_: ("triton", "a test"))
    monkeypatch.setattr(backend, "ways", lambda *_: ("triton", "inductor", "eager"))
    monkeypatch.setattr(backend, "kept_whole", lambda _: frozenset())
    monkeypatch.setattr(backend, "compiled_by_inductor", lambda body, *_: backend.eager_artifact(body))
    model, inputs = routed()
    torch._dynamo.reset()

    def stop(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        backend.v41(gm, inputs, options={"cache": False})
        return gm.forward

    with torch.no_grad(), collect() as reports:
        torch.compile(model, backend=stop)(*inputs)
    (report,) = reports
    return report


def test_the_plan_and_its_kernels_are_those_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    report, run = compiled(monkeypatch), planned("triton")
    assert report.plan is not None and report.plan.to_json() == run.plan.to_json()
    assert report.kernels == {each.name: list(each.pieces) for each in run.kernels}
    assert [each.refusal for each in run.kernels] == [None] and report.fallbacks == []
    assert [piece.border for piece in run.plan.pieces].count("region moe_gate") == 1


def told(run: Run) -> tuple[list[str], dict[str, bool], dict[str, str]]:
    """Regions of pieces with a generated kernel, whether `cost` counts a part as it is, what `explain` says runs it."""
    parts = totals(run.work, step_of_rows(run.plan, None, 5), GPUS["H200"])
    kernels = [name for each in run.kernels if each.refusal is None for name in each.regions]
    bodies = {node.region: node.body for node in run.nodes if node.body and node.region is not None}
    stories = {region: explain(run, body)[0].facts["runs"][0] for region, body in bodies.items()}
    return kernels, {part.part: fused(part) for part in parts if part.part in bodies}, stories


def test_cost_kernels_and_explain_say_the_same() -> None:
    kernels, parts, stories = told(planned("triton"))
    assert kernels == ["moe_gate"] and parts == {"moe_gate": True, "sinkhorn": False}
    assert stories["moe_gate"].startswith(f"kernel {planned('triton').kernels[0].name} on a GPU")
    assert stories["sinkhorn"].startswith("through Inductor on a GPU")


def test_a_refusal_is_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Unsupported("mm", "aten.mm.default", "is refused by a test")
    monkeypatch.setattr(generated, "generate_piece", lambda *_: refusal)
    torch._dynamo.reset()
    run = run_of(capture_call(routed, codegen="triton"), "routed")
    kernels, parts, stories = told(run)
    assert kernels == [] and parts == {"moe_gate": False, "sinkhorn": False}
    assert run.kernels[0].refusal == "mm (aten.mm.default) is refused by a test"
    assert stories["moe_gate"].endswith("no kernel is generated, since mm (aten.mm.default) is refused by a test")


def test_as_on_a_cpu_there_is_no_kernel() -> None:
    run = planned("eager")
    kernels, parts, stories = told(run)
    assert (kernels, run.kernels) == ([], []) and not any(parts.values())
    assert set(stories.values()) == {"its ATen nodes, one by one"}
    assert "region moe_gate" not in {piece.border for piece in run.plan.pieces}
