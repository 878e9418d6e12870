"""Helpers of these tests: a generated kernel run by the interpreter, and the rounding contract it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import HeldKernel, Kernel, Schedule, pass_over
from v41.lowering.rowwise.held.launch import Spread
from v41.lowering.tuned import copied
from v41.passes.same_values import Runner, random_inputs, same_bits

aten = torch.ops.aten
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SCHEDULES = (  # rows split, whole, between; columns of the later pass shared, with a share that ends early
    Schedule(1, 1, 4, 256),
    Schedule(4, 1 << 20, 4, 64),
    Schedule(2, 2, 4, 128),
    Schedule(2, 1, 4, 32, shares=3),
)
SPREADS = (Spread(1, 1), Spread(4, 4), Spread(16, 2))
FRONTS = (  # runs and columns by other programs, in one launch and two; all of it by one program
    Spread(1, 4, 16, 64, 1),
    Spread(4, 4, 16, 64, 1, split=True),
    Spread(2, 4, 16, 128, 1 << 20, split=True),
    Spread(8, 4, 32, 64, 2),
)
LAST = 64  # ulps that the order of sums may be worth after a few steps
FLIPS = 0.02  # of quantised values: where a last bit tips a rounding, eager's own differs by device


def schedules_of(kernel: Kernel) -> Sequence[Any]:
    """Some of each kind."""
    if isinstance(kernel, HeldKernel):
        return SPREADS if kernel.front is None else FRONTS
    return SCHEDULES


def interpret(interpreter: Interpreter, kernel: Kernel, inputs: Sequence[Any], schedule: Any = None) -> list[Tensor]:
    """The kernel's outputs, poisoned before it runs."""
    call = kernel.prepare(inputs, schedule)
    for output in call.outputs:
        output.fill_(float("nan") if output.is_floating_point() else 77)
    # each of its own, laid out as it was: views of one memory as two types do not travel
    arguments = [copied(arg) for arg in call.arguments]
    for grid, constants in call.launches:
        arguments = [
            *interpreter.launch(kernel.path, kernel.name, grid, *arguments, **constants),
            *(arg for arg in arguments if not isinstance(arg, Tensor)),
        ]
    left = [after for arg, after in zip(call.arguments, arguments, strict=True) if arg is call.counters is not None]
    assert not any(counters.any() for counters in left), "a launch leaves arrival counters behind"
    first = next((i for i, arg in enumerate(call.arguments) if arg is call.outputs[0]), 0)
    return arguments[first : first + len(call.outputs)]


def check_contract(body: GraphModule, inputs: Sequence[Any], results: Sequence[Tensor]) -> None:
    """RMS error against fp64 at most 1.5 times eager's, or one ulp of the output's type at its RMS.

    Integers, and what a body makes of the bits of floats, have no fp64: nearly all must be eager's.
    """
    doubles = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in inputs]
    eager = body(*inputs)
    truth = eager if reads_bits(body) else Runner(body, exact=True).run(*doubles)
    for i, (ours, theirs, true) in enumerate(zip(results, eager, truth, strict=True)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if truth is eager or not ours.is_floating_point():
            size = theirs.double().abs() + rms(theirs.double().nan_to_num())
            near = ours.double().sub(theirs.double()).abs() <= LAST * ULP.get(ours.dtype, 0) * size
            agree = (near | (ours == theirs) | (ours.isnan() & theirs.isnan())).double().mean().item()
            assert agree >= 1 - FLIPS, f"output {i}: only {agree:.1%} are eager's"
            continue
        limit = max(1.5 * rms(theirs.double() - true), ULP[ours.dtype] * rms(true))
        assert rms(ours.double() - true) <= limit, f"output {i}: {rms(ours.double() - true)} > {limit}"


def reads_bits(body: GraphModule) -> bool:
    """Whether `body` takes floats for integers somewhere, or rounds to steps so wide that an ulp tips into the next."""
    eight = (torch.float8_e4m3fn, torch.float8_e5m2)
    return any(node.target is aten.view.dtype or getattr(node.meta.get("val"), "dtype", None) in eight
               for node in body.graph.nodes)  # fmt: skip


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def generated(
    fn: Callable[..., Any], rows: Sequence[Tensor], weights: Sequence[Tensor] = (), how: Callable[..., Any] = pass_over
) -> tuple[GraphModule, Any]:
    """The body of `fn` and its kernel, of the kind that `how` makes."""
    body = trace(fn, *rows, static=weights, backed=True)
    return body, how(body)


def check_everywhere(interpreter: Interpreter, body: GraphModule, kernel: Kernel, rows: int = 5) -> list[Tensor]:
    """Holds to the contract, and gives the same bits with every schedule."""
    schedules = schedules_of(kernel)
    many = random_inputs(body, 24)  # enough for an RMS to mean something
    check_contract(body, many, interpret(interpreter, kernel, many, schedules[1]))
    inputs = random_inputs(body, rows)
    results = [interpret(interpreter, kernel, inputs, schedule) for schedule in schedules]
    for schedule, other in zip(schedules, results, strict=True):
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True)), schedule
    return results[0]
