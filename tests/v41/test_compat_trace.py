"""functional_aten leaves out work that no graph shows: the graphs are those of torch alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41 import _compat_trace
from v41.passes.structure import structure_key


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Views, copies, a number of rows that is used as a number, and a mutated tensor."""
    rows = torch.arange(x.shape[0]) * x.numel()
    y = x.clone()
    y[:, 0] += rows
    return (y @ w).softmax(-1).flatten(), torch.cat([x, y]).unsqueeze(1).expand(-1, 3, -1)


@pytest.fixture
def traced_sizes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every operation on sizes that is traced into a graph."""
    from torch.fx.experimental import proxy_tensor

    seen: list[Any] = []
    traces = proxy_tensor.handle_sym_dispatch

    def count(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func)
        return traces(func, args, kwargs)

    monkeypatch.setattr(proxy_tensor, "handle_sym_dispatch", count)
    return seen


def graph() -> GraphModule:
    return trace(mixed, torch.randn(5, 4), static=[torch.randn(4, 2)])


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], GraphModule]:
    def run() -> GraphModule:
        with monkeypatch.context() as patch:
            patch.setattr(_compat_trace, name, contextlib.nullcontext)
            return graph()

    return run


def test_sizes_of_wrappers_leave_no_trace(traced_sizes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without("_sizes_computed", monkeypatch)()
    before = len(traced_sizes)
    ours = graph()
    assert structure_key(ours) == structure_key(plain)
    assert len(traced_sizes) - before < before / 2


def test_torch_is_left_as_it_was() -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor

    make = FunctionalTensor.__new__
    with contextlib.suppress(ZeroDivisionError), _compat_trace._sizes_computed():
        assert FunctionalTensor.__new__ is not make
        raise ZeroDivisionError
    assert FunctionalTensor.__new__ is make


def test_all_objects_are_searched_for_garbage_again_once_the_graph_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor

    traced, behind, make, before = set(), set(), FunctionalTensor.__new__, gc.get_threshold()

    def wrapped(cls: Any, *arguments: Any) -> Any:
        traced.add(gc.get_threshold())
        return make(cls, *arguments)

    def inference(gm: GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        behind.add(gc.get_threshold())
        return gm

    def backend(gm: GraphModule, inputs: Sequence[object]) -> Any:
        return _compat_trace.functional_aten(gm, inputs, inference, inference)

    monkeypatch.setattr(FunctionalTensor, "__new__", wrapped)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    assert traced == {(*before[:2], _compat_trace.NEVER)}
    assert behind == {before} == {gc.get_threshold()}
    with contextlib.suppress(ZeroDivisionError), _compat_trace.young_garbage_alone():
        raise ZeroDivisionError
    assert gc.get_threshold() == before
