"""masks: values matter only where masks are true, if what reads them says so; else they matter, or nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, ops
from torch.fx import GraphModule, Node

from tests.strategies.small import graph_of, inputs_of
from tests.strategies.tracing import trace
from v41.passes.analysis.masks import PRODUCTS, matter_only_where
from v41.regions import outline

T, W, D = 4, 3, 8
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]  # x [T, W, D], masks a, b [T, W], w [D, D], cache like x


def built(run: Run, x: Tensor | None = None) -> tuple[GraphModule, list[Node]]:
    """The ATen graph of `run`, and its inputs."""
    x = torch.rand(T, W, D) if x is None else x
    a, b = (torch.rand(x.shape[:2]) < 0.5 for _ in range(2))
    gm = graph_of(run, x, a, b, torch.rand(D, D), torch.rand(T, W, D))
    return gm, inputs_of(gm)


def stopped(run: Run, masks: Sequence[str] = ("a",), x: Tensor | None = None) -> bool:
    """Whether nothing outside of `run` depends on x where one of `masks` is false; "ab": two nodes of one mask."""
    gm, (values, a, b, *_) = built(run, x)
    named = {"a": a, "b": b}
    return matter_only_where(gm, values, [[named[name] for name in same] for same in masks], {})


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, 0)


def otherwise(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(-1), x, y)


ENDS: dict[str, Run] = {
    "masked": lambda x, a, b, w, cache: masked(x * 2 + 1, a).sum(),
    "masked twice": lambda x, a, b, w, cache: (masked(x, a), masked(x + 1, a)),
    "masked by less": lambda x, a, b, w, cache: masked(x, a & b),
    "filled where the mask is not": lambda x, a, b, w, cache: x.masked_fill(~a.unsqueeze(-1), 7),
    "heads apart": lambda x, a, b, w, cache: masked(x.unflatten(-1, (2, 4)).transpose(-1, -2), a),
    "in order": lambda x, a, b, w, cache: masked(x.sort(-1).values, a),
    "split": lambda x, a, b, w, cache: [masked(part, a) for part in x.split(4, -1)],
    "a product of what was masked": lambda x, a, b, w, cache: masked(x, a) @ w,
    "what was masked is written": lambda x, a, b, w, cache: cache.copy_(masked(x, a)),
    "one mask after the other": lambda x, a, b, w, cache: masked(masked(x.exp(), a), a & b).sum(1),
    "made to bits": lambda x, a, b, w, cache: masked((x.exp() > 1) & a.unsqueeze(-1), a),
    "whether it is 0": lambda x, a, b, w, cache: masked(ops.aten._to_copy.default(x, dtype=torch.bool), a),
    "sums of keys": lambda x, a, b, w, cache: masked(torch.cat((x, cache), -1), a).sum(1),
}
MATTERS: dict[str, Run] = {
    "returned": lambda x, a, b, w, cache: x * 2,
    "returned beside": lambda x, a, b, w, cache: (masked(x, a), x.exp()),
    "masked by another": lambda x, a, b, w, cache: masked(x, b),
    "masked by more": lambda x, a, b, w, cache: masked(x, a | b),
    "where the mask is false": lambda x, a, b, w, cache: masked(x, ~a),
    "one key beside": lambda x, a, b, w, cache: masked(x.roll(1, 1), a),
    "nothing to see without a mask": lambda x, a, b, w, cache: x * 0,
    "nothing to see beside what is masked": lambda x, a, b, w, cache: x.long() * 0 + masked(cache.long(), a),
    "the mask as numbers": lambda x, a, b, w, cache: x * a.unsqueeze(-1).float(),
    "masked too late": lambda x, a, b, w, cache: masked(x - x.sum(1, keepdim=True), a),
    "written": lambda x, a, b, w, cache: masked(cache.copy_(x), a),
    "a product before the mask": lambda x, a, b, w, cache: masked(x @ w, a),
    "a batched product before the mask": lambda x, a, b, w, cache: masked(torch.bmm(x, cache.transpose(1, 2)), a),
    "large numbers": lambda x, a, b, w, cache: otherwise(x, a, x.clamp(min=50)),
    "negative numbers": lambda x, a, b, w, cache: otherwise(x, a, (x + 50).clamp(max=0)),
    "small numbers": lambda x, a, b, w, cache: otherwise(x, a, (x * 1e30).clamp(-1, 1).abs()),
    "large numbers in a mask": lambda x, a, b, w, cache: masked(cache, a | (x[..., 0] > 50)),
    "one number": lambda x, a, b, w, cache: otherwise(x, a, (x == 7.25).float()),
    "one number of some": lambda x, a, b, w, cache: otherwise(x, a, torch.isin(x, 7.25).float()),
    "no number": lambda x, a, b, w, cache: otherwise(x, a, x.isnan().float()),
    "no number times 0": lambda x, a, b, w, cache: x.relu() * a.unsqueeze(-1),
    "no number to the power of 0": lambda x, a, b, w, cache: (x.exp() + 1).floor().clamp(max=1) ** a.unsqueeze(-1),
    "the mask, where a number is large": lambda x, a, b, w, cache: masked(cache, torch.where(x[..., 0] > 50, b, a)),
    "the largest of large ones": lambda x, a, b, w, cache: otherwise(x, a, x.clamp(min=50).amax(1, keepdim=True)),
    "two results of each number": lambda x, a, b, w, cache: otherwise(x, a, x.frexp()[1].float()),
    "no such kernel": lambda x, a, b, w, cache: masked(ops.aten.index.Tensor(w, [(x * 0).long() + 100]), a),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_is_masked_reaches_nothing(name: str) -> None:
    assert stopped(ENDS[name])


@pytest.mark.parametrize("name", MATTERS)
def test_values_that_get_out_matter(name: str) -> None:
    assert not stopped(MATTERS[name])


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_no_product_is_run_on_values_that_differ(product: Any) -> None:
    def run(x: Tensor, a: Tensor, b: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        of = [x, cache.transpose(1, 2)] if "bmm" in str(product) else [x[:, 0], w]
        start = [torch.zeros(())] if "add" in str(product) else []
        return torch.where(a.all(), product(*start, *of), 0)

    assert not stopped(run)
    gm, _ = built(run)
    assert product in [node.target for node in gm.graph.nodes]


def test_all_masks_together_say_where_values_matter() -> None:
    both, either = (lambda x, a, b, w, cache: masked(x, a & b)), (lambda x, a, b, w, cache: masked(x, a | b))
    one = ENDS["masked"]
    assert stopped(both, "ab") and not stopped(either, "ab") and not stopped(one, "ab")
    assert stopped(MATTERS["masked by another"], ["ab"])  # b computes the same as a
    assert stopped(either, ["ab"])


def test_one_draw_in_which_all_is_masked_tells_nothing() -> None:
    """Of a mask with one element, one of the draws is true, so that nothing differs."""
    x = torch.rand(1, 1, D)
    assert not stopped(MATTERS["returned"], x=x) and stopped(ENDS["masked"], x=x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.int64])
def test_values_of_any_type(dtype: torch.dtype) -> None:
    x = (torch.rand(T, W, D) * 9).to(dtype)
    assert stopped(lambda x, a, b, w, cache: masked(x.float() + cache, a), x=x)
    assert not stopped(lambda x, a, b, w, cache: x.float() + cache, x=x)


def test_values_that_few_kernels_take() -> None:
    x = torch.randint(0, 256, (T, W, D), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert stopped(lambda x, a, b, w, cache: masked(x.view(torch.uint8), a), x=x)
    assert not stopped(lambda x, a, b, w, cache: x.view(torch.uint8), x=x)


def test_numbers_of_rows_index_what_they_may() -> None:
    rows = torch.zeros(T, W, dtype=torch.int64)
    assert stopped(lambda x, a, b, w, cache: masked(w[x], a), x=rows)
    assert not stopped(lambda x, a, b, w, cache: masked(w[x + D], a), x=rows)  # no such rows


def test_a_view_in_another_order_of_memory_than_the_graphs() -> None:
    x = torch.rand(W, T, D).transpose(0, 1)
    gm, _ = built(lambda x, a, b, w, cache: x.transpose(0, 1).view(-1, D), x)
    assert ops.aten.view.default in [node.target for node in gm.graph.nodes]
    assert stopped(lambda x, a, b, w, cache: masked(x.transpose(0, 1).view(W, T, D).transpose(0, 1), a), x=x)


def test_sizes_of_values_are_the_same_whatever_they_hold() -> None:
    def run(x: Tensor, a: Tensor) -> Tensor:
        x = x.flatten(1).unflatten(1, (W, D))
        return torch.where(a.unsqueeze(-1), x, 0) + torch.arange(x.shape[0]).view(-1, 1, 1)

    gm = trace(run, torch.rand(T, W, D), torch.rand(T, W) < 0.5)
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], Tensor)]
    mask, values = sorted(inputs, key=lambda node: node.meta["val"].ndim)
    return_also(gm, ops.aten.sym_size.int, values, 0)  # as where no input is the size itself
    assert matter_only_where(gm, values, [[mask]], {})


def test_a_number_made_of_values_matters() -> None:
    gm, (x, a, *_) = built(lambda x, a, b, w, cache: (x.sum(), masked(x, a)))
    gm.graph.output_node().args = (gm.graph.output_node().args[0][1:],)
    assert matter_only_where(gm, x, [[a]], {})
    return_also(gm, ops.aten._local_scalar_dense.default, next(user for user in x.users if "sum" in user.name))
    assert not matter_only_where(gm, x, [[a]], {})


@torch.library.custom_op("v41_masks::both", mutates_args=())
def both(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return masked(x, mask), x * 2


@both.register_fake
def _(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize("result", [0, 1])
def test_of_two_results_one_may_be_masked(result: int) -> None:
    assert stopped(lambda x, a, b, w, cache: masked(both(x, a)[result], a))
    assert not stopped(lambda x, a, b, w, cache: both(x, a)[1])
    assert not stopped(lambda x, a, b, w, cache: both(x, b)[result])


def return_also(gm: GraphModule, op: Any, of: Node, *args: int) -> None:
    """A number made of `of` as one more result."""
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        made = gm.graph.call_function(op, (of, *args))
    made.meta["val"] = of.meta["val"].shape[0] if args else 0.5
    output.args = ((*output.args[0], made),)


# ---- bodies


def one_call() -> tuple[GraphModule, list[Node], Node]:
    """A region masked(x, a) + cache, the inputs of its program, and its call."""
    gm, inputs = built(lambda x, a, b, w, cache: masked(x, a) + cache)
    call = outline(gm, [n for n in gm.graph.nodes if n.op == "call_function" and n.all_input_nodes], kind="probe")
    return gm, inputs, call


def test_a_difference_ends_inside_of_a_region_or_goes_on_behind_it() -> None:
    gm, (x, a, b, _, cache), call = one_call()
    assert {x, a, cache} <= {*call.args[2:]}
    assert matter_only_where(gm, x, [[a]], {}) and not matter_only_where(gm, x, [[b]], {})
    assert not matter_only_where(gm, cache, [[a]], {})


def test_what_is_remembered_of_a_body_is_for_the_same_differences_and_masks() -> None:
    gm, (x, a, b, _, cache), _ = one_call()
    asked = ((x, a, True), (cache, a, False), (x, b, False), (x, a, True), (cache, b, False))
    remembered: dict[tuple[object, ...], bool] = {}
    assert [matter_only_where(gm, values, [[mask]], remembered) for values, mask, _ in asked] == [
        expected for *_, expected in asked
    ]
    assert 0 < len(remembered) < 2 * len(asked)  # the fourth asks what the first asked
    assert not matter_only_where(gm, x, [[a]], dict.fromkeys(remembered, False))
