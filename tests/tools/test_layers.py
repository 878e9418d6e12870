"""A region belongs to the layer whose parameters it reads, else of its module, else in which its piece ends. So does
what a pass refused; in a body that layers share, and that was opened, once for each of its calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from tests.tools.small_models import route
from v41._compat_trace import mark_rows
from v41.model_def.topk import topk_lowest_index
from v41.tools.inspect import Inspection, capture_call, layers

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, *, balances: bool) -> None:
        super().__init__()
        self.up, self.balances = nn.Linear(WIDTH, WIDTH, bias=False), balances

    def forward(self, x: Tensor) -> Tensor:
        m = (self.up(x).unsqueeze(-1) + x.unsqueeze(-2)).exp()
        for turn in range(3 * self.balances):
            m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6)
        return m.sum(-1)


class Model(nn.Module):
    """Layers 0 and 2 balance in a module of their own; the model itself does it behind the last."""

    def __init__(self, *, behind: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(balances=balances) for balances in (True, False, True, False))
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        m = (x.unsqueeze(-1) * x.unsqueeze(-2)).exp()
        for turn in range(5 * self.behind):
            m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6)
        return m.sum(-1)


def found(*, behind: bool) -> Inspection:
    def make() -> tuple[nn.Module, tuple[Tensor]]:
        x = torch.rand(5, WIDTH)
        mark_rows(x)
        return Model(behind=behind), (x,)

    torch._dynamo.reset()
    return capture_call(make, codegen="triton")


def test_regions_of_one_piece_are_told_in_their_own_layers() -> None:
    views = {view.layer: view for view in layers(found(behind=True))}
    steps = {layer: [region.attrs["steps"] for region in view.regions] for layer, view in views.items()}
    assert steps == {None: [], 0: [3], 1: [], 2: [3], 3: [5]}  # the last one lies in no layer: where its piece ends
    work = [layer for layer, view in views.items() if any(piece.nodes > 5 for piece in view.pieces)]
    assert work == [3]


@nested_compile_region
def routes(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A router, and what looks like one but for its activation."""
    scores = F.linear(x.float(), weight.float()).exp()
    experts = topk_lowest_index(scores, 2)
    return *route(x, weight, 1), scores.gather(-1, experts), experts


class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [value for layer in self.layers for value in routes(x, layer.weight)]
        return torch.cat([value.float() for value in found], -1)


def test_what_is_refused_in_a_body_is_told_for_each_call_that_was_opened() -> None:
    def make() -> tuple[nn.Module, tuple[Tensor]]:
        x = torch.rand(5, WIDTH)
        mark_rows(x)
        return Routers(), (x,)

    torch._dynamo.reset()
    inspection = capture_call(make, codegen="triton")
    gate = next(run for run in inspection.report.passes if run.name == "outline_gate")
    (refused,) = [decision for decision in gate.decisions if not decision.applied]
    assert refused.body and [each for view in layers(inspection) for each in view.refused] == [refused] * 3
