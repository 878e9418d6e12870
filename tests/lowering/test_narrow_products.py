"""narrow_products: products of widened halves take the halves, whatever views stand between, and no other does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.lowering import narrow_products as module
from v41.lowering.narrow_products import narrow_products
from v41.model_def.attention import attend
from v41.model_def.indexer import index_scores
from v41.model_def.linear import Fp32Linear

CPU = ("cpu",)
LEFT: dict[str, Callable[[Tensor], Tensor]] = {  # x [T, 4, 8] -> [T, 4, 8], fp32
    "widened": lambda x: x.float(),
    "viewed first": lambda x: x.flatten(1).unflatten(1, (4, 8)).float(),
    "viewed after": lambda x: x.float().flatten(1).unflatten(1, (4, 8)),
    "transposed copy": lambda x: x.mT.float().mT.clone(),
    "half of a split": lambda x: torch.cat((x, x + 1), 1).float().split(4, 1)[0],
    "a slice": lambda x: torch.cat((x, x), 1).float()[:, 2:6],
    "masked first": lambda x: x.masked_fill(x < 0, 0).float(),
}
RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # y [T, 8, 4], W [8, 4], both bf16
    "batched": lambda x, y_w: x @ y_w,
    "einsum": lambda x, y_w: torch.einsum("tmk,tkn->tmn", x, y_w),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # products that must stay as they are
    "one factor is fp32": lambda x, y: x.float() @ (y.float() * 1.5),
    "computed after widening": lambda x, y: (x.float() + 1) @ y.float(),
    "already narrow": lambda x, y: x @ y,
    "two half types": lambda x, y: x.float() @ y.half().float(),
    "read as other bits": lambda x, y: x.float().view(torch.int32).view(torch.float32) @ y.float(),
    "read as complex": lambda x, y: (
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(2, (4, 2)))).flatten(2) @ y.float()
    ),
    "packed by the cast, then viewed": lambda x, y: (
        torch.ops.aten.view.default(y.mT[:, :, ::2].float(), [-1, 4, 4]) @ x.float()[:, :, :4]
    ),
    "fp64": lambda x, y: x.double() @ y.double(),
}


def halves(*sizes: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, *sizes, generator=torch.Generator().manual_seed(rows)).bfloat16()


def run(gm: GraphModule, *inputs: Tensor) -> list[Tensor]:
    return gm(len(inputs[0]), *inputs)


@given(st.sampled_from(sorted(LEFT)), st.sampled_from(sorted(RIGHT)))
def test_widened_products_run_on_the_halves(left: str, right: str) -> None:
    gm = trace(lambda x, y: RIGHT[right](LEFT[left](x), y.float()), halves(4, 8), halves(8, 4))
    values = {rows: (halves(4, 8, rows=rows), halves(8, 4, rows=rows)) for rows in (1, 2, 5)}
    before = {rows: run(gm, *given) for rows, given in values.items()}
    assert narrow_products(gm, CPU) == 1
    gm.graph.lint()
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.v41.product.default)
    for factor in product.args:
        assert factor.meta["val"].dtype is torch.bfloat16
    for rows, inputs in values.items():
        assert all(map(torch.equal, run(gm, *inputs), before[rows]))


@pytest.mark.parametrize("name", KEPT)
def test_other_products_stay(name: str) -> None:
    gm = trace(KEPT[name], halves(4, 8), halves(8, 4))
    text = str(gm.graph)
    assert narrow_products(gm, CPU) == 0 and str(gm.graph) == text


def test_nothing_changes_on_a_device_without_such_products() -> None:
    gm = trace(lambda x, y: x.float() @ y.float(), halves(4, 8), halves(8, 4))
    assert narrow_products(gm) == 0


def test_a_factor_of_several_products_is_narrowed_once() -> None:
    def both(x: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        wide = W.float().mT.clone()
        return x.float() @ wide, (x + 1).float() @ wide

    gm = trace(both, halves(8), static=[halves(8)])
    assert narrow_products(gm, CPU) == 2
    left, right = gm.graph.find_nodes(op="call_function", target=torch.ops.v41.product.default)
    assert left.args[1] is right.args[1]
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)


def test_the_models_own_products_are_found() -> None:
    """Attention multiplies twice, the index scores once a group of heads, the head once."""
    head = Fp32Linear(16, 32)
    gm = trace(lambda x: head(x), halves(16))
    assert narrow_products(gm, CPU) == 1
    keys, visible, sink = halves(7, 16), torch.ones(5, 7, dtype=torch.bool), torch.zeros(3)
    gm = trace(attend, halves(3, 16), keys, visible, static=[sink])
    assert narrow_products(gm, CPU) == 2
    gm = trace(index_scores, halves(2, 16, 8), halves(6, 8), torch.ones(5, 2, 16))
    assert narrow_products(gm, CPU) == 2


def test_long_sums_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's form on a CPU, with a product that widens in place of the tensor cores'."""
    lengths = []

    def widened(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        lengths.append(a.shape[-1])
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", widened)
    monkeypatch.setattr(torch, "bmm", widened)
    for terms in (64, 256, 5120, 5128):
        a, b = halves(terms), halves(terms, rows=7).mT
        found = module.product_on_gpu(a, b)
        assert found.dtype is torch.float32 and found.is_contiguous()
        torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
    assert set(lengths) == {64, 256, 128, 5128}
    batch = module.product_on_gpu(halves(4, 2048), halves(2048, 3))
    assert batch.shape == (5, 4, 3) and lengths[-1] == 2048


def test_the_operator_says_its_shape() -> None:
    a, b = halves(4, 8), halves(8, 4)
    for pair in ((a, b), (a[0], b[0])):
        torch.library.opcheck(torch.ops.v41.product.default, pair, test_utils=("test_schema", "test_faketensor"))
