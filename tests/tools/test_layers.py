"""A piece belongs to the layer that most of its nodes come from, a region to the one whose parameters it reads, else of
its module, else of what is in front of it. So does what a pass refused; in a body that layers share, and that was
opened, once for each of its calls."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from tests.tools.small_models import route
from v41._compat_trace import mark_rows
from v41.model_def.config import V41Config
from v41.model_def.moe import MoE
from v41.model_def.topk import topk_lowest_index
from v41.tools.inspect import Inspection, capture_call, layers
from v41.tools.nodes import module_of

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
    assert steps == {None: [], 0: [3], 1: [], 2: [3], 3: [5]}  # the last one lies in no layer: behind that of 3
    work = [layer for layer, view in views.items() if any(piece.nodes > 5 for piece in view.pieces)]
    assert work == [2]  # of 7 to 16 nodes of each, most


def experts_alone() -> tuple[nn.Module, tuple[Tensor]]:
    """A module of the plain model by itself: no parameter names a layer."""
    config = V41Config.preset("tiny")
    x = torch.randn(5, config.hidden_size).bfloat16()
    mark_rows(x)
    return MoE(config).requires_grad_(False), (x,)


def test_where_no_parameter_names_a_layer_there_is_none() -> None:
    torch._dynamo.reset()
    (outside,) = layers(capture_call(experts_alone, codegen="triton"))
    assert outside.layer is None and [region.kind for region in outside.regions] == ["moe_gate", "experts"]


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


class Handed(nn.Module):
    """A chain that is refused, and read behind a router, in a piece further on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        m = (x.unsqueeze(-1) * x.unsqueeze(-2)).exp()
        for turn in range(3):
            m = m / (m.sum(-1 - turn % 2, keepdim=True) + 1e-6 * turn)
        weights, experts = route(m.sum(-1), self.gate.weight, 1)
        return m.sum(-2) * weights + experts


def test_what_is_refused_is_told_once_though_pieces_hand_it_on() -> None:
    def make() -> tuple[nn.Module, tuple[Tensor]]:
        x = torch.rand(5, WIDTH)
        mark_rows(x)
        return Handed(), (x,)

    torch._dynamo.reset()
    inspection = capture_call(make, codegen="triton")
    (refused,) = (each for run in inspection.report.passes for each in run.decisions if not each.applied)
    bodies = [piece.body.graph.nodes for piece in inspection.plan.pieces]
    assert sum(node.name == refused.node for nodes in bodies for node in nodes) == 2
    assert [each for view in layers(inspection) for each in view.refused] == [refused]


class Shares(nn.Module):
    """Calls a body that layers share, beside work of its own, of which each layer has more than the one before."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.gate, self.turns = nn.Linear(WIDTH, 4, bias=False), turns
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = shared(x * self.scale, self.gate.weight)
        for _ in range(self.turns):
            x = x.cos()
        return x * (weights + experts)


@nested_compile_region
def shared(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A router between two nodes that read no parameter."""
    weights, experts = route(x.sin(), weight, 1)
    return weights.tanh(), experts


class Ready(nn.Module):
    """What is made ready in front of the layers rests on none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shares(turns) for turns in (1, 9, 30))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for turn in range(50):
            at = at * turn + 1
        for block in self.blocks:
            x = block(x)
        return x + at


def ready() -> Inspection:
    def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        x, at = torch.rand(5, WIDTH), torch.rand(5, 1)
        mark_rows(x, at)
        return Ready(), (x, at)

    torch._dynamo.reset()
    return capture_call(make, codegen="triton")


def test_a_piece_belongs_to_the_layer_that_most_of_its_nodes_come_from() -> None:
    """Nodes of a body that was opened are in the module that calls it there, not in that of the first call. A
    piece counts to no layer for reading its parameters. What is made ready in front outweighs every layer."""
    found = ready()
    piece_of = {node.name: piece for piece in found.plan.pieces for node in piece.body.graph.nodes}
    calls = [node for piece in found.plan.pieces for node in piece.body.graph.nodes if node.op == "call_function"]
    for name in ("sin", "tanh"):
        each = [node for node in calls if node.target is getattr(torch.ops.aten, name).default]
        assert [module_of(node) for node in each] == ["blocks.0", "blocks.1", "blocks.2"]
    views = {view.layer: [piece.name for piece in view.pieces] for view in layers(found)}
    gates = [piece.name for piece in found.plan.pieces if piece.border == "region moe_gate"]
    assert [layer for gate in gates for layer, names in views.items() if gate in names] == [0, 1, 2]
    cosines = Counter(piece_of[node.name].name for node in calls if node.target is torch.ops.aten.cos.default)
    at = {piece: layer for layer, names in views.items() for piece in names}
    assert [(count, at[piece]) for piece, count in cosines.items()] == [(1, 0), (9, 1), (30, 2)]
    assert views[None] == [found.plan.pieces[0].name]
