"""inverse_orders: what sorts the order of a sort is written instead, for any keys; any other sort stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.lowering.gpu_text import gpu_text, hopper, on_cuda
from tests.strategies.tracing import trace
from v41._compat_sizes import with_sizes
from v41.lowering.inductor import compile_piece
from v41.lowering.inverse_orders import SORTS, inverse_orders

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {  # the places of rows, sorted by keys [T]
    "stable": lambda keys: keys.argsort(stable=True),
    "any order of ties": lambda keys: keys.argsort(),
    "descending": lambda keys: keys.argsort(descending=True),
    "a sort, its values read": lambda keys: keys.sort().indices + 0 * keys.sort().values.sum().long(),
}
STAY: dict[str, Callable[[Tensor], Tensor]] = {  # sorts of something else, or to another order
    "of keys that come twice": lambda keys: (keys % 3).argsort(stable=True),
    "the other way round": lambda keys: keys.argsort().argsort(descending=True),
    "of half of an order": lambda keys: keys.argsort()[::2].argsort(),
    "of an order and one": lambda keys: (keys.argsort() + 1).argsort(),
    "along rows of an order": lambda keys: torch.stack((keys, -keys)).argsort(-1).argsort(-1).sum(0),
    "values alone": lambda keys: keys.argsort().sort().values,
}


def there_and_back(order: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Values sorted by keys, doubled, and put back: as rows go to experts."""

    def moved(keys: Tensor, x: Tensor) -> Tensor:
        torch._check(keys.shape[0] == x.shape[0])
        by = order(keys)
        return (x.gather(0, by) * 2).gather(0, by.argsort())

    return moved


def sorts_of(gm: GraphModule) -> int:
    return sum(node.target in SORTS for node in gm.graph.nodes)


def keys_of(rows: int) -> Tensor:
    return torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("name", [name for name in ORDERS if "read" not in name])
def test_an_order_of_an_order_is_written(name: str) -> None:
    gm = trace(there_and_back(ORDERS[name]), keys_of(7), torch.randn(7))
    given_ = {rows: (rows, keys_of(rows), torch.randn(rows)) for rows in (0, 1, 7, 40)}
    before = {rows: gm(*each) for rows, each in given_.items()}
    assert sorts_of(gm) == 2 and inverse_orders(gm) == 1 and sorts_of(gm) == 1
    gm.graph.lint()
    for rows, each in given_.items():
        assert all(map(torch.equal, gm(*each), before[rows]))
    assert inverse_orders(gm) == 0


def test_what_is_computed_of_an_order_is_none() -> None:
    gm = trace(there_and_back(ORDERS["a sort, its values read"]), keys_of(7), torch.randn(7))
    before = sorts_of(gm)
    assert inverse_orders(gm) == 0 and sorts_of(gm) == before


@pytest.mark.parametrize("name", STAY)
def test_other_sorts_stay(name: str) -> None:
    gm = trace(lambda keys: STAY[name](keys) * 2, keys_of(7))
    before = sorts_of(gm)
    assert inverse_orders(gm) == 0 and sorts_of(gm) == before


@given(st.lists(st.integers(-3, 3), max_size=20), st.sampled_from(["stable", "any order of ties", "descending"]))
def test_any_keys(keys: list[int], name: str) -> None:
    gm = trace(lambda k: ORDERS[name](k).argsort(), torch.tensor([2, 1, 0]))
    inverse_orders(gm)
    given_ = torch.tensor(keys, dtype=torch.int64)
    (back,) = gm(len(keys), given_)
    assert torch.equal(back, ORDERS[name](given_).argsort())


def test_a_piece_sorts_once() -> None:
    gm = trace(there_and_back(ORDERS["stable"]), keys_of(7), torch.randn(7))
    compiled = compile_piece(gm)
    assert sorts_of(gm) == 2, "the caller's graph was changed"
    assert compiled.rewrites.orders == 1, "the report is not told"
    for rows in (1, 7, 40):
        each = (rows, keys_of(rows), torch.randn(rows))
        assert all(map(torch.equal, compiled(*each), gm(*each)))


def test_on_a_gpu_one_sort_and_a_store_are_left() -> None:
    shapes = ShapeEnv()
    mode, rows = FakeTensorMode(shape_env=shapes), shapes.create_unbacked_symint()
    inputs = [on_cuda(mode, rows, dtype=torch.int64), on_cuda(mode, rows)]
    function = there_and_back(ORDERS["stable"])
    with hopper():
        gm = make_fx(lambda keys, x: (function(keys, x),), select_decomp_table())(*inputs)
        assert inverse_orders(gm) == 1
        sized = with_sizes(gm, {str(rows): 256})
    lines = gpu_text(sized.gm, sized.metas).splitlines()
    called = [line for line in lines if "= torch.ops.aten." in line and not line.strip().startswith("#")]
    assert len(called) == 1 and "torch.ops.aten.sort.stable(" in called[0], "the write is a kernel, no call"
