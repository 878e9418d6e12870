"""Launches of several kernels of one file, run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import Kernel
from v41.lowering.templates.topk.launch import Step


def interpret(interpreter: Interpreter, kernel: Kernel, steps: Sequence[Step]) -> None:
    """Runs `steps`; their tensors are afterwards what they would be."""
    for step in steps:
        tensors = [arg for arg in step.arguments if isinstance(arg, Tensor)]
        before = [tensor.clone() for tensor in tensors]  # of their own: views of one memory as two types do not travel
        copies = iter(before)
        sent = [next(copies) if isinstance(arg, Tensor) else arg for arg in step.arguments]
        left = interpreter.launch(kernel.path, step.kernel, step.grid, *sent, **step.constants)
        for tensor, was, now in zip(tensors, before, left, strict=True):
            changed = was.view(-1).ne(now.view(-1)) if was.dtype.is_floating_point else was.view(-1) != now.view(-1)
            tensor.view(-1)[changed] = now.view(-1)[changed]  # one tensor may be there twice
