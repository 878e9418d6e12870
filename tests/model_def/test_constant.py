"""Constant: reads as the float that was set, is text to a compiler, and cannot be what is no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.compiler import nested_compile_region
from torch.fx import GraphModule

from v41.model_def.constant import Constant


class Shift(nn.Module):
    by = Constant()

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Shifts(nn.Module):
    """Each shift in a region, whose bodies torch shares where they are equal."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(Shift(by) for by in numbers)

    def forward(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            x = self.body(shift, x)
        return x

    @nested_compile_region
    def body(self, shift: nn.Module, x: Tensor) -> Tensor:
        return shift(x)


@given(st.floats(allow_nan=False))
def test_reads_as_what_was_set(value: float) -> None:
    shift = Shift(value)
    assert shift.by == value and type(shift.by) is float
    assert Shift(3).by == 3.0


@pytest.mark.parametrize("value", [None, "eps", [1e-6]])
def test_no_number_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Shift(value)


def test_models_that_differ_compile_one_after_another_each_with_its_numbers() -> None:
    """The third finds floats that have differed before; within the fourth, bodies differ; a body alone is set anew."""
    x, graphs = torch.arange(4.0), []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    for numbers in (0.25, 0.25), (0.5, 0.25), (8.0, 0.125), (4.0, 16.0, 4.0):
        model = Shifts(*numbers)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), model(x)) and torch.equal(model(x), x + sum(numbers))
        found = {n.args[1] for body in graphs[-1].children() for n in body.graph.nodes if n.op == "call_function"}
        assert {number for number in found if isinstance(number, float)} == set(numbers)
        model.shifts[0].by = 32.0
        assert torch.equal(compiled(x), x + 32 + sum(numbers[1:]))
    assert len(graphs) == 7  # (32, 0.25) comes twice
