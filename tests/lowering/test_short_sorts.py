"""short_sorts: few integers are sorted by counting, as a stable sort would; any other sort stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering import short_sort_kernel
from v41.lowering import short_sorts as module
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.inverse_orders import SORTS
from v41.lowering.short_sorts import CHUNK, INTEGERS, MOST, WARPS, short_sorts, sort_on_gpu

KERNEL = Path(short_sort_kernel.__file__)
SORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "stable": lambda keys: keys.argsort(stable=True),
    "descending": lambda keys: keys.argsort(stable=True, descending=True),
    "both results": lambda keys: torch.stack(keys.sort(stable=True)),
    "in any order of ties": lambda keys: keys.sort().values,
    "of 32 bits": lambda keys: keys.int().argsort(stable=True),
}
STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "floats": lambda keys: keys.float().argsort(stable=True),
    "rows": lambda keys: torch.stack((keys, -keys), 1).sort(dim=-1, stable=True).indices[:, 0],
    "with gaps": lambda keys: torch.stack((keys, -keys), 1)[:, 0].argsort(stable=True),
    "truths": lambda keys: (keys > 2).argsort(stable=True),
}


def interpreted(interpreter: Interpreter, keys: Tensor, descending: bool, block: int = 8, chunk: int = 16) -> Any:
    values, places = torch.full_like(keys, 77), torch.full((len(keys),), -1)
    constants = {"DESCENDING": descending, "BLOCK": block, "CHUNK": chunk}
    grid = (-(-len(keys) // block),)
    return interpreter.launch(KERNEL, "short_sort", grid, keys, values, places, len(keys), **constants)[1:3]


@settings(max_examples=25)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=50), st.booleans(), st.sampled_from(INTEGERS[:3]))
def test_the_kernel_is_a_stable_sort(
    interpreter: Interpreter, keys: list[int], descending: bool, dtype: torch.dtype
) -> None:
    given_ = torch.tensor(keys, dtype=dtype)
    wanted = given_.sort(stable=True, descending=descending)
    assert all(map(torch.equal, interpreted(interpreter, given_, descending), wanted))


def test_the_ends_of_the_numbers_are_keys_like_others(interpreter: Interpreter) -> None:
    """What is read behind the last key counts for nothing, whatever it is taken for."""
    for dtype in (torch.int64, torch.int32):
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        keys = torch.tensor([most, 0, least, most, -1, least, 0], dtype=dtype)
        for descending in (False, True):
            wanted = keys.sort(stable=True, descending=descending)
            assert all(map(torch.equal, interpreted(interpreter, keys, descending), wanted))


@pytest.mark.parametrize("name", SORTED)
def test_sorts_of_integers_are_found(name: str) -> None:
    gm = trace(lambda keys: SORTED[name](keys) + 1, torch.tensor([2, 0, 2, 1]))
    assert short_sorts(gm) == 0, "on a CPU nothing is rewritten"
    keys = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(0))
    (before,) = gm(40, keys)
    assert short_sorts(gm, ("cpu",)) == 1 and not any(node.target in SORTS for node in gm.graph.nodes)
    gm.graph.lint()
    (after,) = gm(40, keys)
    assert torch.equal(before, after) and short_sorts(gm, ("cpu",)) == 0


@pytest.mark.parametrize("name", STAY)
def test_other_sorts_stay(name: str) -> None:
    gm = trace(lambda keys: STAY[name](keys) + 1, torch.tensor([2, 0, 2, 1]))
    assert any(node.target in SORTS for node in gm.graph.nodes)
    text = str(gm.graph)
    assert short_sorts(gm, ("cpu",)) == 0 and str(gm.graph) == text


def test_none_and_many_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "sort_by_library", lambda keys, descending: asked.append(len(keys)))
    for count in (0, MOST + 1):
        sort_on_gpu(torch.zeros(count, dtype=torch.int64), False)
    assert asked == [0, MOST + 1]


def test_the_operator_says_its_results() -> None:
    keys = torch.tensor([2, 0, 2])
    torch.library.opcheck(torch.ops.v41.short_sort.default, (keys, True), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_it_compiles_without_a_spill(arch: str, record_property: Callable[..., None]) -> None:
    constants = {"DESCENDING": False, "BLOCK": module.BLOCK, "CHUNK": CHUNK}
    types = [{"keys": f"*{kind}", "values": f"*{kind}", "places": "*i64", "count": "i32"} for kind in ("i64", "i32")]
    requests = [Request(short_sort_kernel.__file__, "short_sort", each, constants, arch, (), {"num_warps": WARPS})
                for each in types]  # fmt: skip
    for each, facts in zip(types, compile_for(requests), strict=True):
        record_property(f"{arch} {each['keys']}", f"{facts.registers} registers")
        assert facts.spill_bytes == 0
