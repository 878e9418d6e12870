"""Kernels that make what they add up: interpreted on two processes, the bits of what reads the sum alone, on the sum of
parts as eager makes them; bodies that cannot be made as they are sent are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.lowering.ranks import Ranks, shifted
from tests.lowering.rowwise.boundaries import rms_norm
from tests.lowering.test_all_reduce import WAYS, added, check_calls, summed
from tests.lowering.test_all_reduce_compiles import launches_of, workspace
from v41.lowering.cross_compile import compile_for
from v41.lowering.rowwise import Schedule, Unsupported, pass_over
from v41.lowering.rowwise.schedule import LATER
from v41.lowering.templates.all_reduce import SummingKernel, generate
from v41.lowering.templates.all_reduce.launch import MOST
from v41.regions import behind_sum, front_of_sum
from v41.tools.bench.seam import captured

pytestmark = pytest.mark.usefixtures("fake_group")
COUNT, WIDTH, PICKS = 2, 128, 3


def gathered(y: Tensor, places: Tensor, shared: Tensor) -> Tensor:
    return (y[places].view(-1, PICKS, y.shape[1]).float().sum(1) + shared.float()).to(y.dtype)


def weighed(y: Tensor, places: Tensor, w: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    rows = y[places.view(-1, PICKS)].float() * w.unsqueeze(-1)
    return rows.sum(1).bfloat16() + (torch.sigmoid(gate) * shared.float()).bfloat16()


def in_place(y: Tensor, shared: Tensor) -> Tensor:
    return y.view(-1, PICKS, y.shape[1]).sum(1, dtype=torch.float32) + shared.float()


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def permuted(rows: int) -> Tensor:
    return torch.randperm(rows * PICKS)


FRONTS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {  # what makes a part, of what
    "gathered": (gathered, lambda T: [bf16(PICKS * T, WIDTH), permuted(T), bf16(T, WIDTH)]),
    "weighed": (weighed, lambda T: [bf16(PICKS * T, WIDTH), permuted(T).int(), torch.rand(T, PICKS), torch.rand(T, 1),
                                    bf16(T, WIDTH)]),
    "in their places, in fp32": (in_place, lambda T: [bf16(PICKS * T, WIDTH), bf16(T, WIDTH)]),
    "odd width": (gathered, lambda T: [bf16(PICKS * T, 100), permuted(T), bf16(T, 100)]),
}  # fmt: skip


class Body(nn.Module):
    """A residual and its norm behind the sum of what `front` makes."""

    def __init__(self, front: Callable[..., Tensor], count: int) -> None:
        super().__init__()
        self.front, self.count = front, count

    def forward(self, a: Any, b: Any, c: Any, d: Any = None, e: Any = None, f: Any = None, g: Any = None) -> Any:
        given = [each for each in (a, b, c, d, e, f, g) if each is not None]  # torch.export knows arguments by name
        own, (x, w) = given[: self.count], given[self.count :]
        y = summed(self.front(*own))
        return x + y, rms_norm(x + y, w)


def body_of(front: Callable[..., Tensor], own: Sequence[Tensor], width: int = WIDTH) -> GraphModule:
    """The body of a region that adds up what `front` makes of `own`, tensors of 7 rows or several times that."""
    module = Body(front, len(own))
    given = [*own, bf16(7, width), torch.rand(width)]
    times = [len(each) // 7 for each in own] + [1]
    return captured(module, tuple(given), times)


@cache
def made(name: str) -> tuple[GraphModule, SummingKernel]:
    front, own = FRONTS[name]
    tensors = own(7)
    body = body_of(front, tensors, tensors[-1].shape[-1])
    kernel = generate(body, COUNT)
    assert isinstance(kernel, SummingKernel), kernel
    return body, kernel


def inputs_of(name: str, rows: int) -> list[list[Tensor]]:
    """For each rank: what the part is made of differs, all else is the same."""
    torch.manual_seed(rows)
    own = [FRONTS[name][1](rows) for _ in range(COUNT)]
    width = own[0][-1].shape[-1]
    return [[*each, x, w] for x, w in [(bf16(rows, width), torch.rand(width))] for each in own]


def expected(ranks: Ranks, name: str, inputs: Sequence[Sequence[Tensor]], calls: int) -> list[list[Tensor]]:
    body, _ = made(name)
    front = front_of_sum(body)
    assert front is not None
    alone, found = pass_over(behind_sum(body), "alone"), []
    for call in range(calls):
        given = [shifted(each, call) for each in inputs]
        total = added([front(*each[:-2])[0] for each in given])
        (results,) = ranks.run(alone, [[total, *given[0][-2:]]] * COUNT, Schedule(1, 1, 2, 64), present=[0])
        found.append(results[0])
    return found


QUICK = {("gathered", "one shot"), ("weighed", "two shots, blocks")}


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=[pytest.mark.slow] * ((name, way) not in QUICK), id=f"{name}-{way}")
     for name in FRONTS for way in WAYS],
)  # fmt: skip
def test_the_bits_of_parts_that_lie_in_memory(ranks: Ranks, name: str, way: str) -> None:
    ranks.fresh()
    inputs = inputs_of(name, 3)
    check_calls(ranks.run(made(name)[1], inputs, WAYS[way], calls=2), expected(ranks, name, inputs, 2))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_calls_while_ranks_drift_apart(ranks: Ranks, way: str) -> None:
    ranks.fresh()
    inputs = inputs_of("gathered", 2)
    results = ranks.run(made("gathered")[1], inputs, WAYS[way], calls=40, sleeps=[0.0, 0.003])
    check_calls(results, expected(ranks, "gathered", inputs, 40))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one shot, tall, two launches", "two shots, blocks"])
def test_a_row_of_nan_on_one_rank_leaves_other_rows_their_bits(ranks: Ranks, way: str) -> None:
    inputs = inputs_of("gathered", 5)
    results = []
    for value in (0.0, float("nan")):
        ranks.fresh()
        inputs[-1][2][1] = value  # of the shared expert's row 1
        results.append(ranks.run(made("gathered")[1], inputs, WAYS[way])[0][0])
    rest = torch.arange(5) != 1
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean[rest], dirty[rest]) and dirty[1].isnan().all()


def test_the_kernel_reads_no_part_and_writes_none() -> None:
    _, kernel = made("gathered")
    assert (kernel.part, kernel.sent, kernel.folded) == (None, (0, 1, 2), {1: PICKS})
    assert "part_ptr" not in kernel.source and "total_ptr" not in kernel.source
    read = " ".join(line for line in kernel.source.splitlines() if line.startswith("reads"))
    assert f"bf16[T,{PICKS},{WIDTH}]" in read and f"i64[T,{PICKS}]" in read


def test_rows_beyond_one_call_are_named_by_their_place_in_all_of_the_table() -> None:
    body, kernel = made("gathered")
    kernel.bind(workspace(COUNT))
    own, rows = FRONTS["gathered"][1], MOST + 3
    given = [*own(rows), bf16(rows, WIDTH), torch.rand(WIDTH)]
    last = [each for each in kernel.prepare(given).launches if each.function == kernel.name][-1]  # type: ignore[attr-defined]
    table, places, shared = last.arguments[:3]  # type: ignore[attr-defined]
    assert table.shape[0] == rows * PICKS and places.shape == (3, PICKS) and shared.shape[0] == 3
    assert torch.equal(places.flatten(), given[1][-3 * PICKS :])
    kernel.workspace = None
    assert body is not None


def test_no_product_is_fused_into_a_sum_on_either_way() -> None:
    _, kernel = made("weighed")
    kernel.bind(workspace(COUNT))
    asked = []
    for rows in (3, MOST):
        asked += launches_of(kernel, [*FRONTS["weighed"][1](rows), bf16(rows, WIDTH), torch.rand(WIDTH)], "sm_90")
    kernel.workspace = None
    asked = [each for each in asked if each.constants.get("STEP") != LATER and not each.kernel.endswith("_gather")]
    assert [each.kernel.removeprefix(kernel.name) for each in asked] == ["", "_scatter", ""]
    for request, fact in zip(asked[:2], compile_for(asked[:2]), strict=True):
        assert "fma.rn.f32" not in fact.ptx and fact.ptx.count("mul.rn.f32") >= PICKS, request.kernel


REFUSED: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "from whole rows": (lambda y: rms_norm(y, y.new_ones(WIDTH)), lambda: [bf16(7, WIDTH)]),
    "rows of what the kernel computes": (
        lambda y, places: y.exp()[places],
        lambda: [bf16(7, WIDTH), torch.randperm(7)],
    ),
    "not one row of the sum's width": (lambda y: (y * 2).view(-1, WIDTH), lambda: [bf16(7, 2, WIDTH // 2)]),
    "does not know": (lambda y: y.cumsum(-1), lambda: [bf16(7, WIDTH)]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_a_reason(reason: str) -> None:
    front, own = REFUSED[reason]
    refusal = generate(body_of(front, own()), COUNT)
    assert isinstance(refusal, Unsupported) and reason in refusal.reason, refusal


def test_a_table_that_is_read_as_rows_too_is_refused() -> None:
    """Rows beyond one call are cut off for who reads rows, and named by their place in all of it for who gathers."""

    class Both(nn.Module):
        def forward(self, x: Tensor, places: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = x + summed(x[places])
            return y, rms_norm(y, w)

    given = (bf16(7, WIDTH), torch.randperm(7), torch.rand(WIDTH))
    refusal = generate(captured(Both(), given, 2), COUNT)
    assert isinstance(refusal, Unsupported) and (refusal.node, refusal.reason[:10]) == ("x", "is a table"), refusal
