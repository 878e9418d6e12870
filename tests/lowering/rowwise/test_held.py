"""Kernels that hold whole rows, interpreted: right by the rounding contract, the same bits in any batch and with every
way to spread the rows, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor
from torch.fx import GraphModule

from tests.lowering.rowwise.draws import Body, short_bodies
from tests.lowering.rowwise.running import check_contract, check_everywhere, interpret, schedules_of
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import HeldKernel, Kernel, Unsupported, generate, hold
from v41.lowering.rowwise.held import values
from v41.lowering.rowwise.read import NotRowwise
from v41.model_def.topk import topk_lowest_index
from v41.passes.same_values import random_inputs, same_bits
from v41.tools.bench.rowwise_cases import cases

CPU = torch.device("cpu")
SMALL = cases(20)  # the model's own bodies, at a twentieth of their widths where they have a width to lose
ALIKE = ("norm", "norm_rope_fp4", "norm_rope_mxfp4", "collapse_norm", "swiglu_quantise")  # to others that are quick
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in SMALL]
QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],  # an example costs a second: no shrinking
}


@cache
def made(name: str) -> tuple[GraphModule, Kernel]:
    kernel = generate(SMALL[name].body(), name)
    assert isinstance(kernel, Kernel), kernel
    return SMALL[name].body(), kernel


@pytest.mark.parametrize("name", NAMES)
def test_a_body_of_the_model_holds_to_the_contract(interpreter: Interpreter, name: str) -> None:
    body, kernel = made(name)
    inputs = SMALL[name].inputs(6, "cpu")
    results = [interpret(interpreter, kernel, inputs, schedule) for schedule in (None, schedules_of(kernel)[1])]
    check_contract(body, inputs, results[0])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_touch_each_other(interpreter: Interpreter, name: str) -> None:
    _, kernel = made(name)
    case = SMALL[name]
    inputs = case.inputs(4, "cpu")
    whole = interpret(interpreter, kernel, inputs)
    alone = interpret(interpreter, kernel, [x[2:3] if i < case.per_row else x for i, x in enumerate(inputs)])
    assert all(same_bits(a, b[2:3]) for a, b in zip(alone, whole, strict=True))
    for tensor in inputs[: case.per_row]:
        tensor[3] = float("nan")
    dirty, keep = interpret(interpreter, kernel, inputs), torch.arange(4) != 3
    assert all(same_bits(a[keep], b[keep]) for a, b in zip(dirty, whole, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_launch_nothing(name: str) -> None:
    _, kernel = made(name)
    results = kernel.launch(*SMALL[name].inputs(0, "cpu"))  # would fail without a GPU if it launched
    assert all(result.shape[0] == 0 for result in results)


def test_all_batches_run_the_same_code_unless_a_product_tiles_them() -> None:
    for name in ("norm_rope_fp8", "pooled", "router"):
        kernel = made(name)[1]
        assert isinstance(kernel, HeldKernel)
        found = {kernel.schedule_for(rows, CPU) for rows in (1, 7, 64, 4096, 1 << 20)}
        assert (len(found) == 1) is (kernel.front is None)


# ---- bodies nobody wrote


def check_drawn(interpreter: Interpreter, drawn: Body) -> bool:
    """Whether it was generated; it must be right then, and have a reason otherwise."""
    fn, rows, weights = drawn
    body = trace(fn, *rows, static=weights, backed=True)
    try:
        kernel = hold(body)
    except NotRowwise as refusal:
        assert refusal.reason and refusal.node
        return False
    check_everywhere(interpreter, body, kernel, rows=3)
    return True


def check_fired(interpreter: Interpreter, examples: int) -> None:
    fired: list[bool] = []

    @settings(max_examples=examples, **QUIET)
    @given(short_bodies())
    def draw(drawn: Body) -> None:
        fired.append(check_drawn(interpreter, drawn))

    draw()
    assert sum(fired) >= 0.8 * len(fired)


def test_drawn_bodies(interpreter: Interpreter) -> None:
    check_fired(interpreter, 4)


@pytest.mark.slow
def test_many_drawn_bodies(interpreter: Interpreter) -> None:
    check_fired(interpreter, 300)


# ---- what is special


def held(fn: Callable[..., Any], rows: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> tuple[GraphModule, Any]:
    body = trace(fn, *rows, static=weights, backed=True)
    return body, hold(body)


@pytest.mark.parametrize("long", [False, True], ids=["registers", "front"])
def test_products_with_many_columns(interpreter: Interpreter, long: bool) -> None:
    width, columns = (320, 80) if long else (24, 5)

    def project(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = x.float() @ w + bias
        return y.sigmoid().to(x.dtype), y.amax(-1, keepdim=True)

    weights = [torch.randn(width, columns) / width**0.5, torch.randn(columns)]
    body, kernel = held(project, [torch.randn(7, width).bfloat16()], weights)
    assert (kernel.front is not None) is long
    check_everywhere(interpreter, body, kernel)


def test_ranks_take_the_lower_index_among_equals_and_nan_first(interpreter: Interpreter) -> None:
    def best(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, picks = x.topk(4)
        return values, picks, topk_lowest_index(x, 4)

    _, kernel = held(best, [torch.randn(7, 24)])
    x = torch.randint(-3, 3, (6, 24)).float()
    x[2, 5], x[3] = float("nan"), 1.0
    values, picks, lowest = interpret(interpreter, kernel, [6, x] if kernel.inputs[0] is None else [x])
    keys = x.nan_to_num(nan=1e30)
    order = keys.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(picks, order) and torch.equal(values.nan_to_num(nan=1e30), keys.gather(-1, order))
    assert torch.equal(lowest[[0, 1, 3, 4, 5]], order[[0, 1, 3, 4, 5]])


def test_ranks_of_ranks(interpreter: Interpreter) -> None:
    """The second picks by an index as long as the first one's picks."""

    def twice(x: Tensor) -> Tensor:
        best = x.gather(-1, topk_lowest_index(x, 6))
        return best.gather(-1, topk_lowest_index(-best, 6))

    body, kernel = held(twice, [torch.randn(7, 24)])
    check_everywhere(interpreter, body, kernel)


def test_what_is_picked_out_of_a_product_is_not_read_again(interpreter: Interpreter) -> None:
    """Bits that a sum might lose: signed zeros, NaN; and a float that only the product's rounding makes."""

    def best(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x.float() @ w).clamp(max=0.0).bfloat16()
        return scores.gather(-1, topk_lowest_index(scores.float(), 6)), (scores * -1.0).gather(-1, scores.topk(3)[1])

    body, kernel = held(best, [torch.randn(7, 320).bfloat16()], [torch.randn(320, 80) / 18])
    assert kernel.front is not None and kernel.source.count("add_up(partials") == 1
    check_everywhere(interpreter, body, kernel)
    inputs = random_inputs(body, 4)
    x = next(i for i, arg in enumerate(inputs) if isinstance(arg, Tensor) and arg.dim() == 2 and arg.shape[1] == 320)
    inputs[x][1], inputs[x][2] = 0.0, float("nan")
    for ours, eager in zip(interpret(interpreter, kernel, inputs), body(*inputs), strict=True):
        assert torch.equal(ours[1].view(torch.int16), eager[1].view(torch.int16)) and ours[2].isnan().all()


def test_rows_too_large_for_a_program_fall_into_the_parts_of_their_results(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "LARGEST", 600)
    body = SMALL["stream_gate"].body()  # rows of [4, 256]
    kernel = hold(body)
    assert kernel.parts == 4 and kernel.elements == 256 and "split     4 programs a row" in kernel.source
    assert [grid for grid, _ in kernel.prepare(random_inputs(body, 6)).launches] == [(6, 4)]
    check_everywhere(interpreter, body, kernel)

    def normed(x: Tensor) -> tuple[Tensor, Tensor]:  # what all parts need of the whole row, each computes
        y = x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + 1e-6)
        return y, y.softmax(-1)

    body, kernel = held(normed, [torch.randn(7, 3, 200)])
    assert kernel.parts == 3
    check_everywhere(interpreter, body, kernel)


def test_a_damaged_index_reads_inside_of_its_table(interpreter: Interpreter) -> None:
    look_up = lambda i, table: torch.nn.functional.embedding(i[:, 0], table) * 2
    body, kernel = held(look_up, [torch.randint(0, 5, (7, 2))], [torch.randn(9, 40)])
    inputs = random_inputs(body, 4)
    at = next(i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.dtype == torch.int64)
    clean = interpret(interpreter, kernel, inputs)
    inputs[at][2] = 1 << 40
    (dirty,) = interpret(interpreter, kernel, inputs)
    assert torch.equal(dirty[[0, 1, 3]], clean[0][[0, 1, 3]]) and dirty[2].isfinite().all()


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (lambda x: x.cumsum(-1), [(7, 64)], "does not know"),
        (lambda x: x - x.sum(0, keepdim=True), [(7, 64)], "row axis"),
        (lambda x: x.double() * 2, [(7, 64)], "float64"),
        (lambda x: x**2.5, [(7, 64)], "power 2.5"),
        (lambda x: x.to(torch.float8_e4m3fn).float(), [(7, 64)], "beyond its largest number"),
        (lambda x: x.softmax(-1), [(7, 20000)], "values of a row at once"),
        (lambda x: x.topk(40)[0], [(7, 64)], "more than 32"),
        (lambda x: (x @ x.new_ones(96, 64)) @ x.new_ones(64, 96), [(7, 96)], "second long product"),
    ],
    ids=["scan", "mixes-rows", "fp64", "odd-power", "fp8-overflow", "long-row", "many-ranks", "two-products"],
)
def test_refuses_with_a_reason(fn: Callable[..., Tensor], shapes: list[tuple[int, ...]], reason: str) -> None:
    with pytest.raises(NotRowwise, match=reason):
        hold(trace(fn, *(torch.randn(shape) for shape in shapes), backed=True))


def test_what_neither_way_reads_is_refused_with_the_reason_of_the_first() -> None:
    refusal = generate(trace(lambda x: x.cumsum(-1), torch.randn(7, 64), backed=True))
    assert isinstance(refusal, Unsupported) and refusal.op == "aten.cumsum.default", refusal


def test_short_rows_are_held_and_long_ones_passed_over() -> None:
    norm = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    short, long = (generate(trace(norm, torch.randn(7, width), backed=True)) for width in (96, 24576))
    assert isinstance(short, HeldKernel) and not isinstance(long, HeldKernel) and isinstance(long, Kernel)
