"""Bodies at the edges of what is drawn: integers and booleans as torch has them, constants, fp8 read and written, axes
without elements, numbers that a run brings, products whose terms no power of two cuts evenly, parts of a row joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lowering.rowwise.running import FRONTS, check_contract, check_everywhere, generated, interpret
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import HeldKernel, Unsupported, generate, hold, pass_over
from v41.lowering.rowwise.held import launch, values
from v41.lowering.rowwise.read import NotRowwise
from v41.passes.same_values import random_inputs, same_bits

WHOLE = torch.randint(0, 99, (7, 8))


def check_equal(interpreter: Interpreter, fn: Callable[..., Any], given: Tensor, how: Any = hold) -> None:
    """The kernel's results of `given` are eager's to the last bit."""
    body, kernel = generated(fn, [given], how=how)
    inputs = [given if isinstance(each, Tensor) else each for each in random_inputs(body, len(given))]
    for ours, eager in zip(interpret(interpreter, kernel, inputs), body(*inputs), strict=True):
        assert same_bits(ours, eager)


INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "one of two numbers": lambda i: torch.where(i > 40, 1, 0) * 1000003 * 1000003,
    "one of two numbers, shifted": lambda i: torch.where(i > 40, 1, 0) << 40,
    "not one of two booleans": lambda i: ~torch.where(i > 40, torch.ones_like(i > 0), torch.zeros_like(i > 0)),
    "a square": lambda i: (i * 1000003) ** 2,
    "a cube": lambda i: (i * 10007) ** 3,
    "a scaled sum": lambda i: torch.add(i, i * 100000007, alpha=3),
    "sums of booleans": lambda i: (i > 30) + (i > 60),
    "products of booleans": lambda i: (i > 30) * (i < 60),
    "rounded down and up": lambda i: torch.floor(i) + torch.ceil(i),
    "any of multiples of 2^32": lambda i: (i * (1 << 32)).any(-1),
    "any of fractions": lambda i: (i * 0.01).any(-1),
    "the most of bytes": lambda i: (i.to(torch.int8).amax(-1, keepdim=True) * 100) > 50,
    "true beside a comparison": lambda i: (i > 40) == True,  # noqa: E712
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_booleans_are_what_torch_makes_of_them(interpreter: Interpreter, name: str) -> None:
    check_equal(interpreter, INTEGERS[name], WHOLE)


CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "a power of a constant": lambda x: x * torch.ones_like(x).exp(),
    "compared constants": lambda x: torch.where(torch.full_like(x, 0.25) > 0, x, x + 1),
    "ranks of a constant": lambda x: torch.full_like(x, 0.25).topk(3)[0] + x[:, :3],
    "ranks of a repeated number": lambda x: x[:, :1].expand(-1, 20).topk(3)[0] + x[:, :3],
    "no elements joined": lambda x: torch.cat((x * 2, x[:, :0] * 1), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_values_like_others(interpreter: Interpreter, name: str) -> None:
    body, kernel = generated(CONSTANTS[name], [torch.randn(7, 40)], how=hold)
    check_everywhere(interpreter, body, kernel)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_read_where_rows_are_padded(interpreter: Interpreter, dtype: torch.dtype) -> None:
    check_equal(interpreter, lambda x: (x.float() * 2, x.to(torch.bool), x.half()), torch.randn(7, 33).to(dtype))


def test_fp8_becomes_the_other_fp8_by_way_of_fp32(interpreter: Interpreter) -> None:
    """Which is all that Triton compiles."""
    chain = lambda x: x.clamp(-40, 40).to(torch.float8_e4m3fn).to(torch.float8_e5m2)
    check_equal(interpreter, chain, torch.randn(7, 64))
    _, kernel = generated(chain, [torch.randn(7, 64)], how=hold)
    assert ".to(tl.float32)" in kernel.source.split(".to(tl.float8e4nv)")[1]


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows as a factor": (lambda x: x * x.shape[0], "not fixed"),
    "rows as a divisor": (lambda x: x.sum(-1, keepdim=True) / x.shape[0], "not fixed"),
    "full of rows": (lambda x: x + torch.full_like(x, x.shape[0]), "not fixed"),
    "numbers of rows": (lambda x: x + torch.arange(x.shape[0])[:, None], "not fixed"),
    "rows as a bound": (lambda x: x.clamp(max=x.shape[0]), "not fixed"),
    "rows as a result": (lambda x: (x * 2, x.shape[0]), "no row axis in output 1"),
    "nothing returned": (lambda x: (x * 2, x[:, :0] * 1), "returns no elements"),
    "nothing summed": (lambda x: x + x[:, :0].sum(-1, keepdim=True), "folds no elements"),
    "a factor below bytes": (lambda x: x.to(torch.uint8) * -1, "takes -1 for a number of torch.uint8"),
    "a term above bytes": (lambda x: x.to(torch.int8) + 200, "takes 200 for a number of torch.int8"),
    "all bits shifted": (lambda x: x.to(torch.int64) << 64, "shifts by"),
    "an integer's root": (lambda x: (x.to(torch.int64) ** 4), "power 4"),
    "true among bits": (lambda x: (x > 0) & True, "bits of numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused_by_both(name: str) -> None:
    fn, reason = REFUSED[name]
    body = trace(fn, torch.randn(7, 64), backed=True)
    with pytest.raises(NotRowwise, match=reason):
        hold(body)
    with pytest.raises(NotRowwise):
        pass_over(body)
    assert isinstance(generate(body), Unsupported)


@pytest.mark.parametrize(("depth", "runs"), [(17 * 64, 1), (34 * 64, 2), (45 * 64, 15), (80 * 64, 16)])
def test_a_sum_of_any_length_is_cut_into_whole_runs(interpreter: Interpreter, depth: int, runs: int) -> None:
    """Of 16 runs, the last would reach beyond 45 blocks."""
    weights = torch.randn(depth, 33) / depth**0.5
    body, kernel = generated(lambda x, w: (x.float() @ w).softmax(-1), [torch.randn(7, depth).bfloat16()], [weights],
                             how=hold)  # fmt: skip
    assert isinstance(kernel, HeldKernel) and kernel.front is not None and kernel.front[2] == runs
    check_everywhere(interpreter, body, kernel, rows=3)


@pytest.mark.parametrize("name", ["constant", "one column", "one number"])
def test_what_a_product_multiplies_may_repeat(interpreter: Interpreter, name: str) -> None:
    fn = {
        "constant": lambda x, w: x @ torch.ones(320, 40),
        "one column": lambda x, w: x @ w[:, :1].expand(-1, 40),
        "one number": lambda x, w: torch.ones_like(x) @ w + x[:, :40],
    }[name]
    body, kernel = generated(fn, [torch.randn(7, 320)], [torch.randn(320, 40) / 18], how=hold)
    assert kernel.front is not None
    inputs = random_inputs(body, 5)
    results = [interpret(interpreter, kernel, inputs, schedule) for schedule in FRONTS[:2]]
    check_contract(body, inputs, results[0])
    assert same_bits(results[0][0], results[1][0])


JOINED: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "side by side": (lambda x, y: torch.cat((x * 2, y.softmax(-1)), 1), [(7, 2, 256), (7, 2, 256)]),
    "many side by side": (lambda x, y: torch.cat((x * 2, y + 1), 1), [(7, 9, 256), (7, 23, 256)]),
    "of several rows each": (lambda x: x * x.sum(3, keepdim=True), [(7, 4, 3, 256)]),
    "of a long axis": (lambda x: x.softmax(-1), [(7, 48, 48)]),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_program_with_a_part_of_a_row_stays_in_it(
    interpreter: Interpreter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "LARGEST", 300)
    monkeypatch.setattr(values, "LONG", 16)
    fn, shapes = JOINED[name]
    body = trace(fn, *map(torch.randn, shapes), backed=True)
    kernel = hold(body)
    assert kernel.parts > 1
    inputs = random_inputs(body, 6)
    results = interpret(interpreter, kernel, inputs)
    check_contract(body, inputs, results)


def test_a_product_has_as_many_stages_as_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fp32 rows and weights, 4 of 128 rows and columns take 196,608 bytes: an A100 has less."""
    body, kernel = generated(lambda x, w: (x @ w).softmax(-1), [torch.randn(7, 320)], [torch.randn(320, 40)], how=hold)
    for shared, stages in ((227 << 10, 4), (163 << 10, 3), (64 << 10, 2)):
        monkeypatch.setattr(launch, "shared_memory", lambda device, shared=shared: shared)
        call = kernel.prepare(random_inputs(body, 4000))
        assert {constants["STAGES"] for _, constants in call.launches} == {stages}


def test_indices_beyond_int32_are_int64(interpreter: Interpreter) -> None:
    count = lambda x: x.to(torch.int64) + torch.arange(0, 20_000_000_000, 2_000_000_000)
    check_equal(interpreter, count, torch.randn(7, 10))
    look_up = lambda i, table: torch.nn.functional.embedding(i, table)
    body, kernel = generated(look_up, [torch.zeros(7, 2, dtype=torch.int32)], [torch.randn(9, 64)], how=hold)
    assert "int64" not in loaded(kernel.source)
    table = next(n for n in body.graph.nodes if getattr(n.meta.get("val"), "shape", ()) == (9, 64))
    table.meta["val"] = table.meta["val"].new_empty(1 << 26, 64)  # 2^32 elements, which are nowhere
    assert "67108863).to(tl.int64) * 64" in loaded(hold(body).source)


def loaded(source: str) -> str:
    """The line that reads the table."""
    return next(line for line in source.splitlines() if "tl.load(" in line and "tl.minimum(" in line)
