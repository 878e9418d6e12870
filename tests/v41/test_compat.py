"""_compat: every private name of torch that it uses exists in this torch, and what it detects is right."""

from __future__ import annotations

import ast
import importlib
import inspect
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import SymInt

from tests.strategies.tracing import trace
from v41 import _compat, _compat_frames, _compat_groups, _compat_trace

MODULES = _compat, _compat_frames, _compat_groups, _compat_trace
TREES = [ast.parse(Path(module.__file__).read_text()) for module in MODULES]
IMPORTS = sorted(
    {
        (node.module, alias.name)
        for node in chain(*map(ast.walk, TREES))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch")
        for alias in node.names
    }
)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_every_name_it_imports_exists(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_the_parts_it_reaches_by_attribute_exist() -> None:
    from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
    from torch._guards import CompileId, TracingContext
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert {"alias_of_input", "is_input"} <= set(OutputType.__members__)
    assert "output_info" in ViewAndMutationMeta.__dataclass_fields__
    assert "num_mutated_inp_runtime_indices" in inspect.getsource(ViewAndMutationMeta)
    assert "frame_compile_id" in CompileId.__dataclass_fields__
    assert hasattr(TracingContext, "try_get")
    for name in ("suppress_guards", "ignore_fresh_unbacked_symbols", "is_unbacked_symint"):
        assert hasattr(ShapeEnv, name), name
    assert isinstance(ShapeEnv().var_to_range, dict)


def sizes() -> tuple[SymInt, SymInt]:
    """An unbacked and a backed symbolic size."""
    found = []
    for backed in (False, True):
        gm = trace(lambda x: x + 1, torch.randn(4, 2), backed=backed)
        values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        found.append(next(value.shape[0] for value in values if isinstance(value, torch.Tensor)))
    return found[0], found[1]


def test_known_equal_is_true_only_where_it_is_known() -> None:
    unbacked, backed = sizes()
    assert _compat.known_equal(4, 4, 4) and not _compat.known_equal(4, 4, 5)
    for size in (unbacked, backed):
        guards = len(size.node.shape_env.guards)
        assert _compat.known_equal(size, size) and _compat.known_equal(size * 2, size + size)
        assert not _compat.known_equal(size, 4) and not _compat.known_equal(size, size + 1)
        assert len(size.node.shape_env.guards) == guards


def test_facts_of_a_symbol() -> None:
    unbacked, backed = sizes()
    ((name, what),) = _compat.symbol_facts(unbacked).items()
    assert name == str(unbacked) and what.startswith("0..") and name not in what
    ((name, what),) = _compat.symbol_facts(backed).items()
    assert name == str(backed) and what.startswith(f"{name} in 2..")
    assert _compat.renamed(unbacked * 2, {str(unbacked): "rows"}) == "2*rows"


def test_content_of_a_constant_and_shared_memory() -> None:
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    assert _compat.content_of(x.t()) == bytes([1, 3, 2, 4])
    assert _compat.content_of(torch.empty(0)) == b""
    assert _compat.memory_of(x[0]) == _compat.memory_of(x) != _compat.memory_of(x.clone())


def test_outside_of_a_compile_nothing_is_rebuilt_and_nothing_was_compiled_before() -> None:
    assert _compat.outputs_rebuilt_from_inputs(3) == frozenset()
    assert _compat.times_compiled_before() == 0
