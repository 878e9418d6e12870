"""A region belongs to the layer whose parameters it reads, else of its module, else in which its piece ends."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41._compat_trace import mark_rows
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
