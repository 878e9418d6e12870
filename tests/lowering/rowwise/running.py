"""Helpers of these tests: a generated kernel run by the interpreter, and the rounding contract it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import GeneratedKernel, Schedule, generate
from v41.passes.same_values import Runner, random_inputs

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SCHEDULES = (  # rows split, whole, between; columns of the later pass shared, with a share that ends early
    Schedule(1, 1, 4, 256),
    Schedule(4, 1 << 20, 4, 64),
    Schedule(2, 2, 4, 128),
    Schedule(2, 1, 4, 32, shares=3),
)


def interpret(
    interpreter: Interpreter, kernel: GeneratedKernel, inputs: Sequence[Any], schedule: Schedule | None = None
) -> list[Tensor]:
    """The kernel's outputs, poisoned before it runs."""
    call = kernel.prepare(inputs, schedule)
    for output in call.outputs:
        output.fill_(float("nan"))
    arguments = call.arguments
    for grid, constants in call.launches:
        arguments = [
            *interpreter.launch(kernel.path, kernel.name, grid, *arguments, **constants),
            *(arg for arg in arguments if not isinstance(arg, Tensor)),
        ]
    (counters,) = (arg for arg in arguments if isinstance(arg, Tensor) and arg.dtype == torch.int32)
    assert not counters.any(), "a launch leaves arrival counters behind"
    first = sum(what is not None for what in kernel.inputs)
    return arguments[first : first + len(call.outputs)]


def check_contract(body: GraphModule, inputs: Sequence[Any], results: Sequence[Tensor]) -> None:
    """RMS error against fp64 at most 1.5 times eager's, or one ulp of the output's type at its RMS."""
    doubles = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in inputs]
    truth, eager = Runner(body, exact=True).run(*doubles), body(*inputs)
    for i, (ours, theirs, true) in enumerate(zip(results, eager, truth, strict=True)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        limit = max(1.5 * rms(theirs.double() - true), ULP[ours.dtype] * rms(true))
        assert rms(ours.double() - true) <= limit, f"output {i}: {rms(ours.double() - true)} > {limit}"


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def generated(
    fn: Callable[..., Any], rows: Sequence[Tensor], weights: Sequence[Tensor] = ()
) -> tuple[GraphModule, GeneratedKernel]:
    """The body of `fn` and its kernel."""
    body = trace(fn, *rows, static=weights, backed=True)
    kernel = generate(body)
    assert isinstance(kernel, GeneratedKernel), kernel
    return body, kernel


def check_everywhere(
    interpreter: Interpreter, body: GraphModule, kernel: GeneratedKernel, rows: int = 5
) -> list[Tensor]:
    """Holds to the contract, and gives the same bits with every schedule."""
    many = random_inputs(body, 24)  # enough for an RMS to mean something
    check_contract(body, many, interpret(interpreter, kernel, many, SCHEDULES[1]))
    inputs = random_inputs(body, rows)
    results = [interpret(interpreter, kernel, inputs, schedule) for schedule in SCHEDULES]
    for schedule, other in zip(SCHEDULES, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), schedule
    return results[0]
